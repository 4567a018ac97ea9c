"""The methods of this plugin: one config class each, with the facts that checks, docs and the engine read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from engine.schemas.credit import ComparedCredit, DiscountedCredit


class TurnDiscountCredit(DiscountedCredit):
    """Discounting by turns, as in AReaL: the later a reward, the less it is worth to the turns before it."""

    formula: ClassVar[str] = "engine.plugins.credit_methods.formulas:turn_discount"
    turn_keys: ClassVar[tuple[str, ...]] = ("gamma", "form")

    method: Literal["turn_discount"] = "turn_discount"
    form: Literal["sum", "max", "attempts"] = "sum"
    """`sum`: the turn's own reward plus the discounted rewards of later turns. `max`: the largest of them. `attempts`:
    one number for all turns, the episode's reward times gamma for each turn after the first."""

    @property
    def uses_turn_rewards(self) -> bool:
        return self.form != "attempts"


class MtGrpoCredit(ComparedCredit):
    """MT-GRPO: the outcome relative to the group's, plus each turn's own reward relative to the group's at that
    turn."""

    formula: ClassVar[str] = "engine.plugins.credit_methods.formulas:mt_grpo"
    reward_keys: ClassVar[tuple[str, ...]] = ("outcome",)

    method: Literal["mt_grpo"] = "mt_grpo"
    weight: float = Field(default=1.0, ge=0.0)
    """Factor of the advantage of the turn's own reward."""
    outcome: list[str] | None = None
    """Names of the rewards that make up the outcome. Default: all rewards of the last turn."""

    @property
    def uses_turn_rewards(self) -> bool:
        return self.weight > 0 or self.outcome is None

    @property
    def last_turn_names(self) -> tuple[str, ...] | None:
        return None if self.outcome is None else tuple(self.outcome)


class ScoreCredit(DiscountedCredit):
    """SCoRe: `turn_return` with a bonus for an attempt that is better than the previous one, and a penalty for a worse
    one."""

    formula: ClassVar[str] = "engine.plugins.credit_methods.formulas:score"
    turn_keys: ClassVar[tuple[str, ...]] = ("gamma", "alpha", "reward")
    reward_keys: ClassVar[tuple[str, ...]] = ("reward",)

    method: Literal["score"] = "score"
    alpha: float = Field(default=1.0, ge=0.0)
    """The bonus is alpha times the difference from the previous attempt."""
    reward: str | None = None
    """Name of the reward that scores an attempt. Default: the sum of the turn's rewards."""

    @property
    def keys_without_effect(self) -> Mapping[str, str]:
        return {} if self.alpha else {"reward": "`alpha: 0` gives no bonus"}


class ProgressCredit(DiscountedCredit):
    """`turn_return` of the increases of a score, each spread over the turns since the previous score."""

    formula: ClassVar[str] = "engine.plugins.credit_methods.formulas:progress"
    turn_keys: ClassVar[tuple[str, ...]] = ("gamma", "decay", "reward")
    reward_keys: ClassVar[tuple[str, ...]] = ("reward",)

    method: Literal["progress"] = "progress"
    reward: str | None = None
    """Name of the reward that holds the score so far. Default: the sum of the turn's rewards."""
    decay: float = Field(default=1.0, ge=0.0, le=1.0)
    """Factor per turn of distance from the scored turn: 1 spreads an increase equally, 0 gives all of it to the scored
    turn."""


class RedistributeCredit(ComparedCredit):
    """RUDDER-like: how much the turn changed the expected return of the group's episodes."""

    formula: ClassVar[str] = "engine.plugins.credit_methods.formulas:redistribute"
    default_state: ClassVar[str | None] = "the same number of turns has passed and they earned the same sum"

    method: Literal["redistribute"] = "redistribute"
    state_key: str | None = None
    """As in `gigpo`. Default: the number of turns so far and the sum of their rewards."""

    @property
    def uses_turn_rewards(self) -> bool:
        return self.state_key is None or "rewards" in self.state_key  # the returns are sums over all turns
