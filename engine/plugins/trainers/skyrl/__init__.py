"""SkyRL on episodes of a spec: the engine runs the episodes and gives the advantages, SkyRL samples and updates the
weights.

    cfg = SkyRLTrainConfig.from_cli_overrides(["trainer.algorithm.advantage_estimator=engine", …])
    EnginePPOExp(cfg, "spec.yaml", "runs/with-skyrl").run()

Parts: `experiment.py` refuses settings, and has the experiment, the trainer and the generator, which runs the episodes;
`backend.py` samples with SkyRL's inference engines, `rows.py` makes SkyRL's batch and compares its sums. Written for
SkyRL 0.3.0, which is imported when `EnginePPOExp` or `EngineGenerator` is read, or by functions when they are called.
"""

from __future__ import annotations

from typing import Any

from engine.plugins.trainers.skyrl.experiment import experiment_class, generator_class, refuse_settings
from engine.plugins.trainers.skyrl.rows import (
    ESTIMATOR,
    generator_output,
    identity_advantages,
    register_estimator,
    sums_of_batch,
)

__all__ = [
    "ESTIMATOR",
    "EngineGenerator",
    "EnginePPOExp",
    "generator_output",
    "identity_advantages",
    "refuse_settings",
    "register_estimator",
    "sums_of_batch",
]


def __getattr__(name: str) -> Any:
    if name in ("EngineGenerator", "EnginePPOExp"):
        return generator_class() if name == "EngineGenerator" else experiment_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
