"""The backends of `backend:`: one config class each, with the capabilities that checks, runner, replay and trainer
read.

To add a backend: the runtime class in a new file or folder of `engine/backends/`, and its config class here and in
`BackendSpec`; or a plugin with both, which names the config class in `backends`. Checks, evaluation, scenarios,
model-played users, trainer, JSON Schema and docs/spec.md read the class attributes and properties; none of them asks
for the `kind`. The capabilities are declared here and not on the runtime class, because `engine validate` reads them,
and importing the runtime class takes up to 0.2 s.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from engine import plugin
from engine.schemas.base import Contract, Seconds
from engine.schemas.generation import SamplingParams
from engine.schemas.sections import OneOf

CONSTRAINTS = ("stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "custom_params")
"""Sampling parameters that only SGLang supports."""


class BackendBase(Contract):
    """Base class of the config classes: the capabilities of a kind of backend, and the files and servers of one spec's
    backend.

    spec.backend.exact_ids                      # of this spec's backend
    [kind.kind_name() for kind in backend_classes() if kind.trains]
    """

    if TYPE_CHECKING:
        kind: str = ""  # each kind has a literal of its own

    runtime: ClassVar[str]
    """`module:class` of the runtime class, an `engine.backends.backend.Backend`."""
    exact_ids: ClassVar[bool] = True
    """Replies carry the sampled token ids with their log-probs. False: replies are text, and no row can train."""
    reports_versions: ClassVar[bool] = True
    """Replies name the weight version that sampled each token."""
    trains: ClassVar[bool] = False
    """It takes new weights while it runs, by one of `weight_methods`; the point `weight_syncs` has what sends them."""
    weight_methods: ClassVar[tuple[str, ...]] = ()
    """With `trains`: the values of `train.weight_sync.method` that it takes."""
    weights_in_servers: ClassVar[bool] = False
    """Its servers outlive a run, so their weights may differ from those of `model.path`."""
    loads_model: ClassVar[bool] = False
    """Its start loads the model into this process, which takes a while."""
    releases_memory: ClassVar[bool] = False
    """Its servers can release the memory of their GPUs during an update."""
    resumable: ClassVar[tuple[str, ...]] = ()
    """Keys that a resumed run or training may change."""
    takes_messages: ClassVar[bool] = False
    """Requests carry messages and tools; the server applies its own chat template, and reads no ids of a request."""
    takes_images: ClassVar[bool] = True
    """Requests may carry images, for a model that takes some."""
    reports_experts: ClassVar[bool] = False
    """It can report the experts that a mixture-of-experts model chose for each token (`routed_experts`)."""
    scripted: ClassVar[bool] = False
    """Replies are written in the spec for one role. So no two roles share it, and scenarios may use it."""
    unsupported_sampling: ClassVar[tuple[str, ...]] = ()
    """Keys of `sampling` that it does not support. Setting one is an error."""
    max_temperature: ClassVar[float] = inf
    """The highest `sampling.temperature` that it takes."""

    @classmethod
    def kind_name(cls) -> str:
        """The value of `kind` in a spec."""
        return str(cls.model_fields["kind"].default)

    def unsupported(self, sampling: SamplingParams) -> list[str]:
        """Keys of `sampling` that are set but not supported by this backend."""
        default = SamplingParams()
        return [name for name in self.lacking if getattr(sampling, name) != getattr(default, name)]

    @property
    def lacking(self) -> tuple[str, ...]:
        """`unsupported_sampling`, and what this spec's backend lacks beside it."""
        return self.unsupported_sampling

    def conflict(self, sampling: SamplingParams) -> str | None:
        """Why keys of `sampling`, each of which is supported, cannot be set together; None: they can."""
        return None

    def sync_method(self, method: str, *, lora: bool) -> str:
        """The method by which a training sends weights: `method`, with `auto` resolved.

        Args:
            method: `train.weight_sync.method`.
            lora: Whether a LoRA adapter is trained.
        """
        return method if method != "auto" else "tensors"

    @property
    def adapter_name(self) -> str | None:
        """Name of the LoRA adapter that the policy's requests are sampled with; None: the base model."""
        return None

    @property
    def asks_experts(self) -> bool:
        """Whether the policy's replies carry the experts of each token."""
        return False

    @property
    def files(self) -> dict[str, str]:
        """The files that it reads: key -> path, relative to the spec."""
        return {}

    @property
    def server_urls(self) -> list[str]:
        """Base URLs of its servers."""
        return []

    @property
    def reply_seconds(self) -> float:
        """Longest time that one reply may take, in seconds; infinity if the backend has no limit."""
        return inf

    @property
    def priced(self) -> bool:
        """Whether the cost of its replies is counted."""
        return False

    @property
    def served_model(self) -> str | None:
        """The name by which an API knows the model that samples; None: it is the model of `model.path`."""
        return None

    @property
    def half_precision(self) -> str | None:
        """The 16-bit type in which it computes; None: float32, or not set in the spec."""
        return None


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
    """How long a server may take until it answers its health check: weights are read and kernels compiled in this
    time."""
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
    for_urls: ClassVar[tuple[str, ...]] = ("api_key_env",)
    """Keys that have no effect on launched servers."""

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
    """Deadline for one try, after which the request is sent again, to another server if possible. Default: half of
    `timeout`."""
    retries: int = Field(default=4, ge=0)
    """Tries after the first, on broken connections, bad replies and 5xx. A server that cannot be reached or answers
    429, 502, 503 or 504 does not use up a try."""
    wait: Seconds = 600.0
    """How long a run waits while no server replies; then it stops, and can be resumed. No episode fails because of an
    outage."""
    adapter: str | None = None
    """Name of a LoRA adapter that is loaded in the servers. Default: the base model samples."""
    health_timeout: Seconds = 30.0
    """A server that has requests and sends nothing for this time is probed."""
    interrupted: Literal["resume", "report"] = "resume"
    """Whether to sample the rest of a reply that the server aborts (during a weight update), or to end it as
    aborted."""
    unchecked_prompts: Literal["refuse", "allow"] = "refuse"
    """Servers that do not report the prompt that they computed on (SGLang before 0.5.23, vLLM before 0.10.2): refuse
    them at the start, or allow them. Each turn with such a prompt is counted, in progress, rows and exports."""

    @model_validator(mode="after")
    def _urls_or_launch(self) -> ServersSpec:
        if bool(self.urls) == (self.launch is not None):
            raise ValueError(
                "give `urls`, the servers that run already, or `launch: {gpus: …}`, to have them started"
                + ("; not both" if self.urls else "")
            )
        if self.launch is not None and (unused := [name for name in self.for_urls if getattr(self, name)]):
            raise ValueError(
                f"`{unused[0]}` has no effect on launched servers, which only the run itself can reach: remove it"
            )
        return self

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


class ScriptedBackendSpec(BackendBase):
    """Replies from a YAML file, tokenised by the real tokenizer: a dry run without a model."""

    runtime: ClassVar[str] = "engine.backends.scripted:ScriptedBackend"
    scripted: ClassVar[bool] = True
    unsupported_sampling: ClassVar[tuple[str, ...]] = CONSTRAINTS

    kind: Literal["scripted"] = "scripted"
    replies: str | list[Any]
    """A YAML file (relative to the spec), or the replies themselves."""
    latency: Annotated[float, Field(ge=0)] = 0.0
    """Seconds before each reply."""

    @property
    def files(self) -> dict[str, str]:
        return {"replies": self.replies} if isinstance(self.replies, str) else {}

    @property
    def reply_seconds(self) -> float:
        return self.latency


_KINDS: OneOf[BackendBase] = OneOf(
    point="backends",
    core=(ScriptedBackendSpec,),
    base=BackendBase,
)
BackendSpec = Annotated[BackendBase, _KINDS]
"""A backend of any kind; the discriminator is `kind`."""


def backend_classes() -> tuple[type[BackendBase], ...]:
    """The config class of every kind, those of plugins after the core's."""
    return _KINDS.members()


DEFAULT = "local"
"""The kind of a backend that is left out. A plugin adds it."""


def default_backend() -> BackendBase:
    """The backend where none is written: of kind `DEFAULT`; without that a bare `BackendBase`, which nothing runs."""
    kinds = {kind.kind_name(): kind for kind in backend_classes()}
    return kinds.get(DEFAULT, BackendBase)()


def no_default(backend: BackendBase) -> str | None:
    """What to write, because a backend was left out and its default is not installed; None if it has a kind."""
    if type(backend) is not BackendBase:
        return None
    return (
        f"`backend` needs `kind`; left out, it is `{DEFAULT}`: "
        f"{plugin.missing('backends', DEFAULT) or 'no plugin adds it'}"
    )


def kinds_that_train() -> str:
    """The kinds of backends that take new weights, as text: `` `local` or `sglang` ``."""
    return " or ".join(f"`{declared.kind_name()}`" for declared in backend_classes() if declared.trains)
