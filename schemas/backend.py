"""Where the model is sampled."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from engine.schemas.base import Contract, Seconds


class LocalBackendSpec(Contract):
    """transformers in this process, with batching of concurrent requests."""

    kind: Literal["local"] = "local"
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: float32 on a CPU, bfloat16 on a GPU. In 16 bits log-probs differ from a recomputation, by up to 0.5."""
    deterministic: bool = False
    """A reply's ids and log-probs are bit-identical in any batch, and after a restart. About half as fast
    in full batches; proved for the model and machine at the start, or refused."""
    max_batch: int = Field(default=32, ge=1)
    """Most sequences in one forward pass."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads for torch; its own choice when left out."""


class SGLangBackendSpec(Contract):
    """SGLang servers, over their native HTTP API."""

    kind: Literal["sglang"] = "sglang"
    urls: list[str] = Field(min_length=1)
    """One for each server, such as `http://127.0.0.1:30000`."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key."""
    router: bool = False
    """The URL is an sglang-router; what it drops is checked at the start."""
    timeout: Seconds = 600.0
    """Deadline for one reply, tries and all. Time in which no server can be asked does not count."""
    try_timeout: Seconds | None = None
    """Deadline for one try, after which the reply is asked for again, elsewhere if possible; half of `timeout` when left out."""
    retries: int = Field(default=4, ge=0)
    """Tries after the first, on broken connections, bad replies and 5xx. A server that cannot be reached or answers 429,
    502, 503 or 504 uses up no try."""
    wait: Seconds = 600.0
    """How long a run waits while no server replies; then it stops, and can be resumed. No episode fails for an outage."""
    adapter: str | None = None
    """Name of a LoRA adapter that is loaded in the servers; left out, the base model samples."""
    health_timeout: Seconds = 30.0
    """A server that has requests and says nothing for so long is asked whether it is there."""
    interrupted: Literal["resume", "report"] = "resume"
    """A reply that the server cuts short (its weights are updated): sample the rest, or hand it on as aborted."""
    verify: bool = False
    """Load the model here, at the start, and compare one prompt's log-probs (with an image, for a model that takes some) with
    each server's."""


class OpenAIBackendSpec(Contract):
    """Any OpenAI-compatible chat endpoint: text alone, so its rows do not train."""

    kind: Literal["openai"] = "openai"
    url: str
    """Base URL, up to and including `/v1`."""
    model: str
    api_key_env: str | None = None
    timeout: Seconds = 600.0
    """Deadline for one reply, tries and all. Time in which the endpoint cannot be asked does not count."""
    try_timeout: Seconds | None = None
    """Deadline for one try, after which the reply is asked for again; half of `timeout` when left out."""
    retries: int = Field(default=4, ge=0)
    """Tries after the first, on broken connections, bad replies and 5xx. An endpoint that cannot be reached or answers 429,
    502, 503 or 504 uses up no try."""
    wait: Seconds = 600.0
    """How long a run waits while the endpoint does not reply; then it stops, and can be resumed. No episode fails for an
    outage."""


class ScriptedBackendSpec(Contract):
    """Replies from a YAML file, tokenised by the real tokenizer: a dry run without a model."""

    kind: Literal["scripted"] = "scripted"
    replies: str | list[Any]
    """A YAML file (relative to the spec), or the replies themselves."""
    latency: Annotated[float, Field(ge=0)] = 0.0
    """Seconds before each reply."""


BackendSpec = Annotated[
    LocalBackendSpec | SGLangBackendSpec | OpenAIBackendSpec | ScriptedBackendSpec, Field(discriminator="kind")
]
