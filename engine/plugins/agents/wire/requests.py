"""What a request of any model API says, what its replies are, the error of one that cannot be answered, and what an API
is."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from engine.schemas.base import Struct
from engine.schemas.message import Message
from engine.terminal import brief

MODEL = "policy"
"""The name of the model that programs ask for."""


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        message: What is wrong and how to fix it.
        param: The request's field that is wrong; None if no field is.
        status: The HTTP status. SDKs repeat requests after 408, 409, 429 and 5xx, and no others.
        code: A name for programs.
    """

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, code: str = "invalid_request"
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = brief(message), param, status, code


Stored = tuple[list["Message"], list[Any] | None]
"""A conversation that the endpoint keeps, so that a later request sends only what is new: the messages up to and with a
reply, and its tools as the request gave them, where later requests do not repeat them."""


class Session(Struct, frozen=True, kw_only=True):
    """What requests of one key are read with."""

    model: str = MODEL
    """The name of the model, which requests must give."""
    allow: frozenset[str] = frozenset()
    """Parameters of sampling that requests may set: names of `agent.allow`."""
    ignore: frozenset[str] = frozenset()
    """Fields that requests may set without effect: names of `agent.ignore`."""
    logprobs: bool = True
    """Whether the backend gives log-probs."""
    stored: dict[str, Stored] = msgspec.field(default_factory=dict)
    """By the id of a reply: the conversation up to and with it."""

    def recall(self, name: Any, prefix: str) -> Stored | None:
        """The conversation up to a reply of the API whose ids have a prefix; None if none is stored."""
        return self.stored.get(name) if isinstance(name, str) and name.startswith(prefix) else None


class ModelRequest(Struct, frozen=True, kw_only=True):
    """A request for replies of the model."""

    messages: list[Message]
    """The whole conversation. Images are `data:` URIs."""
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    """The tools' schemas, in OpenAI's form."""
    replies: int = 1
    """How many replies are asked for."""
    stream: bool = False
    """Send the reply as events."""
    sampling: dict[str, Any] = msgspec.field(default_factory=dict)
    """Parameters that it sets and the spec allows, by their names in `agent.allow`."""
    overruled: list[str] = msgspec.field(default_factory=list)
    """Fields that it sets and that have no effect, because the spec decides, sorted."""
    body: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Its JSON object, for the fields that a reply repeats."""
    logprobs: bool = False
    """Whether it asks for the log-probs of the sampled tokens."""


class SampledToken(Struct, frozen=True, kw_only=True):
    """One sampled token."""

    data: bytes
    """Its bytes; a character may need those of several tokens."""
    logprob: float
    """Its log-prob in the training row."""

    def written(self) -> dict[str, Any]:
        """The token as OpenAI's APIs write it. Log-probs of tokens that were not sampled are not known."""
        text = self.data.decode(errors="replace")
        return {"token": text, "logprob": self.logprob, "bytes": [*self.data], "top_logprobs": []}


class ModelReply(Struct, frozen=True, kw_only=True):
    """One reply as the program gets it."""

    message: Message
    """Text, reasoning and calls. A call that could not be parsed is text. The stop string that ended it is left out."""
    finish: str
    """`stop`, `length` or `tool_calls`."""
    prompt_tokens: int
    reply_tokens: int
    stopped: str | None = None
    """The stop string that ended it."""
    sampled: Sequence[SampledToken] = ()
    """All its sampled tokens, also those of reasoning, calls and its end, where the request asks for log-probs."""


class Replies(Struct, frozen=True, kw_only=True):
    """The answer to a request."""

    id: str
    """Unique: the episode's id and the first turn. Each API writes its own prefix before it."""
    created: int
    replies: list[ModelReply]


def event(data: Mapping[str, Any] | str, name: str = "") -> bytes:
    """One event of a stream, as server-sent events have it.

    Args:
        data: JSON, or a text as it is.
        name: Its `event:` line; empty: it has none.
    """
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + b"data: " + text.encode() + b"\n\n"


class ModelApi(ABC):
    """One model API. To add one: write its class in a file of its own, and add it to `APIS` (server.py)."""

    path: ClassVar[str]
    """The path of its requests for replies."""
    required_header: ClassVar[str] = ""
    """A header that its requests must have; empty: none."""
    fault_name: ClassVar[str] = ""
    """The name of an event with an error; empty: it has none."""

    @abstractmethod
    def read(self, body: Any, session: Session) -> ModelRequest:
        """Read a request.

        Args:
            body: Its JSON value.
            session: What it is read with.

        Raises:
            ApiError: A field is missing, invalid or not supported.
        """

    @abstractmethod
    def whole(self, request: ModelRequest, answer: Replies, session: Session) -> dict[str, Any]:
        """Write the replies as one JSON object, and store what later requests may refer to."""

    @abstractmethod
    def events(self, request: ModelRequest, answer: Replies, session: Session) -> Iterator[bytes]:
        """Write the replies as the events of a stream."""

    def fault(self, fault: ApiError) -> dict[str, Any]:
        """Write an error as the body of an answer: here as OpenAI's APIs do."""
        kind = "invalid_request_error" if fault.status < 500 else "server_error"
        return {"error": {"message": fault.message, "type": kind, "param": fault.param, "code": fault.code}}

    def fault_event(self, fault: ApiError) -> bytes:
        """Write an error as an event of a stream that has begun."""
        return event(self.fault(fault), self.fault_name)
