"""The journal record of a check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

import msgspec
from msgspec.structs import replace

from engine.schemas.journal import RecordBase
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent
from sum_check.sums import CheckedSum


class SumCheckRecord(RecordBase, frozen=True, kw_only=True):
    """The sums of a reply were checked. It has all that the episode needs, so a replay checks nothing."""

    kind: Literal["sum_check"] = "sum_check"
    sums: list[CheckedSum] = msgspec.field(default_factory=list)
    messages: list[Message] = msgspec.field(default_factory=list)
    """The message to the model that lists its wrong sums; none if all are right."""
    rewards: list[RewardEvent] = msgspec.field(default_factory=list)

    @property
    def event(self) -> str:
        """The event of the action."""
        if not self.sums:
            return "unchecked"
        return "right" if all(each.right for each in self.sums) else "wrong"

    def words(self) -> str:
        """How many sums are wrong."""
        return f"{sum(not each.right for each in self.sums)} of {len(self.sums)} sums wrong"

    def summary(self) -> dict[str, Any]:
        """The same for `engine show --json` and `engine view`."""
        return {"sums": len(self.sums), "wrong": sum(not each.right for each in self.sums)}

    def said(self) -> Sequence[Message]:
        """The messages that the record adds to the conversation."""
        return self.messages

    def with_said(self, messages: Sequence[Message]) -> Self:
        """The same with other messages."""
        return replace(self, messages=list(messages))
