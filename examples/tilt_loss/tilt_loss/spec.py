"""`train.loss: {kind: tilt}`: the keys, and the facts that checks and metrics read. It imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from engine.schemas.loss import Denominator, Loss


class TiltLoss(Loss):
    """REINFORCE in which a token's weight grows with its probability ratio, up to a maximum."""

    formula: ClassVar[str] = "tilt_loss.formula:TiltedReinforce"
    ratio_level: ClassVar[Literal["token", "sequence"] | None] = "token"
    clips_ratio: ClassVar[bool] = False
    denominator: ClassVar[Denominator] = "step_tokens"

    kind: Literal["tilt"] = "tilt"
    """Tokens with a high ratio count more."""
    tilt: float = Field(default=0.5, ge=0.0)
    """Weight that a token gains for each unit of its ratio."""
    most: float = Field(default=3.0, ge=1.0)
    """Maximum weight of a token."""
