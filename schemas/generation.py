"""The request to a backend and its reply: token ids in, token ids out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, field_validator

from engine.schemas.base import Contract, FloatArray, IntArray, Struct
from engine.schemas.experts import ExpertArray
from engine.schemas.message import ImagePart, MalformedCall, Message, ToolCall

Weight = Annotated[float, Field(ge=-2.0, le=2.0)]


class SamplingParams(Contract):
    """How tokens are sampled. Names and meanings are SGLang's; a value left out is not sent."""

    temperature: float = Field(default=1.0, ge=0.0)
    """0 is greedy. Log-probs are those of softmax(logits / temperature), before top-p and top-k."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of one reply; `limits.turn_tokens` bounds it too."""
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=-1)
    """-1 is the whole vocabulary."""
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    frequency_penalty: Weight | None = None
    presence_penalty: Weight | None = None
    repetition_penalty: float | None = Field(default=None, gt=0.0, le=2.0)
    min_new_tokens: int | None = Field(default=None, ge=0)
    stop: list[str] = Field(default_factory=list)
    """Strings that end a reply. The tokens that make up the string stay on the tape."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Token ids that end a reply, in addition to those of the chat format."""
    stop_regex: list[str] = Field(default_factory=list)
    """Regular expressions that end a reply (SGLang only)."""
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    """Affects only a backend's text; the engine reads ids."""
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    logit_bias: dict[str, float] | None = None
    """Added to logits, by token id."""
    custom_params: dict[str, Any] | None = None

    @field_validator("stop", "stop_regex", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("stop", "stop_regex")
    @classmethod
    def _not_empty(cls, value: list[str]) -> list[str]:
        if any(not item for item in value):
            raise ValueError("an empty stop string would end every reply at once; remove it")
        return value


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """A request for one reply of a backend."""

    episode_id: str
    """Requests of one episode share a prefix: backends keep them together."""
    turn: int
    input_ids: IntArray
    """The whole prompt, int32 [tokens]."""
    sampling: SamplingParams
    max_new_tokens: Annotated[int, Field(ge=1)]
    """Maximum number of tokens of this reply, from the limits; never more than fit the context."""
    stop_token_ids: list[int]
    """The stop ids of the chat format and of the spec."""
    banned_token_ids: list[int] = msgspec.field(default_factory=list)
    """Ids that must not be sampled, for example image placeholders."""
    seed: int
    """Sampling seed of this turn, in [0, 2**63)."""
    images: list[ImagePart] = msgspec.field(default_factory=list)
    """One for each image in `input_ids`, in order; by digest."""
    image_spans: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """Beside `images`: the tokens [start, end) that each stands at."""
    adapter: str | None = None
    """Name of a LoRA adapter that is loaded in the backend; None is the base model."""
    base_model: bool = False
    """Sample with the base model, also while the policy is an adapter in the backend."""
    experts_from: int | None = None
    """Report the experts that the model chose for the tokens from this one on, of prompt and reply; None: report
    none."""
    messages: list[Message] | None = None
    """The conversation so far, for a backend that declares `takes_messages`; None for every other."""
    tools: list[dict[str, Any]] | None = None
    """Beside `messages`: the tools, as OpenAI function schemas."""


class FinishReason(Struct, frozen=True, kw_only=True):
    """Why a reply ended."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    """For `stop`: the stop id or string that ended the reply; None if the backend does not say."""
    message: str | None = None
    """For `abort`: the backend's reason."""


class VersionSpan(Struct, frozen=True, kw_only=True):
    """Tokens [start, end) of one reply were sampled with weights `version`."""

    version: int
    start: int
    end: int


class Generation(Struct, frozen=True, kw_only=True):
    """A backend's reply, exact to the token."""

    output_ids: IntArray
    """Sampled ids, including a sampled stop token. int32 [tokens]."""
    logprobs: FloatArray
    """log p of each sampled id under softmax(logits / temperature). float32 [tokens]."""
    finish: FinishReason
    versions: list[VersionSpan] = msgspec.field(default_factory=list)
    """Weight versions that cover [0, tokens) without a gap; empty means version 0 throughout."""
    prompt_tokens: int = 0
    """Length of the prompt as the backend counted it."""
    cached_tokens: int = 0
    """Prompt tokens that the backend did not have to compute."""
    seconds: float = 0.0
    """Wall time from sending to the whole reply."""
    queue_seconds: float = 0.0
    """Part of `seconds` that was spent waiting for a slot in the backend."""
    prompt_unchecked: bool = False
    """The server did not report the prompt that it computed on, so nothing shows that it is the one that was sent."""
    routed_experts: ExpertArray | None = None
    """With `GenerateRequest.experts_from`: the experts of the tokens from that one up to the last but one of prompt and
    reply, [tokens, layers, top_k]. The last sampled token has none: no model has read it yet."""
    text: str | None = None
    """The reply of a backend that returns only text (a chat API); ids are then empty, and the row is not trainable."""
    reasoning: str | None = None
    """With `text`: reasoning that the backend returned apart from it."""
    signed: list[dict[str, Any]] | None = None
    """With `text`: blocks of a reply with reasoning that the API has signed and takes back unchanged, in order; texts
    as `{type: text, text: …}`, and `{type: tool_use}` at the place of each call."""
    calls: list[ToolCall | MalformedCall] = msgspec.field(default_factory=list)
    """With `text`: tool calls that the backend returned apart from it, in order. The id of call number i is
    `call_<turn>_<i>`."""
    sampled_tokens: int = 0
    """With `text`: length of the reply in tokens as the backend counted it, reasoning included."""
    cost: float = 0.0
    """Price of the request, from the backend's `prices`."""

    def _checked(self) -> Generation:
        if len(self.output_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.output_ids)} output ids but {len(self.logprobs)} log-probs")
        end = 0
        for span in self.versions:
            if span.start != end or span.end < span.start:
                raise ValueError(f"weight-version spans leave a gap or overlap at token {end}")
            end = span.end
        if self.versions and end != len(self.output_ids):
            raise ValueError(f"weight-version spans cover {end} of {len(self.output_ids)} tokens")
        return self
