"""The backends that are chat APIs: messages go in, text comes out. Their prices, and what a run may cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from engine.schemas.backend import CONSTRAINTS, BackendBase
from engine.schemas.base import Contract, Seconds
from engine.schemas.sections import SpecSection

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec
    from engine.spec.added import SpecFacts


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


class CostSpec(SpecSection):
    """What a run may cost."""

    max_cost: float | None = Field(default=None, gt=0)
    """What the run may cost, by `prices` of its backends, resumes included. When it is reached, no request is sent any
    more, replies under way are kept, and the run stops; it can be resumed with `--set rollout.max_cost=N`."""


def facts(spec: EpisodeSpec) -> SpecFacts:
    """What `rollout.max_cost` means for other parts of a spec (the hook `spec_facts`)."""
    from engine.spec.added import SpecFacts

    if CostSpec.or_default(spec.rollout).max_cost is None:
        return SpecFacts()
    message = "`max_cost` is not supported with several drivers: each counts its own cost"
    return SpecFacts(
        one_process=((message, ("rollout", "max_cost"), "remove it, or set `rollout.drivers: 1`"),),
    )


class ApiBackendSpec(BackendBase):
    """Keys of every backend that is a chat API. It returns only text, so its rows are not trainable."""

    exact_ids: ClassVar[bool] = False
    reports_versions: ClassVar[bool] = False
    weights_in_servers: ClassVar[bool] = True
    takes_messages: ClassVar[bool] = True
    resumable: ClassVar[tuple[str, ...]] = ("prices", "requests_per_minute", "tokens_per_minute")

    kind: str
    url: str
    model: str
    """The model's name at the endpoint."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key."""
    prices: PricesSpec | None = None
    """Prices by token. With them the cost of each turn and of the run is counted, and `rollout.max_cost` can limit
    it."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Requests that may be sent in a minute, retries included; the others wait."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Tokens that may be sent and requested in a minute. A request counts with its prompt, by the tokenizer of
    `model.path`, and the longest reply that it asks for, until the endpoint has counted its tokens."""
    timeout: Seconds = 600.0
    """Deadline for one reply, including retries. Time in which the endpoint cannot be reached does not count."""
    try_timeout: Seconds | None = None
    """Deadline for one try, after which the request is sent again. Default: half of `timeout`."""
    retries: int = Field(default=4, ge=0)
    """Tries after the first, on broken connections, bad replies and 5xx. An endpoint that cannot be reached or answers
    429, 502, 503, 504 or 529 does not use up a try."""
    wait: Seconds = 600.0
    """How long a run waits while the endpoint does not reply; then it stops, and can be resumed. No episode fails
    because of an outage."""

    @property
    def server_urls(self) -> list[str]:
        return [self.url]

    @property
    def reply_seconds(self) -> float:
        return self.timeout

    @property
    def priced(self) -> bool:
        return self.prices is not None

    @property
    def served_model(self) -> str | None:
        return self.model


class OpenAIBackendSpec(ApiBackendSpec):
    """Any OpenAI-compatible chat endpoint. It returns only text, so its rows are not trainable."""

    runtime: ClassVar[str] = "engine.plugins.chat_apis.openai:OpenAIBackend"
    unsupported_sampling: ClassVar[tuple[str, ...]] = (
        *CONSTRAINTS,
        "top_k",
        "min_p",
        "repetition_penalty",
        "min_new_tokens",
        "stop_token_ids",
        "ignore_eos",
    )

    kind: Literal["openai"] = "openai"
    """Any OpenAI-compatible chat endpoint; its rows do not train."""
    url: str
    """Base URL, up to and including `/v1`."""


class AnthropicBackendSpec(ApiBackendSpec):
    """Anthropic's Messages API, or an endpoint with the same protocol. It returns only text, so its rows are not
    trainable."""

    runtime: ClassVar[str] = "engine.plugins.chat_apis.anthropic:AnthropicBackend"
    max_temperature: ClassVar[float] = 1.0
    unsupported_sampling: ClassVar[tuple[str, ...]] = (
        *CONSTRAINTS,
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "min_new_tokens",
        "stop_token_ids",
        "ignore_eos",
        "logit_bias",
    )

    kind: Literal["anthropic"] = "anthropic"
    """Anthropic's Messages API; its rows do not train."""
    url: str
    """Base URL, up to and including `/v1`."""
    version: Literal["2026-10-21", "2023-06-01"] = "2026-10-21"
    """Version of the API. `2026-10-21` has no `temperature`, `top_p` and `top_k`; `2023-06-01` has them for the models
    that still take them, and is what most other endpoints with this protocol have."""
    cache: Literal["5m", "1h"] | None = None
    """How long the API keeps prompts, so that the next turn reads its prefix from the cache. Writing to the cache costs
    more than plain input (`prices.cache_write`), reading much less. Default: nothing is cached."""
    thinking: Literal["adaptive", "disabled"] | Annotated[int, Field(ge=1024)] | None = None
    """Reasoning: `adaptive`, `disabled`, or its maximum number of tokens, for models that have such a budget. Default:
    the model's own."""

    @property
    def lacking(self) -> tuple[str, ...]:
        newest = () if self.version == "2023-06-01" else ("temperature", "top_p", "top_k")
        return self.unsupported_sampling + newest
