"""TRL's GRPOTrainer on episodes of a spec: the engine runs the episodes and gives the advantages, TRL updates the
weights.

    rollouts = EngineRollouts("specs/train_arithmetic.yaml", "runs/trl-arithmetic")
    args = GRPOConfig(output_dir="runs/trl-arithmetic/model", **grpo_arguments(rollouts.loaded))
    with rollouts:
        EngineGRPOTrainer(rollouts, args).train()

Parts: `rollouts.py` runs the episodes and samples with the trainer's model, `grpo.py` has the trainer and compares the
sums of both sides of the hand-over, `arguments.py` TRL's arguments. TRL is imported when `EngineGRPOTrainer` is read.
"""

from __future__ import annotations

from typing import Any

from engine.plugins.trainers.library import late_subclass
from engine.plugins.trainers.trl.arguments import grpo_arguments
from engine.plugins.trainers.trl.rollouts import EngineRollouts

__all__ = ["EngineGRPOTrainer", "EngineRollouts", "grpo_arguments"]


def __getattr__(name: str) -> Any:
    if name == "EngineGRPOTrainer":
        from engine.plugins.trainers.trl.grpo import EngineGRPO

        return late_subclass(name, EngineGRPO, "trl:GRPOTrainer")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
