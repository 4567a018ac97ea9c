"""Mini-batches: the parts of a batch that get one update each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from engine.store.rows.export import Row


def minibatches(rows: Sequence[Row], count: int, seed: tuple[int, int, int]) -> list[list[Row]]:
    """Split rows into `count` parts with about equally many tasks. Rows of one task stay together."""
    if count == 1:
        return [list(rows)]
    by_task: dict[str, list[Row]] = {}
    for row in rows:
        by_task.setdefault(row["task_id"], []).append(row)
    tasks = list(by_task)
    order = np.random.default_rng(seed).permutation(len(tasks))
    parts = [part for part in np.array_split(order, count) if len(part)]
    return [[row for place in part for row in by_task[tasks[place]]] for part in parts]
