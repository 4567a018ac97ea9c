"""The backends that sample token ids on servers, and the servers that a run starts itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from engine.schemas.backend_base import BackendBase
from engine.schemas.base import Contract, Seconds
from engine.schemas.generation import SamplingParams


class LaunchSpec(Contract):
    """Servers that the run starts on this machine, watches, and stops at its end."""

    gpus: int | list[int] = Field(union_mode="left_to_right")
    """The GPUs: a number (the first ones that this process sees), or their indexes. 0: one server without a GPU."""
    tp: int = Field(default=1, ge=1)
    """GPUs of one server (tensor parallelism). `gpus` / `tp` servers are started."""
    args: list[str] = Field(default_factory=list)
    """More arguments of the server, such as `[--mem-fraction-static, "0.8"]`."""
    python: str | None = None
    """The interpreter of the environment in which the server is installed. Default: the engine's own."""
    env: dict[str, str] = Field(default_factory=dict)
    """More environment variables of the servers."""
    ready_timeout: Seconds = 1200.0
    """How long a server may take until it answers its health check: weights are read and kernels compiled in this time."""
    restarts: int = Field(default=3, ge=0)
    """How often a server that dies is started again. Then it stays out."""

    @property
    def indexes(self) -> list[int]:
        """Indexes of the GPUs."""
        return list(range(self.gpus)) if isinstance(self.gpus, int) else self.gpus

    @model_validator(mode="after")
    def _servers_fit(self) -> LaunchSpec:
        indexes = self.indexes
        if isinstance(self.gpus, int) and self.gpus < 0:
            raise ValueError(f"`gpus` is a number of GPUs or a list of their indexes, not {self.gpus}")
        if len(set(indexes)) < len(indexes) or min(indexes, default=0) < 0:
            raise ValueError(f"`gpus` lists each GPU once, by its index from 0 on: {indexes}")
        if indexes and len(indexes) % self.tp:
            raise ValueError(f"{len(indexes)} GPUs cannot be divided among servers of `tp: {self.tp}`")
        if not indexes and self.tp > 1:
            raise ValueError(f"`tp: {self.tp}` needs GPUs, and `gpus` names none")
        return self

    @model_validator(mode="after")
    def _no_reserved_argument(self) -> LaunchSpec:
        for argument in self.args:
            name = argument.partition("=")[0]
            if name in _ENGINE_ARGUMENTS:
                raise ValueError(f"the engine itself gives `{name}` to the servers: {_ENGINE_ARGUMENTS[name]}")
        return self


_ENGINE_ARGUMENTS = {
    "--model-path": "it is `model.path`",
    "--model": "it is `model.path`",
    "--host": "launched servers listen only on this machine",
    "--port": "each server gets a free port",
    "-tp": "use `launch.tp`",
    "--tp": "use `launch.tp`",
    "--tp-size": "use `launch.tp`",
    "--tensor-parallel-size": "use `launch.tp`",
    "--api-key": "launched servers listen only on this machine",
}
"""Arguments of a launched server that the engine sets."""


class ServersSpec(BackendBase):
    """Keys of every backend whose servers take token ids: those of `urls`, or those that the run starts (`launch`)."""

    PLUGIN_NAMES: ClassVar[Mapping[str, str]] = {"launcher": "launchers"}
    weights_in_servers: ClassVar[bool] = True

    kind: str
    urls: list[str] = Field(default_factory=list, min_length=1)
    """The URL of each server, such as `http://127.0.0.1:30000`."""
    launch: LaunchSpec | None = None
    """Start the servers on this machine, instead of `urls`."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key."""
    timeout: Seconds = 600.0
    """Deadline for one reply, including retries. Time in which no server can be reached does not count."""
    try_timeout: Seconds | None = None
    """Deadline for one try, after which the request is sent again, to another server if possible. Default: half of `timeout`."""
    retries: int = Field(default=4, ge=0)
    """Tries after the first, on broken connections, bad replies and 5xx. A server that cannot be reached or answers 429,
    502, 503 or 504 does not use up a try."""
    wait: Seconds = 600.0
    """How long a run waits while no server replies; then it stops, and can be resumed. No episode fails because of an outage."""
    adapter: str | None = None
    """Name of a LoRA adapter that is loaded in the servers. Default: the base model samples."""
    health_timeout: Seconds = 30.0
    """A server that has requests and sends nothing for this time is probed."""
    interrupted: Literal["resume", "report"] = "resume"
    """Whether to sample the rest of a reply that the server aborts (during a weight update), or to end it as aborted."""
    unchecked_prompts: Literal["refuse", "allow"] = "refuse"
    """Servers that do not report the prompt that they computed on (SGLang before 0.5.23, vLLM before 0.10.2): refuse them at
    the start, or allow them. Each turn with such a prompt is counted, in progress, rows and exports."""

    @model_validator(mode="after")
    def _urls_or_launch(self) -> ServersSpec:
        if bool(self.urls) == (self.launch is not None):
            raise ValueError(
                "give `urls`, the servers that run already, or `launch: {gpus: …}`, to have them started"
                + ("; not both" if self.urls else "")
            )
        if self.launch is not None and (unused := [name for name in self._for_urls() if getattr(self, name)]):
            raise ValueError(
                f"`{unused[0]}` has no effect on launched servers, which only the run itself can reach: remove it"
            )
        return self

    @classmethod
    def _for_urls(cls) -> tuple[str, ...]:
        """Keys that have no effect on launched servers."""
        return ("api_key_env",)

    @property
    def adapter_name(self) -> str | None:
        return self.adapter

    @property
    def launcher(self) -> str | None:
        """The kind of servers that are to be started; None: they run already."""
        return None if self.launch is None else self.kind

    @property
    def server_urls(self) -> list[str]:
        return self.urls

    @property
    def reply_seconds(self) -> float:
        return self.timeout


class SGLangBackendSpec(ServersSpec):
    """SGLang servers, over their native HTTP API: those of `urls`, or those that the run starts (`launch`)."""

    runtime: ClassVar[str] = "engine.backends.sglang.client:SGLangBackend"
    trains: ClassVar[bool] = True
    weight_methods: ClassVar[tuple[str, ...]] = ("auto", "disk", "tensors", "collective", "adapter")
    releases_memory: ClassVar[bool] = True
    reports_experts: ClassVar[bool] = True

    kind: Literal["sglang"] = "sglang"
    router: bool = False
    """The URL is an sglang-router; the start checks which fields it drops."""
    verify: bool = False
    """Load the model here, at the start, and compare one prompt's log-probs (with an image, for a model that takes some) with
    each server's."""
    routed_experts: bool | Literal["exact"] = False
    """Keep the experts that a mixture-of-experts model chose for each token, in rows too; `engine train` then uses the same experts.
    The servers need `--enable-return-routed-experts`; launched ones get it. `exact`: episodes share no cached prefix, so that the
    first token of a reply, too, has the experts that it was sampled with."""

    @classmethod
    def _for_urls(cls) -> tuple[str, ...]:
        return ("router", *super()._for_urls())

    @property
    def asks_experts(self) -> bool:
        return self.routed_experts is not False

    def sync_method(self, method: str, *, lora: bool) -> str:
        return method if method != "auto" else "adapter" if lora else "disk"


def changes_distribution(sampling: SamplingParams) -> list[str]:
    """Keys of `sampling` that change the log-probs of rows: with one of them they are not those of softmax(logits)."""
    free: dict[str, tuple[Any, ...]] = {
        "temperature": (0.0, 1.0),
        "frequency_penalty": (None, 0.0),
        "presence_penalty": (None, 0.0),
        "repetition_penalty": (None, 1.0),
        "min_new_tokens": (None, 0),
        "logit_bias": (None, {}),
    }
    return [name for name, values in free.items() if getattr(sampling, name) not in values]


def cuts_distribution(sampling: SamplingParams) -> list[str]:
    """Keys of `sampling` that exclude tokens after the log-probs of rows are computed."""
    if sampling.temperature == 0:
        return []
    free: dict[str, tuple[Any, ...]] = {"top_p": (None, 1.0), "top_k": (None, -1, 0), "min_p": (None, 0.0)}
    return [name for name, values in free.items() if getattr(sampling, name) not in values]
