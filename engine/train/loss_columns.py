"""What the learner computes beside the rows of a batch: one number for each trained token. The rows themselves do not change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from engine.runner.batch import ZERO_ADVANTAGE
from engine.schemas.base import Struct
from engine.store.rows.row import Doubles, Floats, TrainingRow


class LossColumns(Struct, frozen=True, kw_only=True):
    """A row with what its loss reads. n: the number of `row.places`."""

    row: TrainingRow
    advantages: Floats
    """Those of the row, unless a critic, penalties or whitening changed them. float32 [n]."""
    proximal: Floats | None = None
    """The policy's log-probs before the first update of the batch, float32 [n]; None if they are not computed separately."""
    weights: Doubles = msgspec.field(default_factory=lambda: np.zeros(0))
    """Loss weights, which depend on the mini-batch: float64 [n]."""
    extra: Mapping[str, Doubles] = msgspec.field(default_factory=dict)
    """Columns of other objectives by name, float64 [n] each. Of a critic: `values`, their targets `returns` and `has_value`, which is 1.0 on
    tokens before which a value is trained. `penalties`: see `credited_rows.py`."""

    @classmethod
    def of(cls, row: TrainingRow) -> LossColumns:
        """The columns of a row whose advantages are final."""
        return cls(row=row, advantages=row.advantages)


def minibatches(columns: Sequence[LossColumns], count: int, seed: tuple[int, int, int]) -> list[list[LossColumns]]:
    """Split the rows of a batch into `count` parts with about equally many tasks. Rows of one task stay together."""
    if count == 1:
        return [list(columns)]
    by_task: dict[str, list[LossColumns]] = {}
    for of_row in columns:
        by_task.setdefault(of_row.row.episode.task_id, []).append(of_row)
    tasks = list(by_task)
    order = np.random.default_rng(seed).permutation(len(tasks))
    parts = [part for part in np.array_split(order, count) if len(part)]
    return [[of_row for place in part for of_row in by_task[tasks[place]]] for part in parts]


def whitened_advantages(advantages: Sequence[Floats]) -> list[Floats]:
    """Whiten the advantages of the rows of a batch to mean 0 and standard deviation 1 over their trained tokens.

    REINFORCE++ (arXiv 2501.03262, section 3.2). If all advantages are equal, only the mean is subtracted.

    Args:
        advantages: For each row, float32 [n], as the result.
    """
    if not any(len(of_row) for of_row in advantages):
        return list(advantages)
    flat = np.concatenate(advantages).astype(np.float64)
    mean, spread = flat.mean(), flat.std()
    scale = 1.0 / spread if spread > ZERO_ADVANTAGE else 1.0
    return [((of_row - mean) * scale).astype(np.float32) for of_row in advantages]
