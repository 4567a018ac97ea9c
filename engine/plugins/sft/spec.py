"""`train.kind: sft`: the section `train.data`, the keys of `train` that it reads, and its loss."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from engine.schemas.loss import Denominator, Loss
from engine.schemas.sections import SpecSection
from engine.schemas.train import RolloutCorrectionSpec, TrainKind

SUFFIXES = (".jsonl", ".parquet")
"""Of files of `engine export`."""
_Path = Annotated[str, Field(min_length=1)]


class SftDataSpec(SpecSection):
    """Which episodes of which files are trained on, and how many a step takes."""

    NULLABLE: ClassVar[bool] = True

    path: _Path | Annotated[list[_Path], Field(min_length=1)]
    """File of `engine export` (`.jsonl` or `.parquet`), a folder of such files, or a list of both; relative to the
    spec."""
    min_reward: float | None = None
    """Only episodes with at least this reward. All episodes if null."""
    reward: str | None = Field(default=None, min_length=1)
    """With `min_reward`: the name of the reward. Default: the sum of all rewards of the episode (`outcome.reward`)."""
    episodes_per_step: int = Field(default=32, ge=1)
    """Episodes per step. Each step makes one update with all rows of its episodes."""


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
