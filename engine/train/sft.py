"""The training on written episodes (`train.kind: sft`): the cross-entropy of their sampled tokens.

Invariants, in addition to those of `loop.py`:
- The loss of a step is the mean over all trained tokens of its episodes, at temperature 1, over the ids that the sampler can sample.
- A resumed training makes the steps that it would have made without the interruption, with the same rows and learning rates.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from engine.backends.registry import open_backend
from engine.errors import TrainError
from engine.store.lock import RunLock
from engine.tokens.loading import load_format
from engine.train.batch_log import BatchRecord
from engine.train.demonstrations import count_episodes, demonstrations
from engine.train.loop import TrainingLoop, TrainResult
from engine.train.repeated_steps import StepRepeater
from engine.train.setup import learner_of
from engine.train.stopping import unless_stopped
from engine.train.sync import open_sync

if TYPE_CHECKING:
    from engine.store.rows.row import TrainingRow
    from engine.train.demonstrations import Demonstrations

log = structlog.get_logger(__name__)

DATA = "data.json"
"""What the training was begun with: number of episodes and digest of all rows."""
MODEL = "model"
"""With LoRA: the folder of the trained model with the adapter merged in, when all steps are done."""
METRICS = ("loss", "grad_norm", "lr", "updates", "policy/entropy", "policy/confidence")
"""Metrics of an update that have a meaning without a sampler."""


class SftTrainer(TrainingLoop):
    """One training on written episodes, new or resumed. Arguments as in `TrainingLoop`."""

    _data: Demonstrations
    _most: int | None

    async def _run_prepared(self, stop: asyncio.Event | None) -> TrainResult:
        lock = RunLock(self.folder)
        try:
            self._data = await asyncio.to_thread(demonstrations, self.loaded)
            log.info("rows of the training", reason=self._data.summary())
            self._most = count_episodes(self.loaded, self.train.epochs) if self.train.epochs is not None else None
            self._format = load_format(self.spec.model, self.loaded.base)
            await asyncio.to_thread(self._data.check_model, self._format)
            self._check_same_rows()
            async with self._evaluating():
                return await self._run_opened(stop)
        finally:
            lock.release()

    @contextlib.asynccontextmanager
    async def _evaluating(self) -> AsyncIterator[None]:
        """Open the learner, and the backend if there are evaluations."""
        async with contextlib.AsyncExitStack() as opened:
            if self.train.eval is not None:
                self._backend = open_backend(self.loaded, self._format)
                self._backend.logs = self.folder / "servers"
                self._backend.training = True
                opened.push_async_callback(self._backend.close)
                await self._backend.start()
            self._learner = await asyncio.to_thread(learner_of, self.loaded, self._format, self._process_group)
            if self.train.eval is not None:
                self._sync = open_sync(self.spec, self._backend, self.folder, lora=self.train.lora is not None)
            yield

    def _check_same_rows(self) -> None:
        """Check that a resumed training has the rows that it was begun with.

        Raises:
            TrainError: kind `train_setup`: the rows have changed.
        """
        file = self.folder / DATA
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
                f"{before['rows']} rows then, {now['episodes']} and {now['rows']} now. Resume with the same files, or begin another training",
                kind="train_setup",
            )

    async def _run_opened(self, stop: asyncio.Event | None) -> TrainResult:
        await self._open_state()
        try:
            result = TrainResult(self._state.step)
            async with self._saving(result):
                repeater = StepRepeater(self._batch_log, self._recorded_rows)
                self._weights_known = False
                result.repeated_steps = await asyncio.to_thread(
                    repeater.repeat, self._state, self._learner, self._repeated_step
                )
                self._weights_known = True
                self._continue_metrics()
                await self._push()
                await self._write_missing_lines(repeater.records, stop)
                await self._steps(result, stop)
            if self.train.lora is not None and not result.interrupted:
                result.model = await asyncio.to_thread(self._save_merged)
            return result
        finally:
            self._metrics.close()

    def _save_merged(self) -> Path:
        """Write the model with the adapter merged in, from which an RL training can begin."""
        policy, folder = self._learner.policy, self.folder / MODEL
        policy.save(folder)
        return folder

    def _recorded_rows(self, record: BatchRecord) -> list[TrainingRow]:
        return self._data.rows(record.used)

    async def _push(self) -> None:
        """Send the weights to the backend of the evaluations."""
        if self.train.eval is not None:
            with self._timed("sync"):
                await self._push_weights()

    async def _steps(self, result: TrainResult, stop: asyncio.Event | None) -> None:
        """Run steps up to the last one. `stop` is obeyed between two updates, and in an evaluation at once."""
        train, state = self.train, self._state
        while state.step < train.steps and not result.interrupted:
            began = time.perf_counter()
            values = await self._step()
            result.interrupted = stop is not None and stop.is_set()
            if self._evaluator.due(state.step):
                found = None
                if not result.interrupted:
                    await self._push()
                    found = await unless_stopped(stop, self._evaluate())
                if found is None:  # the next launch evaluates this step and writes its line
                    result.interrupted = True
                    return
                values |= found
            if self._evaluator.note(state, state.step, values) or state.step % train.checkpoints.every == 0:
                await self._checkpoint()
            seconds = time.perf_counter() - began
            values |= {f"time/{phase}": spent for phase, spent in self._seconds.items()}
            values |= {"step_seconds": seconds, "tokens_per_second": values["tokens/trained"] / seconds}
            values |= self._pushed
            self._seconds.clear()
            self._pushed.clear()
            self._write_line(state.step, values)
            self._observers.progressed()
            result.first, result.last = result.first or values, values

    async def _step(self) -> dict[str, float]:
        """Make the update of the next step, and write it to the batch log. Returns its metrics."""
        state, data = self._state, self._data
        numbers = data.batch(state.step, self._most)
        if not numbers:
            raise TrainError(
                f"step {state.step + 1} has no episodes: `train.epochs` {self.train.epochs} end before", kind="no_data"
            )
        rows = await asyncio.to_thread(data.rows, numbers)
        try:
            told = await self._learn(rows)
        except TrainError:
            self._weights_known = True  # a step is one update, and this one was not made
            raise
        values = {name: told[name] for name in METRICS if name in told} | {
            "sft/episodes": float(len(numbers)),
            "sft/rows": float(len(rows)),
            "sft/epoch": (numbers[-1] + 1) / len(data),
            "tokens/trained": float(sum(len(row.places) for row in rows)),
        }
        state.step += 1
        state.version += 1
        finite = {name: value if abs(value) < float("inf") else None for name, value in values.items()}
        self._batch_log.append(
            BatchRecord(state.step, state.version, numbers, [], [], {}, len(rows), 1, values["lr"], finite)
        )
        self._weights_known = True
        return values
