"""The journal record of an agent program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import msgspec
from msgspec.structs import replace

from engine.schemas.journal import RecordBase, arguments_of
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent


class AgentRecord(RecordBase, frozen=True, kw_only=True):
    """An agent program sent a request, or ended."""

    unrepeated: ClassVar[tuple[str, ...]] = ("output", "unreceived")
    kind: Literal["agent"] = "agent"
    event: Literal["request", "exited", "died", "timeout"]
    messages: list[Message] = msgspec.field(default_factory=list)
    """Of a request: the messages after the reply that it continues."""
    parent: int | None = None
    """Of a request: the turn that it continues; None if it continues none."""
    reason: str = ""
    """Of a request: why it begins a branch; empty if it does not. Of an end without a reply: why the newest request was
    refused."""
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    """Of a request: the tools' schemas, in OpenAI's form."""
    sample: int = 0
    """Of a request for several replies: which of them follows."""
    sampling: dict[str, Any] = msgspec.field(default_factory=dict)
    """Of a request: parameters of sampling that it sets and the spec allows, by their names in `agent.allow`."""
    overruled: list[str] = msgspec.field(default_factory=list)
    """Of a request: fields that it set and that had no effect, because the spec decides or ignores them."""
    unreceived: list[int] = msgspec.field(default_factory=list)
    """Turns whose replies nobody had received when this was recorded: the program had closed the connection before."""
    status: int | None = None
    """Of an end: the exit status, negative for a signal."""
    output: str = ""
    """Of an end: the end of what the program wrote."""
    rewards: list[RewardEvent] = msgspec.field(default_factory=list)
    """Rewards that the program gave since the record before, and of an end: those of its end."""

    def answers(self) -> Mapping[str, Any]:
        """Arguments of calls in its history, and the tools' schemas."""
        return {"tools": self.tools} | arguments_of(self.messages)

    def words(self) -> str:
        """What the request adds, or how the program ended."""
        if self.event == "request":
            count = len(self.messages)
            return f"{count} new message{'s' * (count != 1)}" + (f", a branch: {self.reason}" if self.reason else "")
        return f"status {self.status}" if self.status is not None else "killed"

    def summary(self) -> dict[str, Any]:
        """The number of its messages, why it begins a branch, and what the program wrote."""
        return {"messages": len(self.messages), "reason": self.reason, "output": self.output}

    def said(self) -> Sequence[Message]:
        """The messages of a request."""
        return self.messages

    def with_said(self, messages: Sequence[Message]) -> Self:
        """The same with other messages."""
        return replace(self, messages=[*messages])
