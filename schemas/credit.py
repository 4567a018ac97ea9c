"""The section `rewards`: rules that move rewards, the scorer, and the credit methods, one config class each.

To add a method: its formula in `engine/rewards/credit/formulas.py`, and its config class here and in `CREDITS`; or both
in a plugin, which names the class in `credits`. Checks, exports, JSON Schema and docs/spec.md read the class attributes
and ask for no `method`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from engine.schemas.base import Contract, adapter
from engine.schemas.reward import RewardChange
from engine.schemas.role import ScorerSpec
from engine.schemas.sections import OneOf


class CreditMethod(Contract):
    """Base class of the credit methods."""

    if TYPE_CHECKING:
        method: str = ""  # each method has a literal of its own

    formula: ClassVar[str]
    """`module:function` with the arguments (spec, group: list[Member]); returns for each episode float64 [turns]."""
    token_formula: ClassVar[str | None] = None
    """`module:function` with the same arguments; returns for each episode and turn float64 [sampled tokens]. None: each
    token has its turn's advantage."""
    takes_folder: ClassVar[bool] = False
    """`formula` has a third argument, the folder of the spec, to find a function of the user's own."""
    needs_values: ClassVar[bool] = False
    """The method needs a critic's value before each sampled token (`Member.values`)."""
    value_level: ClassVar[Literal["token", "turn"]] = "token"
    """With `needs_values`: it reads the values of all sampled tokens, or those before the first token of each turn."""
    takes_penalties: ClassVar[bool] = True
    """The method subtracts penalties of tokens (`Member.penalties`, `train.kl.in: reward`) from its rewards."""
    needs_state_key: ClassVar[bool] = False
    """It needs the state in which each turn began (`Member.state_keys`), with or without a `state_key` in the spec."""
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
    def last_turn_names(self) -> tuple[str, ...] | None:
        """Names of the only rewards of the last turn that change an advantage; None: all of them do."""
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
    def declared_state_key(self) -> str | None:
        """The key `state_key`; None if the spec does not set it or the method does not have it."""
        key: str | None = getattr(self, "state_key", None)
        return key


class ComparedCredit(CreditMethod):
    """Base class of the methods that compare an episode with its group."""

    baseline: Literal["mean", "leave_one_out", "none"] = "leave_one_out"
    """What is subtracted: the mean of the group, the mean of the group's other episodes, or nothing."""
    scale: Literal["std", "none"] = "none"
    """`std`: divide by the group's standard deviation, as in GRPO; this biases the gradient (docs/credit.md). `none`:
    do not divide."""

    @property
    def zero_without_group(self) -> bool:
        return self.baseline == "mean"


class DiscountedCredit(ComparedCredit):
    """Base class of the methods that discount the rewards of later turns."""

    turn_keys: ClassVar[tuple[str, ...]] = ("gamma",)

    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per turn."""


class OutcomeCredit(ComparedCredit):
    """The episode's reward relative to its group; the same advantage for all turns. GRPO with `baseline: mean` and
    `scale: std`."""

    formula: ClassVar[str] = "engine.rewards.credit.formulas:outcome"

    method: Literal["outcome"] = "outcome"

    @property
    def uses_turn_rewards(self) -> bool:
        return False


class TurnReturnCredit(DiscountedCredit):
    """The discounted return from each turn on, relative to the group's at the same turn."""

    formula: ClassVar[str] = "engine.rewards.credit.formulas:turn_return"

    method: Literal["turn_return"] = "turn_return"


class GigpoCredit(ComparedCredit):
    """GiGPO: the episode relative to its group, plus each turn relative to the group's turns that began in the same
    state."""

    formula: ClassVar[str] = "engine.rewards.credit.formulas:gigpo"
    needs_state_key: ClassVar[bool] = True
    default_state: ClassVar[str | None] = "the model was shown the same messages since its previous turn"
    turn_keys: ClassVar[tuple[str, ...]] = ("gamma",)

    method: Literal["gigpo"] = "gigpo"
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per turn in the returns that are compared within a state."""
    weight: float = Field(default=1.0, ge=0.0)
    """Factor of the turn's advantage within its state."""
    state_key: str | None = None
    """A CEL expression or the name of a fact, evaluated when a turn begins: turns with equal values began in the same
    state.
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


class EntryCredit(CreditMethod):
    """A method of your own: `function(group: list[Member], **with)` returns an array of [turns] for each episode."""

    formula: ClassVar[str] = "engine.rewards.credit.formulas:entry"
    takes_folder: ClassVar[bool] = True
    takes_penalties: ClassVar[bool] = False

    use: str = Field(min_length=1)
    """`package.module:function`."""
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")
    """Keyword arguments of the function."""
    method: Literal["entry"] = "entry"
    state_key: str | None = None
    """As in `gigpo`, for a function that reads `Member.state_keys`. Default: no states are stored."""


CREDITS: OneOf[CreditMethod] = OneOf(
    point="credits", core=(OutcomeCredit, TurnReturnCredit, GigpoCredit, EntryCredit), key="method"
)
CreditSpec = Annotated[CreditMethod, CREDITS]
"""How turn rewards become advantages; `method` selects the method."""


default_credit = TurnReturnCredit
"""Makes the method of a spec that names none."""


def read_credit(data: Any) -> CreditSpec:
    """Read `{method: turn_return, gamma: 0.9}`; nothing at all is the default method.

    Raises:
        ValidationError: there is no such method, or it has no such key.
    """
    annotation: Any = CreditSpec
    return adapter(annotation).validate_python(data) if data else default_credit()


class ReassignRule(RewardChange):
    """A rule that moves or writes rewards after the action of a state. Without a `cause`, its position is shown."""

    at: str = Field(min_length=1)
    """The state after whose action the rule is applied."""
    when: str | None = None
    """A CEL expression. Without one, the rule always applies."""
    op: Literal["add", "set", "transfer"] = "transfer"
    """Move a reward, add to it, or set it."""

    @model_validator(mode="before")
    @classmethod
    def _read_earlier(cls, data: Any) -> Any:
        """Earlier specs name the turn that pays `from`, and that of an `add` or a `set` `to`."""
        if not isinstance(data, Mapping) or "turn" in data:
            return data
        rule = {key: value for key, value in data.items() if key != "from" or value is not None}
        if rule.get("op") in ("add", "set"):
            return {"turn" if key == "to" else key: value for key, value in rule.items()}
        if "from" in rule:
            rule = {"to": "last", **rule, "turn": rule["from"]}
            del rule["from"]
        return rule


class RewardsSpec(Contract):
    """The reward rules, the credit method and the scorer."""

    reassign: list[ReassignRule] = Field(default_factory=list)
    """Rules that are applied in order, after the state's own rewards are written."""
    credit: CreditSpec = Field(default_factory=default_credit)
    """How turn rewards become advantages; `method` selects the method."""
    placement: Literal["last", "spread"] = "last"
    """Where a turn's reward lies in `token_rewards`: on its last sampled token, or in equal parts on all of them."""
    scorer: ScorerSpec | None = None
    """Called once at the end, in addition to the environment's `score`: `math-verify`, a function, or a model as
    judge."""
