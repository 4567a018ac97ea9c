"""Steps after a checkpoint, repeated without sampling: each only with exactly the rows that it was trained on.

If one of a step's groups is not in the store, the batch log is cut there, and the training continues from the step before.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import structlog

from engine.train.batch_log import BatchLog, BatchRecord, to_repeat

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.store.rows.row import TrainingRow
    from engine.train.checkpoint import State
    from engine.train.learner import Learner

log = structlog.get_logger(__name__)

LOSS_TOLERANCE = 1e-3
"""Largest difference of a repeated step's loss from the recorded one, relative to 1 or to the loss, that is not reported."""


def repeat_steps(
    batch_log: BatchLog,
    records: Sequence[BatchRecord],
    rows_of: Callable[[BatchRecord], list[TrainingRow] | None],
    state: State,
    learner: Learner,
    done: Callable[[], None],
) -> list[BatchRecord]:
    """Bring a learner from a checkpoint to the newest step of the batch log. Call it in a thread.

    Args:
        batch_log: The batch log of the training.
        records: Its records.
        rows_of: Returns the training rows of a step; None if one of them is gone.
        state: The progress at the checkpoint; changed after each step.
        learner: Has the weights of the checkpoint.
        done: Called after each step.

    Returns:
        The records of all steps that the training has.

    Raises:
        TrainError: kind `diverged`.
    """
    for record in to_repeat(records, state.step):
        rows = rows_of(record)
        if rows is None:
            log.warning(
                "episodes of a step after the checkpoint are not in the run store; it is sampled again",
                step=record.step,
            )
            break
        if record.used:
            if "loss/length" not in record.metrics:
                learner.use_longest_episode()  # an older engine made the step
            metrics = learner.step(rows, state.step, rate=record.rate, most_updates=record.updates)
            _compare(record, metrics["loss"])
        state.step, state.version = record.step, record.version
        state.groups.add(record.numbers)
        done()
    remaining = [record for record in records if record.step <= state.step]
    if len(remaining) < len(records):
        batch_log.write(remaining)
    for record in remaining:
        state.groups.add(record.numbers)
    return remaining


def _compare(record: BatchRecord, loss: float) -> None:
    """Report a repeated step whose loss differs from the recorded one."""
    recorded = record.metrics.get("loss")
    complete = recorded is not None and record.metrics.get("updates") == record.updates
    if complete and not math.isclose(loss, recorded or 0.0, rel_tol=LOSS_TOLERANCE, abs_tol=LOSS_TOLERANCE):
        log.warning("a repeated step has another loss than before", step=record.step, loss=loss, before=recorded)
