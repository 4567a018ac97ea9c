"""The losses of `train.loss`: one config class each, with the facts that checks, metrics and docs read.

To add a loss: its computation in a new file of `engine/train/losses/`, and its config class here and in `LossSpec`.
Checks, loss weights, metrics, JSON Schema and docs/spec.md read the class attributes and ask for no `kind`. The
formulas are not here because they need torch, and `engine validate` does not import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from engine.schemas.base import Contract
from engine.schemas.sections import OneOf

Denominator = Literal["episode_tokens", "minibatch_tokens", "step_tokens", "constant_length", "episodes"]
"""What the sum of the token losses is divided by; `engine.train.loss_columns` has the formula of each."""

Clip = Annotated[float, Field(ge=0.0)]


class Loss(Contract):
    """Base class of the losses."""

    if TYPE_CHECKING:
        kind: str = ""  # each loss has a literal of its own

    formula: ClassVar[str]
    """`module:class` of the computation, a `engine.train.losses.formulas.PolicyLoss`."""
    ratio_level: ClassVar[Literal["token", "sequence"] | None]
    """Level of the probability ratio: one for each token, or for all tokens of a row. None: the loss has no ratio."""
    clips_ratio: ClassVar[bool]
    """The ratio has bounds. The metrics then count the tokens outside of them."""
    denominator: ClassVar[Denominator]
    """What the sum of the token losses is divided by."""
    ratio_keys: ClassVar[tuple[str, ...]] = ()
    """Keys that act only where the ratio is not 1. With one update per batch it is 1 for every token."""

    @property
    def constant_length(self) -> int | None:
        """The constant of `denominator: constant_length`, in tokens per episode. None: the first step measures it."""
        return None


class ClippedLoss(Loss):
    """Base class of the losses with PPO's clipped surrogate."""

    formula: ClassVar[str] = "engine.train.losses.formulas:ClippedSurrogate"
    ratio_level: ClassVar[Literal["token", "sequence"] | None] = "token"
    clips_ratio: ClassVar[bool] = True
    ratio_keys: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "delta")

    clip_low: float = Field(default=0.2, ge=0.0, le=1.0)
    """Lower clip bound: the ratio is clipped to at least 1 - clip_low."""
    clip_high: Clip = 0.2
    """Upper clip bound: the ratio is clipped to at most 1 + clip_high. DAPO (clip-higher) uses 0.28."""
    delta: float | None = Field(default=None, gt=1.0)
    """Two-sided clipping (dual-clip PPO): upper bound of the ratio for negative advantages. No bound if not set."""


class GrpoLoss(ClippedLoss):
    """GRPO: clipped ratio; mean over the tokens of each episode, then over episodes."""

    denominator: ClassVar[Denominator] = "episode_tokens"

    kind: Literal["grpo"] = "grpo"


class BnpoLoss(ClippedLoss):
    """BNPO: GRPO with the mean over all tokens of each mini-batch."""

    denominator: ClassVar[Denominator] = "minibatch_tokens"

    kind: Literal["bnpo"] = "bnpo"


class DrGrpoLoss(ClippedLoss):
    """Dr. GRPO: GRPO divided by a constant length, so that the length of a reply does not change the size of its
    gradient."""

    denominator: ClassVar[Denominator] = "constant_length"

    kind: Literal["dr_grpo"] = "dr_grpo"
    length: int | None = Field(default=None, ge=1)
    """The constant, in tokens per episode. Default: the mean number of trained tokens of an episode in the training's
    first step, which is then kept for all steps."""

    @property
    def constant_length(self) -> int | None:
        return self.length


class DapoLoss(ClippedLoss):
    """DAPO: clip-higher; mean over all tokens of the step."""

    denominator: ClassVar[Denominator] = "step_tokens"

    kind: Literal["dapo"] = "dapo"
    clip_high: Clip = 0.28
    """Upper clip bound: the ratio is clipped to at most 1 + clip_high. It is further from 1 than the lower bound."""


class GspoLoss(ClippedLoss):
    """GSPO: one ratio per row, the geometric mean of the ratios of its tokens."""

    ratio_level: ClassVar[Literal["token", "sequence"] | None] = "sequence"
    denominator: ClassVar[Denominator] = "episode_tokens"

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, ge=0.0, le=1.0)
    """Lower clip bound: the row's ratio is clipped to at least 1 - clip_low."""
    clip_high: Clip = 4e-4
    """Upper clip bound: the row's ratio is clipped to at most 1 + clip_high."""


class CispoLoss(Loss):
    """CISPO: the clipped ratio is a weight without gradient, so every token keeps its gradient."""

    formula: ClassVar[str] = "engine.train.losses.formulas:ClippedWeight"
    ratio_level: ClassVar[Literal["token", "sequence"] | None] = "token"
    clips_ratio: ClassVar[bool] = True
    ratio_keys: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")
    denominator: ClassVar[Denominator] = "step_tokens"

    kind: Literal["cispo"] = "cispo"
    clip_low: float | None = Field(default=None, ge=0.0, le=1.0)
    """Lower bound of the weight: 1 - clip_low. No lower bound if not set."""
    clip_high: Clip = 4.0
    """Upper bound of the weight: 1 + clip_high."""


class SapoLoss(Loss):
    """SAPO: a smooth gate around ratio 1 instead of clipping."""

    formula: ClassVar[str] = "engine.train.losses.formulas:SmoothGate"
    ratio_level: ClassVar[Literal["token", "sequence"] | None] = "token"
    clips_ratio: ClassVar[bool] = False
    ratio_keys: ClassVar[tuple[str, ...]] = ("temperature_positive", "temperature_negative")
    denominator: ClassVar[Denominator] = "episode_tokens"

    kind: Literal["sapo"] = "sapo"
    temperature_positive: float = Field(default=1.0, gt=0.0)
    """Temperature of the gate for positive advantages."""
    temperature_negative: float = Field(default=1.05, gt=0.0)
    """Temperature of the gate for all other advantages."""


class ReinforceLoss(Loss):
    """REINFORCE: advantage times log-prob. With a leave-one-out baseline it is RLOO; with batch-normalized advantages,
    REINFORCE++."""

    formula: ClassVar[str] = "engine.train.losses.formulas:Reinforce"
    ratio_level: ClassVar[Literal["token", "sequence"] | None] = None
    clips_ratio: ClassVar[bool] = False
    denominator: ClassVar[Denominator] = "episodes"

    kind: Literal["reinforce"] = "reinforce"


class PpoLoss(ClippedLoss):
    """PPO: clipped surrogate; mean over all tokens of the step."""

    denominator: ClassVar[Denominator] = "step_tokens"

    kind: Literal["ppo"] = "ppo"


LOSSES: OneOf[Loss] = OneOf(
    point="losses",
    core=(GrpoLoss, BnpoLoss, DrGrpoLoss, DapoLoss, GspoLoss, CispoLoss, SapoLoss, ReinforceLoss, PpoLoss),
)
LossSpec = Annotated[Loss, LOSSES]
"""The loss; `kind` selects it."""
