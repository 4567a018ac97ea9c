"""What holds for `train.kind: sft`: the keys that it reads, and its loss."""

from __future__ import annotations

from typing import ClassVar, Literal

from engine.schemas.loss import Denominator, Loss
from engine.schemas.train import RolloutCorrectionSpec, TrainKind


class CrossEntropyLoss(Loss):
    """The mean cross-entropy of the trained tokens: REINFORCE with advantage 1. No value of `train.loss`."""

    formula: ClassVar[str] = "engine.train.losses.formulas:Reinforce"
    ratio_level: ClassVar[Literal["token", "sequence"] | None] = None
    clips_ratio: ClassVar[bool] = False
    denominator: ClassVar[Denominator] = "minibatch_tokens"

    kind: Literal["cross_entropy"] = "cross_entropy"


SFT = TrainKind(
    use="engine.plugins.sft.steps:DemonstrationSteps",
    samples=False,
    keys=frozenset(
        [
            "kind",
            "steps",
            "epochs",
            "shuffle",
            "seed",
            "optimizer",
            "precision",
            "device",
            "freeze",
            "memory",
            "weight_sync",
            "checkpoints",
        ]
    ),
    settings={"loss": CrossEntropyLoss(), "rollout_correction": RolloutCorrectionSpec(kind="none")},
)
