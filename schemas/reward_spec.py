"""The section `rewards`: rules that move rewards, the credit method, and the scorer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from engine.schemas.base import Contract
from engine.schemas.credit import CreditSpec, default_credit
from engine.schemas.reward import PartAddress, TurnAddress
from engine.schemas.role import ScorerSpec


class ReassignRule(Contract):
    """A rule that moves or writes rewards after the action of a state."""

    at: str = Field(min_length=1)
    """The state after whose action the rule is applied."""
    when: str | None = None
    """A CEL expression. Without one, the rule always applies."""
    op: Literal["add", "set", "transfer"] = "transfer"
    name: str | None = None
    """Which reward; see `RewardEvent.name`."""
    from_: TurnAddress | None = Field(default=None, alias="from")
    """For a transfer: the turn that pays."""
    to: TurnAddress = "last"
    """The turn that receives, or that is written."""
    share: float | None = Field(default=None, ge=0.0, le=1.0)
    """For a transfer: the part of what `from` holds that moves."""
    value: float | None = None
    """For add and set, the amount; for a transfer, instead of `share`."""
    part: PartAddress | None = None
    """The part that pays (for a transfer) or that is written; see `RewardEvent.part`."""
    to_part: PartAddress | None = None
    """For a transfer: the part of `to` that receives."""
    discount: float = Field(default=1.0, ge=0.0)
    """For `each`: the factor per turn of distance from the last turn."""
    cause: str = ""
    """Shown with the reward. Default: the rule's position."""

    @model_validator(mode="after")
    def _whole(self) -> ReassignRule:
        if self.op == "transfer":
            if self.from_ is None:
                raise ValueError("a transfer needs `from`: the turn that pays")
            if (self.value is None) == (self.share is None):
                raise ValueError("a transfer needs exactly one of `share` and `value`")
        else:
            if self.value is None:
                raise ValueError(f"`op: {self.op}` needs a `value`")
            if self.from_ is not None or self.share is not None:
                raise ValueError(f"`from` and `share` belong to `op: transfer`, not to `{self.op}`")
            if self.to_part is not None:
                raise ValueError(f"`to_part` belongs to `op: transfer`, not to `{self.op}`")
        paid = self.from_ if self.op == "transfer" else self.to
        for part, turn in ((self.part, paid), (self.to_part, self.to)):
            if part is not None and turn in ("all", "each"):
                raise ValueError(f"a part belongs to one turn, not to `{turn}`")
        return self


class RewardsSpec(Contract):
    """The reward rules, the credit method and the scorer."""

    reassign: list[ReassignRule] = Field(default_factory=list)
    """Rules that are applied in order, after the state's own rewards are written."""
    credit: CreditSpec = Field(default_factory=default_credit)
    """How turn rewards become advantages; `method` selects the method."""
    placement: Literal["last", "spread"] = "last"
    """Where a turn's reward lies in `token_rewards`: on its last sampled token, or in equal parts on all of them."""
    scorer: ScorerSpec | None = None
    """Called once at the end, in addition to the environment's `score`: `math-verify`, a function, or a model as judge."""
