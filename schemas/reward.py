"""Reward events: append-only, addressed to assistant turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from engine.schemas.base import Contract, Struct

TurnAddress = Annotated[int, Field(ge=0)] | Literal["first", "second", "previous", "last", "all", "each"]
"""Which assistant turns are meant, counted when the event is written.

An integer counts from 0. `last` is the newest turn, `previous` the one before it. `all` means
every turn so far, and splits a value equally between them; `each` means every turn too, and gives
each one the whole value, times `discount` to the power of its distance from the last turn.
"""


class RewardEvent(Contract):
    """One entry of an episode's ledger.

    RewardEvent(turn="last", value=1.0, cause="right answer", source="user")
    RewardEvent(turn="last", op="transfer", to="previous", share=0.3, source="user")
    RewardEvent(turn=0, name="format", op="set", value=0.0, source="environment")
    """

    turn: TurnAddress = "last"
    """The turn that is paid or, for a transfer, that pays."""
    name: str | None = None
    """Which reward; None is `reward` for add and set, and every name that `turn` holds for a transfer."""
    op: Literal["add", "set", "transfer"] = "add"
    value: float | None = None
    """The amount. Required for add and set; for a transfer, this or `share`."""
    share: float | None = Field(default=None, ge=0.0, le=1.0)
    """For a transfer: the part of what `turn` holds that moves."""
    to: TurnAddress | None = None
    """For a transfer: the turn that receives."""
    discount: float = Field(default=1.0, ge=0.0)
    """For `each`: the factor per turn of distance from the last turn."""
    cause: str = ""
    """Why, in words; shown beside the reward."""
    source: str = ""
    """Who wrote it: `environment`, `user`, `tool:<name>`, `rule:<n>`, `score`."""

    @model_validator(mode="after")
    def _whole(self) -> RewardEvent:
        if self.op == "transfer":
            if self.to is None:
                raise ValueError("a transfer needs `to`: the turn that receives")
            if (self.value is None) == (self.share is None):
                raise ValueError("a transfer needs exactly one of `value` and `share`")
        else:
            if self.value is None:
                raise ValueError(f"`{self.op}` needs a `value`")
            if self.to is not None or self.share is not None:
                raise ValueError(f"`to` and `share` belong to a transfer, not to `{self.op}`")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Posting(Struct):
    """One arithmetic step that the ledger took: the provenance of a turn's reward.

    A `RewardEvent` becomes one posting for each turn and name that it touches; a transfer becomes
    two, which sum to zero.
    """

    seq: int
    """Position in the ledger, from 0."""
    turn: int
    """Assistant turn, from 0."""
    name: str
    delta: float
    """What was added to (turn, name)."""
    after: float
    """What (turn, name) held afterwards."""
    at_turn: int
    """The newest assistant turn when this was written."""
    op: Literal["add", "set", "transfer"]
    cause: str = ""
    source: str = ""
