"""The section `rewards`: rules that move rewards, the scorer, and the credit methods, one config class each.

To add a method: its formula in a new file of `engine/rewards/credit/`, and its config class here and in `CreditSpec`. Checks,
exports, JSON Schema and docs/spec.md read the class attributes and ask for no `method`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, model_validator

from engine.schemas.base import Contract
from engine.schemas.reward import PartAddress, TurnAddress
from engine.schemas.role import ScorerSpec


class CreditMethod(Contract):
    """Base class of the credit methods."""

    formula: ClassVar[str]
    """`module:function` with the arguments (spec, group: list[Member]); returns for each episode float64 [turns]."""
    token_formula: ClassVar[str | None] = None
    """`module:function` with the same arguments; returns for each episode and turn float64 [sampled tokens]. None: each token
    has its turn's advantage."""
    takes_folder: ClassVar[bool] = False
    """`formula` has a third argument, the folder of the spec, to find a function of the user's own."""
    needs_values: ClassVar[bool] = False
    """The method needs a critic's value before each sampled token (`Member.values`)."""
    value_level: ClassVar[Literal["token", "turn"]] = "token"
    """For a method with `needs_values`: it reads the values of all sampled tokens, or those before the first token of each turn."""
    takes_penalties: ClassVar[bool] = True
    """The method subtracts penalties of tokens (`Member.penalties`, `train.kl.in: reward`) from its rewards."""
    needs_state_key: ClassVar[bool] = False
    """The method needs the state in which each turn began (`Member.state_keys`), with or without a `state_key` in the spec."""
    default_state: ClassVar[str | None] = None
    """For a method that groups turns by state: when two states are the same if `state_key` is not set."""
    reward_keys: ClassVar[tuple[str, ...]] = ()
    """Keys that hold names of rewards."""
    turn_keys: ClassVar[tuple[str, ...]] = ()
    """Keys that change nothing in an episode of one turn."""

    @property
    def uses_turn_rewards(self) -> bool:
        """Moving rewards between the turns of an episode, with the same sum, can change the advantages."""
        return True

    @property
    def comparison(self) -> ComparedCredit | None:
        """How it compares numbers of the group's episodes (`baseline`, `scale`); None: it does not."""
        return None

    @property
    def last_turn_names(self) -> tuple[str, ...] | None:
        """Names of the only rewards of the last turn that change an advantage; None: all rewards of the last turn do."""
        return None

    @property
    def keys_without_effect(self) -> Mapping[str, str]:
        """Keys that change nothing because of the values of other keys: key -> the reason."""
        return {}

    @property
    def zero_without_group(self) -> bool:
        """In a group of one episode every advantage is 0."""
        return False

    @property
    def no_baseline_without_group(self) -> bool:
        """In a group of one episode nothing is subtracted, although the method compares episodes."""
        return False

    @property
    def declared_state_key(self) -> str | None:
        """The key `state_key`; None if the spec does not set it or the method does not have it."""
        key: str | None = getattr(self, "state_key", None)
        return key


class ComparedCredit(CreditMethod):
    """Base class of the methods that compare an episode with its group."""

    baseline: Literal["mean", "leave_one_out", "none"] = "leave_one_out"
    """What is subtracted: the mean of the group, the mean of the group's other episodes, or nothing."""
    scale: Literal["std", "none"] = "none"
    """`std`: divide by the group's standard deviation, as in GRPO; this biases the gradient (docs/credit.md). `none`: do not divide."""

    @property
    def comparison(self) -> ComparedCredit | None:
        return self

    @property
    def zero_without_group(self) -> bool:
        return self.baseline == "mean"

    @property
    def no_baseline_without_group(self) -> bool:
        return self.baseline == "leave_one_out"


class DiscountedCredit(ComparedCredit):
    """Base class of the methods that discount the rewards of later turns."""

    turn_keys: ClassVar[tuple[str, ...]] = ("gamma",)

    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per turn."""


class OutcomeCredit(ComparedCredit):
    """The episode's reward relative to its group; the same advantage for all turns. GRPO with `baseline: mean` and `scale: std`."""

    formula: ClassVar[str] = "engine.rewards.credit.outcome:outcome"

    method: Literal["outcome"] = "outcome"

    @property
    def uses_turn_rewards(self) -> bool:
        return False


class TurnReturnCredit(DiscountedCredit):
    """The discounted return from each turn on, relative to the group's at the same turn."""

    formula: ClassVar[str] = "engine.rewards.credit.turn_return:turn_return"

    method: Literal["turn_return"] = "turn_return"


class TurnDiscountCredit(DiscountedCredit):
    """Discounting by turns, as in AReaL: the later a reward, the less it is worth to the turns before it."""

    formula: ClassVar[str] = "engine.rewards.credit.turn_discount:turn_discount"
    turn_keys: ClassVar[tuple[str, ...]] = ("gamma", "form")

    method: Literal["turn_discount"] = "turn_discount"
    form: Literal["sum", "max", "attempts"] = "sum"
    """`sum`: the turn's own reward plus the discounted rewards of later turns. `max`: the largest of them. `attempts`: one
    number for all turns, the episode's reward times gamma for each turn after the first."""

    @property
    def uses_turn_rewards(self) -> bool:
        return self.form != "attempts"


class MtGrpoCredit(ComparedCredit):
    """MT-GRPO: the outcome relative to the group's, plus each turn's own reward relative to the group's at that turn."""

    formula: ClassVar[str] = "engine.rewards.credit.mt_grpo:mt_grpo"
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


class GigpoCredit(ComparedCredit):
    """GiGPO: the episode relative to its group, plus each turn relative to the group's turns that began in the same state."""

    formula: ClassVar[str] = "engine.rewards.credit.gigpo:gigpo"
    needs_state_key: ClassVar[bool] = True
    default_state: ClassVar[str | None] = "the model was shown the same messages since its previous turn"
    turn_keys: ClassVar[tuple[str, ...]] = ("gamma",)

    method: Literal["gigpo"] = "gigpo"
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per turn in the returns that are compared within a state."""
    weight: float = Field(default=1.0, ge=0.0)
    """Factor of the turn's advantage within its state."""
    state_key: str | None = None
    """A CEL expression or the name of a fact, evaluated when a turn begins: turns with equal values began in the same state.
    Default: the messages that the model was shown since its previous turn."""

    @property
    def uses_turn_rewards(self) -> bool:
        return self.weight > 0

    @property
    def keys_without_effect(self) -> Mapping[str, str]:
        why = "`weight: 0` leaves out the comparison of turns that began in the same state"
        return {} if self.weight else {"gamma": why, "state_key": why}

    @property
    def zero_without_group(self) -> bool:
        return self.baseline == "mean" and self.weight == 0  # an episode can be in one state twice


class ScoreCredit(DiscountedCredit):
    """SCoRe: `turn_return` with a bonus for an attempt that is better than the previous one, and a penalty for a worse one."""

    formula: ClassVar[str] = "engine.rewards.credit.score:score"
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

    formula: ClassVar[str] = "engine.rewards.credit.progress:progress"
    turn_keys: ClassVar[tuple[str, ...]] = ("gamma", "decay", "reward")
    reward_keys: ClassVar[tuple[str, ...]] = ("reward",)

    method: Literal["progress"] = "progress"
    reward: str | None = None
    """Name of the reward that holds the score so far. Default: the sum of the turn's rewards."""
    decay: float = Field(default=1.0, ge=0.0, le=1.0)
    """Factor per turn of distance from the scored turn: 1 spreads an increase equally, 0 gives all of it to the scored turn."""


class RedistributeCredit(ComparedCredit):
    """RUDDER-like: how much the turn changed the expected return of the group's episodes."""

    formula: ClassVar[str] = "engine.rewards.credit.redistribute:redistribute"
    default_state: ClassVar[str | None] = "the same number of turns has passed and they earned the same sum"

    method: Literal["redistribute"] = "redistribute"
    state_key: str | None = None
    """As in `gigpo`. Default: the number of turns so far and the sum of their rewards."""

    @property
    def uses_turn_rewards(self) -> bool:
        return self.state_key is None or "rewards" in self.state_key  # the returns are sums over all turns


class BilevelGaeCredit(CreditMethod):
    """VAGEN's bi-level GAE: over turns first, then over the tokens of each turn. Needs a critic's values."""

    formula: ClassVar[str] = "engine.rewards.credit.bilevel_gae:bilevel_gae"
    token_formula: ClassVar[str | None] = "engine.rewards.credit.bilevel_gae:bilevel_token_gae"
    turn_keys: ClassVar[tuple[str, ...]] = ("lam",)
    needs_values: ClassVar[bool] = True

    method: Literal["bilevel_gae"] = "bilevel_gae"
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per turn."""
    lam: float = Field(default=1.0, ge=0.0, le=1.0)
    """Lambda of the GAE over turns."""
    token_gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per token within a turn."""
    token_lam: float = Field(default=1.0, ge=0.0, le=1.0)
    """Lambda of the GAE over tokens."""


class TurnPpoCredit(CreditMethod):
    """Turn-PPO: GAE with one turn as one action. Needs a critic's values."""

    formula: ClassVar[str] = "engine.rewards.credit.turn_ppo:turn_ppo"
    turn_keys: ClassVar[tuple[str, ...]] = ("lam",)
    needs_values: ClassVar[bool] = True
    value_level: ClassVar[Literal["token", "turn"]] = "turn"

    method: Literal["turn_ppo"] = "turn_ppo"
    gamma: float = Field(default=0.99, ge=0.0, le=1.0)
    """Discount per turn."""
    lam: float = Field(default=0.9, ge=0.0, le=1.0)
    """Lambda of the GAE."""


class GaeCredit(CreditMethod):
    """PPO's GAE over all sampled tokens of an episode, with each turn's reward on its last token. Needs a critic's values."""

    formula: ClassVar[str] = "engine.rewards.credit.gae:first_token_gae"
    token_formula: ClassVar[str | None] = "engine.rewards.credit.gae:token_gae"
    needs_values: ClassVar[bool] = True

    method: Literal["gae"] = "gae"
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per token."""
    lam: float = Field(default=1.0, ge=0.0, le=1.0)
    """Lambda of the GAE. Below 1 the variance is smaller, and errors of the critic bias the gradient."""


class EntryCredit(CreditMethod):
    """A method of your own: `function(group: list[Member], **with)` returns an array of [turns] for each episode."""

    formula: ClassVar[str] = "engine.rewards.credit.entry:entry"
    takes_folder: ClassVar[bool] = True
    takes_penalties: ClassVar[bool] = False

    use: str = Field(min_length=1)
    """`package.module:function`."""
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")
    """Keyword arguments of the function."""
    method: Literal["entry"] = "entry"
    state_key: str | None = None
    """As in `gigpo`, for a function that reads `Member.state_keys`. Default: no states are stored."""


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
    | GaeCredit
    | EntryCredit,
    Field(discriminator="method"),
]
"""How turn rewards become advantages; `method` selects the method."""

_CREDIT: TypeAdapter[CreditSpec] = TypeAdapter(CreditSpec, config=ConfigDict(defer_build=True))

default_credit = TurnReturnCredit
"""Makes the method of a spec that names none."""


def read_credit(data: Any) -> CreditSpec:
    """Read `{method: turn_return, gamma: 0.9}`; nothing at all is the default method.

    Raises:
        ValidationError: there is no such method, or it has no such key.
    """
    return _CREDIT.validate_python(data) if data else default_credit()


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
