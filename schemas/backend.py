"""The backends of `backend:`: one config class each, with the capabilities that checks, runner, replay and trainer read.

To add a backend: the runtime class in a new file or folder of `engine/backends/`, and its config class here and in
`BackendSpec`. Checks, evaluation, scenarios, model-played users, trainer, JSON Schema and docs/spec.md read the class
attributes and properties; none of them asks for the `kind`. The capabilities are declared here and not on the runtime class,
because `engine validate` reads them, and importing the runtime class takes up to 0.2 s.
"""

from __future__ import annotations

from math import inf
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from engine.schemas.base import Contract, Seconds
from engine.schemas.generation import SamplingParams

_CONSTRAINTS = ("stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "custom_params")
"""Sampling parameters that only SGLang supports."""


class BackendBase(Contract):
    """Base class of the config classes: the capabilities of a kind of backend, and the files and servers of one spec's backend.

    spec.backend.exact_ids                      # of this spec's backend
    [kind.kind_name() for kind in BACKENDS if kind.trains]
    """

    runtime: ClassVar[str]
    """`module:class` of the runtime class, an `engine.backends.base.Backend`."""
    exact_ids: ClassVar[bool] = True
    """Replies carry the sampled token ids with their log-probs. False: replies are text, and no row can train."""
    reports_versions: ClassVar[bool] = True
    """Replies name the weight version that sampled each token."""
    trains: ClassVar[bool] = False
    """It takes new weights while it runs; `weight_sync` and `weight_methods` say how."""
    weight_sync: ClassVar[str]
    """With `trains`: `module:function` that opens a `WeightSync`, as `engine.train.sync.open_sync` calls it."""
    weight_methods: ClassVar[tuple[str, ...]] = ()
    """With `trains`: the values of `train.weight_sync.method` that it takes."""
    weights_in_servers: ClassVar[bool] = False
    """Its servers outlive a run, so their weights may differ from those of `model.path`."""
    takes_messages: ClassVar[bool] = False
    """Requests carry messages and tools, and the server applies its own chat template; the ids of a request are not read."""
    scripted: ClassVar[bool] = False
    """Replies are written in the spec for one role. So no two roles share it, and scenarios may use it."""
    unsupported_sampling: ClassVar[tuple[str, ...]] = ()
    """Keys of `sampling` that it does not support. Setting one is an error."""

    @classmethod
    def kind_name(cls) -> str:
        """The value of `kind` in a spec."""
        return str(cls.model_fields["kind"].default)

    @classmethod
    def unsupported(cls, sampling: SamplingParams) -> list[str]:
        """Keys of `sampling` that are set but not supported by this kind of backend."""
        default = SamplingParams()
        return [name for name in cls.unsupported_sampling if getattr(sampling, name) != getattr(default, name)]

    def sync_method(self, method: str, *, lora: bool) -> str:
        """The method by which a training sends weights: `method`, with `auto` resolved.

        Args:
            method: `train.weight_sync.method`.
            lora: Whether a LoRA adapter is trained.
        """
        return method if method != "auto" else "tensors"

    def shares_servers(self, other: BackendBase) -> bool:
        """Whether the two backends have a server in common."""
        return bool({url.rstrip("/") for url in self.server_urls} & {url.rstrip("/") for url in other.server_urls})

    @property
    def adapter_name(self) -> str | None:
        """Name of the LoRA adapter that the policy's requests are sampled with; None: the base model."""
        return None

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
    def half_precision(self) -> str | None:
        """The 16-bit type in which it computes; None: float32, or not set in the spec."""
        return None


class LocalBackendSpec(BackendBase):
    """transformers in this process, with batching of concurrent requests."""

    runtime: ClassVar[str] = "engine.backends.local.backend:LocalBackend"
    trains: ClassVar[bool] = True
    weight_sync: ClassVar[str] = "engine.train.sync:open_local_sync"
    weight_methods: ClassVar[tuple[str, ...]] = ("auto", "tensors")
    unsupported_sampling: ClassVar[tuple[str, ...]] = _CONSTRAINTS

    kind: Literal["local"] = "local"
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: float32 on a CPU, bfloat16 on a GPU. In 16 bits log-probs differ from a recomputation, by up to 0.5."""
    deterministic: bool = False
    """A reply's ids and log-probs are bit-identical in any batch, and after a restart. About half as fast
    in full batches. The start checks it for the model and device, and fails if logits depend on the batch."""
    max_batch: int = Field(default=32, ge=1)
    """Maximum number of sequences in one forward pass."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads for torch. Default: torch's choice."""

    @property
    def half_precision(self) -> str | None:
        return self.dtype if self.dtype in ("bfloat16", "float16") else None


class SGLangBackendSpec(BackendBase):
    """SGLang servers, over their native HTTP API."""

    runtime: ClassVar[str] = "engine.backends.sglang.client:SGLangBackend"
    trains: ClassVar[bool] = True
    weight_sync: ClassVar[str] = "engine.train.sync_sglang:open_sglang_sync"
    weight_methods: ClassVar[tuple[str, ...]] = ("auto", "disk", "tensors", "adapter")
    weights_in_servers: ClassVar[bool] = True

    kind: Literal["sglang"] = "sglang"
    urls: list[str] = Field(min_length=1)
    """The URL of each server, such as `http://127.0.0.1:30000`."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key."""
    router: bool = False
    """The URL is an sglang-router; the start checks which fields it drops."""
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
    verify: bool = False
    """Load the model here, at the start, and compare one prompt's log-probs (with an image, for a model that takes some) with
    each server's."""

    def sync_method(self, method: str, *, lora: bool) -> str:
        return method if method != "auto" else "adapter" if lora else "disk"

    @property
    def adapter_name(self) -> str | None:
        return self.adapter

    @property
    def server_urls(self) -> list[str]:
        return self.urls

    @property
    def reply_seconds(self) -> float:
        return self.timeout


class PricesSpec(Contract):
    """What an API charges, for a million tokens, in any one currency."""

    input: float = Field(ge=0)
    """Prompt tokens that were not cached."""
    output: float = Field(ge=0)
    """Sampled tokens, reasoning included."""
    cached: float | None = Field(default=None, ge=0)
    """Prompt tokens read from the API's cache. Default: as `input`."""
    cache_write: float | None = Field(default=None, ge=0)
    """Prompt tokens written to the API's cache, where it counts them. Default: as `input`."""


class ApiBackendSpec(BackendBase):
    """Keys of every backend that is a chat API. It returns only text, so its rows are not trainable."""

    exact_ids: ClassVar[bool] = False
    reports_versions: ClassVar[bool] = False
    weights_in_servers: ClassVar[bool] = True
    takes_messages: ClassVar[bool] = True

    kind: str
    url: str
    model: str
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key."""
    prices: PricesSpec | None = None
    """Prices by token. With them the cost of each turn and of the run is counted, and `rollout.max_cost` can limit it."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Requests that may be sent in a minute, retries included; the others wait."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Tokens that may be sent and requested in a minute. A request counts with its prompt, by the tokenizer of `model.path`, and
    the longest reply that it asks for, until the endpoint has counted its tokens."""
    timeout: Seconds = 600.0
    """Deadline for one reply, including retries. Time in which the endpoint cannot be reached does not count."""
    try_timeout: Seconds | None = None
    """Deadline for one try, after which the request is sent again. Default: half of `timeout`."""
    retries: int = Field(default=4, ge=0)
    """Tries after the first, on broken connections, bad replies and 5xx. An endpoint that cannot be reached or answers 429,
    502, 503, 504 or 529 does not use up a try."""
    wait: Seconds = 600.0
    """How long a run waits while the endpoint does not reply; then it stops, and can be resumed. No episode fails because
    of an outage."""

    @property
    def server_urls(self) -> list[str]:
        return [self.url]

    @property
    def reply_seconds(self) -> float:
        return self.timeout

    @property
    def priced(self) -> bool:
        return self.prices is not None


class OpenAIBackendSpec(ApiBackendSpec):
    """Any OpenAI-compatible chat endpoint. It returns only text, so its rows are not trainable."""

    runtime: ClassVar[str] = "engine.backends.openai:OpenAIBackend"
    unsupported_sampling: ClassVar[tuple[str, ...]] = (
        *_CONSTRAINTS,
        "top_k",
        "min_p",
        "repetition_penalty",
        "min_new_tokens",
        "stop_token_ids",
        "ignore_eos",
    )

    kind: Literal["openai"] = "openai"
    url: str
    """Base URL, up to and including `/v1`."""


class ScriptedBackendSpec(BackendBase):
    """Replies from a YAML file, tokenised by the real tokenizer: a dry run without a model."""

    runtime: ClassVar[str] = "engine.backends.scripted:ScriptedBackend"
    scripted: ClassVar[bool] = True
    unsupported_sampling: ClassVar[tuple[str, ...]] = _CONSTRAINTS

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


BackendSpec = Annotated[
    LocalBackendSpec | SGLangBackendSpec | OpenAIBackendSpec | ScriptedBackendSpec, Field(discriminator="kind")
]
"""A backend of any kind; the discriminator is `kind`."""

BACKENDS: tuple[type[BackendBase], ...] = get_args(get_args(BackendSpec)[0])
"""The config class of every kind."""


def kinds_that_train() -> str:
    """The kinds of backends that take new weights, as text: `` `local` or `sglang` ``."""
    return " or ".join(f"`{declared.kind_name()}`" for declared in BACKENDS if declared.trains)
