"""What measures the weights of a training after some of its steps: a plugin, or nothing. It changes no weight and no
row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from engine.plugin import Hook
from engine.schemas.sections import written

if TYPE_CHECKING:
    from engine.actions.services import Cost
    from engine.train.trainer import Trainer


class Evaluator:
    """Measures nothing. A plugin has a subclass."""

    cost: Cost | None = None
    """What the training has cost; None before the first evaluation, and where no costs are counted."""

    def due(self, step: int) -> bool:
        """Whether the weights after a step are evaluated. Step 0: those before the first one."""
        return False

    async def evaluate(self, step: int) -> dict[str, float]:
        """Metrics of the weights that the backend has, which are those after `step`. Raises: EngineError: the
        evaluation failed."""
        return {}

    def note(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether the evaluation in a step's metrics, if there is one, is the best so far. Then the training's state
        has it."""
        return False


EVALUATE_TRAINING: Hook[Callable[[Trainer], Evaluator | None]] = Hook("evaluate_training")
"""Makes the evaluator of a training, which is not opened yet; None if its spec asks for none."""


def open_evaluator(trainer: Trainer) -> Evaluator:
    """The evaluator of a training, of the first plugin that has one."""
    made = (make(trainer) for make in EVALUATE_TRAINING.all(written(trainer.spec)))
    return next((evaluator for evaluator in made if evaluator is not None), Evaluator())
