"""AReaL on episodes of a spec: the engine runs the episodes and gives the advantages, AReaL samples and updates the
weights.

    arguments = workflow_arguments(config, "spec.yaml", "runs/with-areal")
    with PPOTrainer(config, train_dataset=task_dataset("spec.yaml")) as trainer:
        watch(trainer.actor)
        trainer.train(workflow="engine.plugins.trainers.areal.EngineWorkflow", workflow_kwargs=arguments)

Parts: `workflow.py` refuses settings and runs the episodes, `backend.py` samples with AReaL's inference engine,
`rows.py` makes AReaL's tensors and compares the sums. Written for AReaL 1.0.4, which is imported when `EngineWorkflow`
is read, or by functions when they are called.
"""

from __future__ import annotations

from typing import Any

from engine.plugins.trainers.areal.rows import check_batches, sums_of_batch, trajectory
from engine.plugins.trainers.areal.workflow import (
    EngineGroups,
    refuse_settings,
    task_dataset,
    watch,
    workflow_arguments,
)
from engine.plugins.trainers.library import late_subclass

__all__ = [
    "EngineWorkflow",
    "check_batches",
    "refuse_settings",
    "sums_of_batch",
    "task_dataset",
    "trajectory",
    "watch",
    "workflow_arguments",
]


def __getattr__(name: str) -> Any:
    if name == "EngineWorkflow":
        return late_subclass(name, EngineGroups, "areal.api:RolloutWorkflow")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
