"""Reward events: append-only, addressed to assistant turns."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine.schemas.base import Contract, Struct


class TurnChoice(Contract):
    """The first or the last of the turns that were sampled in a state or ended with an event. Exactly one of the keys
    is given.

    RewardEvent(value=1.0, turn=TurnChoice(first="answered"))
    RewardEvent(op="transfer", turn="last", to=TurnChoice(last="REVISING"), share=0.5)
    """

    first: str | None = Field(default=None, min_length=1)
    """The name of the state or the event: the first turn of this kind."""
    last: str | None = Field(default=None, min_length=1)
    """The name of the state or the event: the newest turn of this kind."""

    @model_validator(mode="after")
    def _one(self) -> TurnChoice:
        if (self.first is None) == (self.last is None):
            raise ValueError("write one of `first` and `last`, with the name of a state or an event")
        return self

    @property
    def name(self) -> str:
        """The state or the event."""
        return self.first or self.last or ""

    def __str__(self) -> str:
        return f"{{first: {self.first}}}" if self.first else f"{{last: {self.last}}}"


TurnAddress = Annotated[int, Field(ge=0)] | Literal["first", "second", "previous", "last", "all", "each"] | TurnChoice
"""Which assistant turns are meant, counted when the event is written.

An integer counts from 0. `last` is the newest turn, `previous` the one before it. `all` means
every turn so far, and splits a value equally between them; `each` means every turn too, and gives
each one the whole value, times `discount` to the power of its distance from the last turn.
`{first: NAME}` and `{last: NAME}` mean one of the turns that were sampled in the state NAME, or
ended with the event NAME: `{first: answered}`.
"""


class PartAddress(Contract):
    """A part of one turn: a tool call, a text, or a run of tokens. Exactly one of the keys is given.

    RewardEvent(value=1.0, part={"call": 0})
    RewardEvent(value=-0.5, part={"text": "I guess"})
    """

    call: int | str | None = None
    """A tool call: its number in the turn, from 0 and with malformed calls counted, its id, or for the rewards of a
    tool's reply `this`."""
    text: str | None = Field(default=None, min_length=1)
    """The tokens that hold the first occurrence of this text."""
    tokens: list[Annotated[int, Field(ge=0)]] | None = Field(default=None, min_length=2, max_length=2)
    """The sampled tokens [start, end), counted from the first one of the turn."""

    @model_validator(mode="after")
    def _one(self) -> PartAddress:
        if [self.call, self.text, self.tokens].count(None) != 2:
            raise ValueError("a part needs exactly one of `call`, `text` and `tokens`")
        return self


class RewardChange(Contract):
    """What a reward event and a reward rule have in common: an amount that is added, set or moved."""

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
    part: PartAddress | None = None
    """The part of `turn` that is paid or pays; its credit is on the tokens of this part only. None: the turn as a
    whole."""
    to_part: PartAddress | None = None
    """For a transfer: the part of `to` that receives."""
    discount: float = Field(default=1.0, ge=0.0)
    """For `each`: the factor per turn of distance from the last turn."""
    cause: str = ""
    """Why, in words; shown beside the reward."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
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
            if self.to_part is not None:
                raise ValueError(f"`to_part` belongs to a transfer, not to `{self.op}`")
        for part, turn in ((self.part, self.turn), (self.to_part, self.to)):
            if part is not None and turn in ("all", "each"):
                raise ValueError(f"a part belongs to one turn, not to `{turn}`")
        return self


class RewardEvent(RewardChange):
    """One entry of an episode's ledger.

    RewardEvent(turn="last", value=1.0, cause="right answer", source="user")
    RewardEvent(turn="last", op="transfer", to="previous", share=0.3, source="user")
    RewardEvent(turn=0, name="format", op="set", value=0.0, source="environment")
    """

    source: str = ""
    """Who wrote it: `environment`, `user`, `tool:<name>`, `rule:<n>`, `score`."""


class Posting(Struct, frozen=True, kw_only=True):
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
    start: int | None = None
    """For a reward of a part of the turn: its first token, counted from the first sampled token of the turn. None: the
    whole turn."""
    end: int | None = None
    """One past the last token of the part."""
    call: int | None = None
    """Number of the tool call that the part is; None: it is no call."""
