"""The steps of a training on written episodes (`train.kind: sft`): a resumed training has the rows that it would have
had.

The loss of a step is the mean cross-entropy of all trained tokens of its episodes, at temperature 1, over the ids that
the sampler can sample.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from engine.errors import TrainError
from engine.plugins.sft.demonstrations import data_of, demonstrations
from engine.train.batch_log import BatchRecord
from engine.train.step_source import StepBatch, StepSource

if TYPE_CHECKING:
    from engine.plugins.sft.demonstrations import Demonstrations
    from engine.schemas.train import TrainSpec
    from engine.spec.load import LoadedSpec
    from engine.store.rows.row import TrainingRow
    from engine.train.step_source import TrainResult

log = structlog.get_logger(__name__)

DATA = "data.json"
"""What the training was begun with: number of episodes and digest of all rows."""
MODEL = "model"
"""With LoRA: the folder of the trained model with the adapter merged in, when all steps are done."""
METRICS = ("loss", "grad_norm", "lr", "updates", "policy/entropy", "policy/confidence")
"""Metrics of an update that have a meaning without a sampler."""


class DemonstrationSteps(StepSource):
    """Batches of episodes of `train.data`. See `StepSource`."""

    _data: Demonstrations
    _most: int | None
    """Number of episodes of the whole training; None: unlimited."""

    @classmethod
    def steps_of(cls, loaded: LoadedSpec, train: TrainSpec, epochs: float) -> float:
        """See `StepSource`."""
        return math.ceil(epochs * len(demonstrations(loaded))) / data_of(loaded).episodes_per_step

    async def prepare(self) -> None:
        """Read the rows, and check that they are of this model and those that the training was begun with."""
        trainer = self._trainer
        self._data = await asyncio.to_thread(demonstrations, trainer.loaded)
        log.info("rows of the training", reason=self._data.summary())
        epochs = trainer.train.epochs
        self._most = math.ceil(epochs * len(self._data)) if epochs is not None else None
        await asyncio.to_thread(self._data.check_model, trainer.template)
        self._check_same_rows()

    def _check_same_rows(self) -> None:
        """Check that a resumed training has the rows that it was begun with.

        Raises:
            TrainError: kind `train_setup`: the rows have changed.
        """
        file = self._trainer.folder / DATA
        now = {"episodes": len(self._data), "rows": self._data.row_count, "digest": self._data.digest}
        if not file.exists():
            draft = file.with_name(f".{DATA}")
            draft.write_text(json.dumps(now | {"summary": self._data.summary()}) + "\n", encoding="utf-8")
            draft.replace(file)
            return
        before = json.loads(file.read_text(encoding="utf-8"))
        if before["digest"] != now["digest"]:
            raise TrainError(
                f"the rows of `train.data` have changed since this training began: {before['episodes']} episodes and "
                f"{before['rows']} rows then, {now['episodes']} and {now['rows']} now. Resume with the same files, or "
                "begin another training",
                kind="train_setup",
            )

    @asynccontextmanager
    async def opened(self, result: TrainResult) -> AsyncIterator[None]:
        """With LoRA, save the model with the adapter merged in at the end."""
        yield
        if self._trainer.train.adapter is not None and not result.interrupted:
            result.model = self._trainer.folder / MODEL
            await asyncio.to_thread(self._trainer.learner.policy.save, result.model)

    def rows_of(self, record: BatchRecord) -> list[TrainingRow]:
        """The rows of a recorded step."""
        return self._data.rows(record.used)

    async def batch(self) -> StepBatch:
        """The next episodes in order.

        Raises:
            TrainError: kind `no_data`: the epochs have ended.
        """
        train, step = self._trainer.train, self._trainer.state.step
        numbers = self._data.batch(step, self._most)
        if not numbers:
            raise TrainError(
                f"step {step + 1} has no episodes: `train.epochs` {train.epochs} end before", kind="no_data"
            )
        rows = await asyncio.to_thread(self._data.rows, numbers)
        tokens = float(sum(len(row.places) for row in rows))
        metrics = {
            "sft/episodes": float(len(numbers)),
            "sft/rows": float(len(rows)),
            "sft/epoch": (numbers[-1] + 1) / len(self._data),
            "tokens/trained": tokens,
        }
        return StepBatch(
            rows=rows,
            metrics=metrics,
            record=BatchRecord(0, 0, numbers, [], [], {}),
            tokens=tokens,
            update_metrics=METRICS,
        )
