"""EpisodeSpec: the YAML document that declares an episode."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from engine.schemas.backend import BackendSpec, default_backend, no_default
from engine.schemas.credit import RewardsSpec
from engine.schemas.entry import EnvironmentSpec, IsolationSpec, ToolSpec
from engine.schemas.generation import SamplingParams
from engine.schemas.limits import LimitsSpec
from engine.schemas.machine import MachineSpec
from engine.schemas.model import ModelSpec, PromptField, PromptMessage, RecoverSpec
from engine.schemas.role import UserSpec
from engine.schemas.sections import SectionOwner
from engine.schemas.tasks import TasksSpec
from engine.schemas.train import TrainSpec


class RolloutSpec(SectionOwner):
    """Number of episodes, and how many run at once."""

    OWNER: ClassVar[str] = "rollout"

    samples_per_task: int = Field(default=1, ge=1)
    """Episodes per task: the size of a group."""
    concurrency: int = Field(default=64, ge=1)
    """Maximum number of generations at once. An episode that waits for a tool or a user does not count."""
    live_episodes: int | None = Field(default=None, ge=1)
    """Maximum number of running episodes. Default: twice `concurrency`."""
    seed: int = Field(default=0, ge=0)
    """The seed from which the seeds of all episodes and turns are derived."""
    salt: int = Field(default=0, ge=0)
    """Changes only the sampling seed of every turn. A fork uses it to sample other replies."""
    out: str = "runs"
    """Folder in which runs are stored, relative to the current folder."""


class EpisodeSpec(SectionOwner):
    """The declaration of an episode. `engine validate` checks it, `engine run` runs it."""

    spec: Literal["episode/v1"]
    """Version of this format."""
    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the spec, with which the names of its runs begin."""
    description: str = ""
    model: ModelSpec
    backend: BackendSpec = Field(default_factory=default_backend)
    sampling: SamplingParams = Field(default_factory=SamplingParams)
    tasks: TasksSpec
    prompt: list[PromptMessage] | PromptField = Field(default_factory=list)
    """The first messages of each episode: the same for all tasks, or `{field: messages}` for the task's own. The
    environment's messages follow."""
    environment: EnvironmentSpec | None = None
    tools: list[ToolSpec] = Field(default_factory=list)
    user: UserSpec | None = None
    users: dict[str, UserSpec] = Field(default_factory=dict)
    """Several users by name, instead of `user`; `tasks.user` selects the user of a task."""
    machine: MachineSpec = Field(default_factory=lambda: MachineSpec(preset="tools_and_user"))
    limits: LimitsSpec = Field(default_factory=LimitsSpec)
    rewards: RewardsSpec = Field(default_factory=RewardsSpec)
    recover: RecoverSpec = Field(default_factory=RecoverSpec)
    isolation: IsolationSpec | None = None
    """Where environment, tools, users, scorer and actions of the spec's own run, unless they say so themselves:
    `thread` (when left out) or `process`."""
    rollout: RolloutSpec = Field(default_factory=RolloutSpec)
    train: TrainSpec | None = None
    """The settings of `engine train`; other commands ignore them."""

    @property
    def messages(self) -> list[PromptMessage]:
        """The messages of `prompt`; none if each task has its own."""
        return self.prompt if isinstance(self.prompt, list) else []

    @property
    def conversation(self) -> PromptField | None:
        """Where each task has its own messages; None if `prompt` is for all tasks."""
        if not self.prompt and self.tasks.preset is not None:
            return self.tasks.preset.conversation
        return self.prompt if isinstance(self.prompt, PromptField) else None

    @property
    def opening_environment(self) -> EnvironmentSpec | None:
        """The environment, if its first messages are known before a run: it is `pure` and runs in this process."""
        environment = self.environment
        counted = environment is not None and environment.adapter is None and environment.effects == "pure"
        return environment if counted and self.environment_isolation.mode == "thread" else None

    @property
    def users_by_name(self) -> dict[str, UserSpec]:
        """Return every user by name; the user of `user` has the empty name."""
        return {"": self.user} if self.user is not None else self.users

    def isolation_of(self, own: IsolationSpec | None, otherwise: str = "thread") -> IsolationSpec:
        """The isolation of an object whose key `isolation` is `own`; `otherwise`: the mode if neither it nor the spec
        sets one."""
        merged = (own or IsolationSpec()).over(self.isolation)
        if merged.mode is not None:
            return merged
        return IsolationSpec(mode="thread") if otherwise == "thread" else merged.model_copy(update={"mode": otherwise})

    @property
    def environment_isolation(self) -> IsolationSpec:
        """Where the environment runs; `process` for an adapter whose library is not known to be safe in threads."""
        environment = self.environment
        if environment is None:
            return self.isolation_of(None)
        return self.isolation_of(environment.isolation, environment.default_mode)

    @model_validator(mode="after")
    def _whole(self) -> EpisodeSpec:
        if self.user is not None and self.users:
            raise ValueError("give `user` (one for all tasks) or `users` (chosen by `tasks.user`), not both")
        if self.users and self.tasks.user is None:
            raise ValueError("`users` needs `tasks.user`: the row's field that names a task's user")
        if self.tasks.user is not None and not self.users:
            raise ValueError("`tasks.user` chooses among `users`, and there are none")
        if (why := no_default(self.backend)) is not None:
            raise ValueError(why)
        return self

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt_is_a_list(cls, value: Any) -> Any:
        if isinstance(value, dict) and "field" not in value:
            raise ValueError(
                "it must be a list of messages, or `{field: messages}`; write `- role: …` for each message"
            )
        return value

    @field_validator("machine", mode="before")
    @classmethod
    def _preset_by_name(cls, value: Any) -> Any:
        return {"preset": value} if isinstance(value, str) else value
