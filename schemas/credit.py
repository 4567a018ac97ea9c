"""How turn rewards become advantages: one class for each method."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from engine.schemas.base import Contract
from engine.schemas.entry import Entry


class ComparedCredit(Contract):
    """What methods share that compare an episode with its group."""

    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    """What is taken off: the group's mean, the mean of the others, or nothing."""
    scale: Literal["std", "none"] = "std"
    """Whether to divide by the group's standard deviation."""


class DiscountedCredit(ComparedCredit):
    """What methods share that look ahead."""

    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per turn."""


class OutcomeCredit(ComparedCredit):
    """GRPO: one number an episode, against its group, for all its turns."""

    method: Literal["outcome"] = "outcome"


class TurnReturnCredit(DiscountedCredit):
    """The discounted return from each turn on, against the group's at the same turn."""

    method: Literal["turn_return"] = "turn_return"


class TurnDiscountCredit(DiscountedCredit):
    """AReaL's discount by turns: what came late is worth less to the turns before it."""

    method: Literal["turn_discount"] = "turn_discount"
    form: Literal["sum", "max", "attempts"] = "sum"
    """`sum`: a turn's own reward and the discounted ones of the turns after it. `max`: the best of them.
    `attempts`: one number for all turns, the episode's reward times gamma for each turn after the first."""


class MtGrpoCredit(ComparedCredit):
    """MT-GRPO: the outcome against the group's, and each turn's own reward against the group's at that turn."""

    method: Literal["mt_grpo"] = "mt_grpo"
    weight: float = Field(default=1.0, ge=0.0)
    """Of the turn's own advantage, beside the outcome's."""
    outcome: list[str] | None = None
    """Names of the rewards that judge the outcome; left out, whatever the last turn holds."""


class GigpoCredit(ComparedCredit):
    """GiGPO: the episode against its group, and each turn against the group's turns from the same state."""

    method: Literal["gigpo"] = "gigpo"
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per turn, in the return that turns of one state are compared by."""
    weight: float = Field(default=1.0, ge=0.0)
    """Of the turn's advantage, beside the episode's."""
    state_key: str | None = None
    """A CEL expression, or the name of a fact, told when a turn begins: turns of the same value are of the same state.
    Left out: what the model was shown since its last turn, word for word."""


class ScoreCredit(DiscountedCredit):
    """SCoRe's shaping: an attempt earns extra for being better than the one before, and loses for being worse."""

    method: Literal["score"] = "score"
    alpha: float = Field(default=1.0, ge=0.0)
    """Of the bonus: alpha times the difference from the attempt before."""
    reward: str | None = None
    """The reward that scores an attempt; left out, all that a turn holds."""


class ProgressCredit(DiscountedCredit):
    """A score's rise pays the turns that led to it: differences of successive scores, spread backwards."""

    method: Literal["progress"] = "progress"
    reward: str | None = None
    """The reward that is the score so far; left out, all that a turn holds."""
    decay: float = Field(default=1.0, ge=0.0, le=1.0)
    """How much less each turn further back is paid: 1 pays all alike, 0 pays only the turn that was scored."""


class RedistributeCredit(ComparedCredit):
    """RUDDER-like: a turn earns by how much it changed the return that was to be expected."""

    method: Literal["redistribute"] = "redistribute"
    state_key: str | None = None
    """As in `gigpo`. Left out: a state is how many turns have passed and what they have earned."""


class BilevelGaeCredit(Contract):
    """VAGEN's bi-level GAE: over turns first, then over the tokens inside each. Needs a critic's values."""

    method: Literal["bilevel_gae"] = "bilevel_gae"
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per turn."""
    lam: float = Field(default=1.0, ge=0.0, le=1.0)
    """GAE's lambda over turns."""
    token_gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per token inside a turn."""
    token_lam: float = Field(default=1.0, ge=0.0, le=1.0)
    """GAE's lambda over tokens."""


class TurnPpoCredit(Contract):
    """Turn-PPO: GAE in which a turn is one action. Needs a critic's values."""

    method: Literal["turn_ppo"] = "turn_ppo"
    gamma: float = Field(default=0.99, ge=0.0, le=1.0)
    """Discount per turn."""
    lam: float = Field(default=0.9, ge=0.0, le=1.0)
    """GAE's lambda."""


class EntryCredit(Entry):
    """A method of one's own: `function(group: list[Member], **with)` gives an array of [turns] for each episode."""

    method: Literal["entry"] = "entry"
    state_key: str | None = None
    """As in `gigpo`, for a function that reads `Member.keys`."""


CreditSpec = Annotated[
    OutcomeCredit
    | TurnReturnCredit
    | TurnDiscountCredit
    | MtGrpoCredit
    | GigpoCredit
    | ScoreCredit
    | ProgressCredit
    | RedistributeCredit
    | BilevelGaeCredit
    | TurnPpoCredit
    | EntryCredit,
    Field(discriminator="method"),
]
"""How turn rewards become advantages."""

_CREDIT: TypeAdapter[CreditSpec] = TypeAdapter(CreditSpec)


def read_credit(data: Any) -> CreditSpec:
    """`{method: turn_return, gamma: 0.9}` -> the spec of that method; nothing at all is `outcome`.

    Raises:
        ValidationError: there is no such method, or it does not have such a key.
    """
    return _CREDIT.validate_python(data or {"method": "outcome"})
