"""Agent programs: programs that speak to a model API, whose requests are the turns of an episode."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from engine.schemas.base import Bytes, Contract, Seconds
from engine.schemas.sections import SpecSection

AllowedParameter = Literal[
    "frequency_penalty", "max_tokens", "presence_penalty", "stop", "temperature", "top_k", "top_p"
]
"""Parameters of sampling that requests may set, by the spec's leave."""
IgnoredField = Literal["name", "parallel_tool_calls", "response_format", "stop", "strict", "tool_choice", "verbosity"]
"""Fields that may change the reply at a model API, and that requests may set without effect, by the spec's leave."""


class AgentSandbox(Contract):
    """The sandbox of `agent.run`: bubblewrap, in which only the endpoint can be reached."""

    read: list[str] = Field(default_factory=list)
    """Folders and files that the program may read, besides the system's programs, the spec's folder and the virtual
    environment of the engine; relative to the spec's folder. Dot files, runs, stores, specs and the tasks' files in the
    spec's folder are hidden unless they are written here."""
    disk: Bytes = 1_000_000_000
    """Maximum bytes of all files that it writes, in /work (its home) and /tmp together, which are in memory. Each file
    counts at least 4096 bytes."""
    processes: int = Field(default=256, ge=2)
    """Maximum number of processes and threads."""
    memory: Bytes | None = None
    """Maximum address space of each of its processes. Default: no limit."""


class AgentSpec(SpecSection):
    """The program of the action `run_agent`: `run` or `use`. Without both, programs that run elsewhere open the
    episodes (`engine serve --api`). Its requests are the turns."""

    NULLABLE = True
    run: str | None = Field(default=None, min_length=1)
    """A shell command, which runs in the spec's folder. It finds OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in
    its environment, and its task as JSON in EPISODE_TASK and in the file EPISODE_TASK_FILE."""
    use: str | None = Field(default=None, min_length=1)
    """Instead of `run`: `package.module:name` of a coroutine function, which is called with `task`, `base_url`, `key`
    and `model`, and returns a reward, rewards by name, or None."""
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")
    """Other keyword arguments of `use`."""
    timeout: Seconds = 600.0
    """Its time from start to end; then it is killed."""
    idle: Seconds | None = None
    """Its time without a request; then it ends like one that is out of time. When left out: the whole `timeout`."""
    env: dict[str, str] = Field(default_factory=dict)
    """Other variables of its environment."""
    sandbox: AgentSandbox | None = None
    """Where `run` runs apart from the machine; `sandbox: {}` takes the defaults. Left out: with the engine's files and
    network."""
    allow: list[AllowedParameter] = Field(default_factory=list)
    """Parameters of sampling that requests may set. Of the others, `stop` is refused, and the rest has no effect.
    `max_tokens` can only shorten a reply: the limits hold too."""
    ignore: list[IgnoredField] = Field(default_factory=list)
    """Fields that requests may set without effect. Without this, a request that sets one is refused, because the reply
    would not be what it asks for."""
    reward: Literal["file", "exit_code"] = "file"
    """Its reward at its end. `file`: what it wrote to EPISODE_REWARD_FILE, or returned. `exit_code`: 1 for the exit
    status 0, and 0 for another one; a program that was killed gives none."""
    reward_names: list[str] = Field(default_factory=lambda: ["reward"], min_length=1)
    """Names of the rewards that it may give, at its end and by `POST /v1/reward`."""
    effects: Literal["replayable", "external"] = "replayable"
    """What a resume may do: run the program again and give it the recorded replies, while its requests are the recorded
    ones; or not (`external`), so that the episode begins again. If its requests differ, the episode begins again
    too."""

    @property
    def elsewhere(self) -> bool:
        """Whether its programs run elsewhere."""
        return self.run is None and self.use is None

    @model_validator(mode="after")
    def _one(self) -> AgentSpec:
        if self.run is not None and self.use is not None:
            raise ValueError(
                "an agent has one of `run` and `use`, or neither if its programs run elsewhere (`engine serve --api`)"
            )
        if self.run is None and self.env:
            raise ValueError("`env` belongs to `run`; give arguments with `with`")
        if self.run is None and self.sandbox is not None:
            raise ValueError("`sandbox` belongs to `run`: no other program is a process of the engine")
        if self.use is None and self.with_:
            raise ValueError("`with` belongs to `use`; give variables with `env`")
        if self.reward == "exit_code" and "reward" not in self.reward_names:
            raise ValueError("`reward: exit_code` gives `reward`; add it to `reward_names`")
        return self
