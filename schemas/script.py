"""Script: the replies that a scripted backend gives, turn by turn."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from engine.schemas.base import Contract, parse_seconds

Delay = Annotated[
    float,
    BeforeValidator(parse_seconds),
    Field(ge=0),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string"}]}),
]
"""Seconds from 0; `50ms`, `2s` are accepted too."""


class ScriptedCall(Contract):
    """One tool call of a reply."""

    name: str = Field(min_length=1)
    arguments: dict[str, Any] = Field(default_factory=dict)


class ScriptedReply(Contract):
    """The model's reply in one turn. A plain string in a script is `{text: …}`."""

    text: str = ""
    """The reply's text, as the model would write it; special tokens in it are read as such."""
    tool_calls: list[ScriptedCall] = Field(default_factory=list)
    """Written after the text, in the syntax of the model's chat format."""
    tokens: list[int] | None = None
    """The sampled ids themselves, instead of `text` and `tool_calls`. Nothing is appended to them."""
    finish: Literal["stop", "length", "abort"] = "stop"
    """`stop`: the chat format's stop token is sampled last. `length`: cut short. `abort`: as when a server gives up."""
    logprob: float = Field(default=-0.1, le=0.0)
    """The log-prob of each of the reply's tokens."""
    delay: Delay = 0.0
    """Wait before the reply, in addition to `backend.latency`."""
    error: str | None = None
    """Raise a backend error with this message instead of replying."""
    retryable: bool = False
    """Whether the error is retryable."""
    times: int | None = Field(default=None, ge=1)
    """Number of attempts that raise the error before the reply. Default: every attempt."""

    @model_validator(mode="before")
    @classmethod
    def _plain_text(cls, value: Any) -> Any:
        return {"text": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> ScriptedReply:
        if self.tokens is not None and (self.text or self.tool_calls):
            raise ValueError("`tokens` stand for the whole reply: leave out `text` and `tool_calls`")
        if self.error is None and (self.retryable or self.times is not None):
            raise ValueError("`retryable` and `times` belong to an `error`")
        return self


class ScriptedCase(Contract):
    """The replies of some episodes."""

    task: str | list[str]
    """Id of the task, or several."""
    sample: int | None = Field(default=None, ge=0)
    """Only this sample of the task. Default: every sample."""
    replies: list[ScriptedReply] = Field(min_length=1)

    @property
    def tasks(self) -> list[str]:
        """The ids, as a list."""
        return [self.task] if isinstance(self.task, str) else list(self.task)


class Script(Contract):
    """A scripted model. Reply k answers assistant turn k.

    A list stands for `{replies: […]}`, or for `{cases: […]}` where each item has `replies` of its own.
    """

    replies: list[ScriptedReply] = Field(default_factory=list)
    """Replies for episodes that no case names."""
    cases: list[ScriptedCase] = Field(default_factory=list)
    """Replies by task; the first case that names an episode's task (and sample) is used."""
    exhausted: Literal["error", "cycle", "last"] = "error"
    """After the last reply: an error of kind `script_exhausted`, the first reply again, or the last reply again."""

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        if value and all(isinstance(item, dict) and "replies" in item for item in value):
            return {"cases": value}
        return {"replies": value}

    @model_validator(mode="after")
    def _says_something(self) -> Script:
        if not self.replies and not self.cases:
            raise ValueError("a script needs `replies`, `cases`, or both")
        return self

    @classmethod
    def adapt_json_schema(cls, schema: dict[str, Any]) -> None:
        """A list may replace the mapping, and a plain string a reply."""
        parts = schema.pop("$defs")
        reply = {"anyOf": [{"$ref": "#/$defs/ScriptedReply"}, {"type": "string"}]}
        for owner in (schema, parts["ScriptedCase"]):
            owner["properties"]["replies"]["items"] = reply
        keys = {key: schema.pop(key) for key in list(schema) if key not in ("$schema", "description")}
        case = {"$ref": "#/$defs/ScriptedCase"}
        lists = [{"type": "array", "items": item, "minItems": 1} for item in (reply, case)]
        schema |= {"anyOf": [keys, *lists], "$defs": parts}
