"""Repeat the steps after a checkpoint from the batch log and the run store, without sampling.

Invariant: a step is repeated only with exactly the groups that it was trained on. If one of them is not in the store, the log is
cut there, and the training continues from the step before.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import structlog

from engine.train.batch_log import BatchLog, BatchRecord, to_repeat

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.store.rows.row import TrainingRow
    from engine.train.batches import GroupBuilder
    from engine.train.checkpoint import State
    from engine.train.learner import Learner
    from engine.train.stored_groups import StoredEpisodes

log = structlog.get_logger(__name__)

LOSS_TOLERANCE = 1e-3
"""Largest difference of a repeated step's loss from the recorded one, relative to 1 or to the loss, that is not reported."""


class StepRepeater:
    """Brings a learner from a checkpoint to the newest step of the batch log.

    Args:
        batch_log: The batch log of the training.
        rows_of: Returns the training rows of a step; None if one of them is gone.
    """

    def __init__(self, batch_log: BatchLog, rows_of: Callable[[BatchRecord], list[TrainingRow] | None]) -> None:
        self._log = batch_log
        self._rows_of = rows_of
        self.records = batch_log.read()
        """The records of all steps that the training has, after `repeat`."""

    def repeat(self, state: State, learner: Learner, done: Callable[[], None]) -> int:
        """Repeat the steps after `state.step`. Call it in a thread.

        Args:
            state: The progress at the checkpoint; changed after each step.
            learner: Has the weights of the checkpoint.
            done: Called after each step.

        Returns:
            Number of repeated steps.

        Raises:
            TrainError: kind `diverged`.
        """
        began = state.step
        for record in to_repeat(self.records, state.step):
            rows = self._rows_of(record)
            if rows is None:
                log.warning(
                    "episodes of a step after the checkpoint are not in the run store; it is sampled again",
                    step=record.step,
                )
                break
            if record.used:
                if "loss/length" not in record.metrics:
                    learner.use_longest_episode()  # an older engine made the step
                told = learner.step(rows, state.step, rate=record.rate, most_updates=record.updates)
                _compare(record, told["loss"])
            state.step, state.version = record.step, record.version
            state.groups.add(record.numbers)
            done()
        kept = [record for record in self.records if record.step <= state.step]
        if len(kept) < len(self.records):
            self._log.write(kept)
        self.records = kept
        for record in kept:
            state.groups.add(record.numbers)
        return state.step - began


def stored_rows(builder: GroupBuilder, stored: StoredEpisodes) -> Callable[[BatchRecord], list[TrainingRow] | None]:
    """Make the function that builds the training rows of a step from the run store.

    Args:
        builder: Builds the training rows of a group.
        stored: The episodes of earlier launches.
    """

    def rows_of(record: BatchRecord) -> list[TrainingRow] | None:
        rows: list[TrainingRow] = []
        for number in record.used:
            of_group = builder.rows(stored.finished_group(record.tasks[str(number)]))
            if not of_group:
                return None
            rows += of_group
        return rows if len(rows) == record.rows else None

    return rows_of


def _compare(record: BatchRecord, loss: float) -> None:
    """Report a repeated step whose loss differs from the recorded one."""
    recorded = record.metrics.get("loss")
    complete = recorded is not None and record.metrics.get("updates") == record.updates
    if complete and not math.isclose(loss, recorded or 0.0, rel_tol=LOSS_TOLERANCE, abs_tol=LOSS_TOLERANCE):
        log.warning("a repeated step has another loss than before", step=record.step, loss=loss, before=recorded)
