"""The batch log of a training: which groups each step was trained on, in `batches.jsonl`.

A line is written after the updates of a step and before its weights are sent to the backend. A resumed training repeats
the steps after its checkpoint from this log and the run store, so it reaches the weights that the newest episodes were
sampled with, and samples nothing twice.

Invariants:
- A line is on disk before any token is sampled with the weights that its step made.
- A step that is repeated has the same rows, the same learning rate and the same number of updates.

Steps after a checkpoint are repeated from it without sampling: each only with exactly the rows that it was trained on.
If one of a step's groups is not in the store, the log is cut there, and the training continues from the step before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.errors import TrainError
from engine.schemas.base import Struct
from engine.store.json_lines import JsonLines
from engine.store.training import BATCHES

if TYPE_CHECKING:
    from engine.runner.batch import Batch
    from engine.runner.task_order import TaskOrder


class BatchRecord(Struct, frozen=True):
    """One line: the batch of one step. Or, with `step_made` false, groups that were consumed without a step."""

    step: int
    """Number of the step, from 1; without a step, the number of the last one."""
    version: int
    """Version of the weights after it."""
    used: list[int]
    """Numbers of the groups that it was trained on."""
    left_out: list[int]
    """Numbers of the groups that it sampled and did not train on."""
    dropped: list[int]
    """Numbers of the groups that were cancelled, or too old."""
    tasks: dict[str, str]
    """Task id of each of these groups by its number."""
    rows: int = 0
    """Number of training rows."""
    updates: int = 0
    """Number of updates that were made. Fewer than a step has where a later update of it diverged."""
    rate: float = 0.0
    """The learning rate."""
    metrics: dict[str, float | None] = msgspec.field(default_factory=dict)
    """Metrics of the step, without those of its evaluation; null is a value that is not finite."""
    step_made: bool = True
    skipped: list[int] = msgspec.field(default_factory=list)
    """Numbers of the draws that the filter skipped."""
    solved: dict[str, list[int]] = msgspec.field(default_factory=dict)
    """With a filter of draws: its results of each group that was sampled, by its number (`difficulty`: solved and all
    episodes)."""

    @classmethod
    def of(cls, batch: Batch, order: TaskOrder, solved: dict[str, list[int]] | None = None) -> BatchRecord:
        """The record of a batch before its step: its groups."""
        used, left_out = ([group.number for group in groups] for groups in (batch.used, batch.left_out))
        dropped = [*batch.cancelled, *batch.stale]
        tasks = {str(number): order[number].id for number in sorted([*used, *left_out, *dropped])}
        return cls(0, 0, used, left_out, dropped, tasks, skipped=batch.skipped, solved=solved or {})

    @property
    def numbers(self) -> list[int]:
        """The groups that it consumed."""
        return [*self.used, *self.left_out, *self.dropped, *self.skipped]


class BatchLog(JsonLines[BatchRecord]):
    """The batch log in a training's folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / BATCHES, lambda line: BatchRecord(**line))


def check_tasks(records: Sequence[BatchRecord], order: TaskOrder) -> None:
    """Check that the numbers of groups still mean the same tasks.

    Raises:
        TrainError: kind `train_setup`: the tasks of the spec have changed.
    """
    for record in records:
        for number, task_id in record.tasks.items():
            now = order[int(number)].id
            if now != task_id:
                raise TrainError(
                    f"the tasks have changed since this training began: group {number} was of task `{task_id}` and "
                    f"would now be of `{now}`. Resume with the tasks that it began with, or begin another training",
                    kind="train_setup",
                )


def to_repeat(records: Sequence[BatchRecord], step: int) -> list[BatchRecord]:
    """The records of the steps after a checkpoint, each step once and without a gap.

    Args:
        records: All records.
        step: Number of steps that the checkpoint has.
    """
    by_step = {record.step: record for record in records if record.step_made}
    steps = []
    while step + 1 in by_step:
        step += 1
        steps.append(by_step[step])
    return steps


LOSS_TOLERANCE = 1e-3
"""Largest difference of a repeated step's loss from the recorded one, relative to 1 or to the loss, that is not
reported."""


def same_loss(record: BatchRecord, loss: float) -> bool:
    """Whether a repeated step has the recorded loss. A step that diverged after some updates recorded none."""
    recorded = record.metrics.get("loss")
    if recorded is None or record.metrics.get("updates") != record.updates:
        return True
    return math.isclose(loss, recorded, rel_tol=LOSS_TOLERANCE, abs_tol=LOSS_TOLERANCE)
