"""The training loop: collect a batch, train on it, send the new weights to the backend, repeat.

Invariants:
- Whenever a training ends, by an error, a divergence, a signal or a lost server, the weights after the last update are
  in a checkpoint, and an error's message names it. Before the first update there is nothing to save.
- A group is trained on at most once, and all sampled tokens are used or counted: see `batch_log.py`, `groups.py`.
- Each finished step gets one line of `metrics.jsonl`. A resumed training writes the lines that are missing after a kill.
- With `asynchrony.max_staleness: 0` sampling and training alternate.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from engine.backends.registry import open_backend
from engine.errors import EngineError, TrainError
from engine.masking import mask_values
from engine.runner.overlong import fitting_tasks
from engine.runner.run import Runner
from engine.spec.tasks import load_tasks
from engine.tokens.loading import load_format
from engine.train import folder as folders
from engine.train.batch_log import BatchLog, BatchRecord
from engine.train.batches import Batch, RowBuilder
from engine.train.checkpoint import Checkpoints, State
from engine.train.credit_reach import reach_of
from engine.train.distributed import ProcessGroup, SingleProcessGroup
from engine.train.evaluation import Evaluator
from engine.train.learner import Learner
from engine.train.metrics import MetricsLog, read_metrics
from engine.train.notify import Notifier, StallWatch
from engine.train.repeat import StepRepeater
from engine.train.rollouts import BatchCollector, TaskOrder
from engine.train.setup import learner_of, train_spec_of
from engine.train.stopping import unless_stopped
from engine.train.stored import StoredEpisodes
from engine.train.sync import open_sync

if TYPE_CHECKING:
    from engine.backends.base import Backend
    from engine.schemas.trajectory import Trajectory
    from engine.spec.load import LoadedSpec
    from engine.store import RunStore
    from engine.tokens.format import ChatFormat
    from engine.train.sync import WeightSync

log = structlog.get_logger(__name__)

_RESUMED = ("rollout/resumed_episodes", "rollout/regenerated_tokens", "rollout/dropped_stale_groups")

StepCallback = Callable[[int, Mapping[str, float]], None]
"""Called after each finished step with its number, from 1 (0: evaluation before the first step), and its metrics."""


@dataclass(slots=True)
class TrainResult:
    """The result of a training."""

    steps: int
    """Number of finished steps, including those of earlier launches."""
    first: dict[str, float] = field(default_factory=dict)
    """Metrics of the first step of this launch."""
    last: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step."""
    checkpoint: Path | None = None
    best: float | None = None
    best_step: int | None = None
    interrupted: bool = False
    faults: list[str] = field(default_factory=list)
    repeated_steps: int = 0
    """Steps that this launch repeated from stored episodes, because they came after the checkpoint that it resumed from."""
    resumed: Counter[str] = field(default_factory=Counter)
    """Totals of this launch of the metrics `rollout/…`: episodes that continued, tokens sampled again, groups dropped."""


class Trainer:
    """One training, new or resumed.

    Args:
        loaded: The spec.
        folder: The folder of the training, made by `folder.begin`.
        on_step: Called after each step.
        phase: Called at the start of each phase: `rollout`, `update`, `sync`, `eval`, `checkpoint`.
        watch: Called with the runner when it exists, for a live display.
        keep_going: Do not stop if the first episodes all fail with one cause.
        process_group: The processes of the training. This is process 0; the others run `setup.follow`.
    """

    def __init__(
        self,
        loaded: LoadedSpec,
        folder: Path,
        *,
        process_group: ProcessGroup | None = None,
        on_step: StepCallback | None = None,
        phase: Callable[[str], None] | None = None,
        watch: Callable[[Runner], None] | None = None,
        keep_going: bool = False,
    ) -> None:
        self.loaded = loaded
        self.spec = loaded.spec
        self.train = train_spec_of(loaded)
        self.folder = folder
        self._process_group = process_group or SingleProcessGroup()
        self._on_step = on_step
        self._phase = phase
        self._watch = watch
        self._keep_going = keep_going
        self._state = State()
        self._checkpoints = Checkpoints(folder, self.train.checkpoints.keep)
        self._newest_checkpoint: Path | None = None
        self._batch_log = BatchLog(folder)
        self._evaluator = Evaluator(loaded, folder, self.train, keep_going=keep_going)
        self._weights_known = True
        """Whether the learner's weights are those after the updates that `_state` counts."""
        self._seconds: dict[str, float] = {}
        self._notifier = Notifier(self.train.notify, folder.name, base=loaded.base)
        self._stall = StallWatch(self._notifier, self.train.notify.stall_timeout, lambda: {"step": self._state.step})
        self._format: ChatFormat
        self._backend: Backend
        self._learner: Learner
        self._sync: WeightSync
        self._metrics: MetricsLog
        self._order: TaskOrder

    async def run(self, *, stop: asyncio.Event | None = None) -> TrainResult:
        """Train to the last step, or until `stop` is set. Then a checkpoint is written; running episodes stay in the store.

        Raises:
            TrainError: kind `train_setup`: the training cannot start; `diverged`; `no_data`: no episode can be trained on.
            EngineError: the backend, the store or the evaluation failed.
        """
        try:
            with self._stall:
                result = await self._run_prepared(stop)
            if not result.interrupted:
                await self._notifier.notify("finished", step=result.steps, **_notified_metrics(result.last))
            return result
        except asyncio.CancelledError:
            raise
        except Exception as error:
            kind = "diverged" if isinstance(error, TrainError) and error.kind == "diverged" else "failed"
            await self._notifier.notify(kind, step=self._state.step, reason=f"{type(error).__name__}: {error}")
            raise

    async def _run_prepared(self, stop: asyncio.Event | None) -> TrainResult:
        self._format = load_format(self.spec.model, self.loaded.base)
        tasks = fitting_tasks(load_tasks(self.loaded), self.loaded, self._format)
        self._order = TaskOrder(tasks, shuffle=self.train.shuffle, seed=self.train.seed)
        self._backend = open_backend(self.loaded, self._format)
        try:
            await self._backend.start()
            self._learner = await asyncio.to_thread(learner_of, self.loaded, self._format, self._process_group)
            self._sync = open_sync(self.spec, self._backend, self.folder, lora=self.train.lora is not None)
            store = folders.open_rollouts(
                self.folder, self.loaded
            )  # locks the folder: no other process can train in it
            try:
                return await self._run_with_store(store, stop)
            finally:
                store.close()
        finally:
            await self._backend.close()

    async def _push_weights(self) -> None:
        """Send the current weights to the backend."""
        policy = self._learner.policy
        with contextlib.ExitStack() as whole:
            await asyncio.to_thread(whole.enter_context, self._process_group.full_parameters(policy.model))
            await self._sync.push(policy, self._state.version)

    async def _run_with_store(self, store: RunStore, stop: asyncio.Event | None) -> TrainResult:
        config = mask_values(self.spec.model_dump(mode="json"))
        resumed = self._checkpoints.newest()
        if resumed is None:
            torch.manual_seed(self.train.seed)
        else:
            self._state = await asyncio.to_thread(self._checkpoints.read, resumed, self._learner)
            self._newest_checkpoint = resumed
        self._metrics = MetricsLog(self.folder, self.train.report_to, self.folder.name, config, self.train.tracking)
        try:
            runner = Runner(
                self.loaded, [], self._format, self._backend, store, keep_going=self._keep_going, training=True
            )
            runner.live.total = self.train.steps * self.train.tasks_per_step * self.spec.rollout.samples_per_task
            if self._watch is not None:
                self._watch(runner)
            async with runner.serving():
                return await self._run_saved(runner, StoredEpisodes(store, self.spec.rollout.samples_per_task), stop)
        finally:
            self._metrics.close()

    async def _run_saved(self, runner: Runner, stored: StoredEpisodes, stop: asyncio.Event | None) -> TrainResult:
        """Repeat the steps after the checkpoint, then train. The last finite state is saved at the end and on errors."""
        try:
            rows = RowBuilder(self.spec, self.train, self.loaded.base)
            repeater = StepRepeater(self._batch_log, self._order, rows, stored)
            self._weights_known = False
            repeated = await asyncio.to_thread(repeater.repeat, self._state, self._learner, self._repeated_step)
            self._weights_known = True
            self._metrics.truncate(self._state.step)
            if self._state.version or self.spec.backend.weights_in_servers:
                # A server may have other weights: send the current ones before the first token is sampled.
                await self._push_weights()
            result = TrainResult(self._state.step, repeated_steps=repeated)
            await self._write_missing_lines(repeater.records, stop)
            collector = self._collector(runner, rows, stored)
            result.faults = collector.faults
            try:
                await self._steps(result, collector, stop)
            finally:
                await collector.close()
        except Exception as error:
            await self._save_after(error)
            raise
        await self._checkpoint_if_trained()
        state = self._state
        result.steps, result.checkpoint = state.step, self._newest_checkpoint
        result.best, result.best_step = state.best, state.best_step
        return result

    def _repeated_step(self) -> None:
        """After a repeated step: write the checkpoint that is due, so that repeated kills do not repeat the same steps."""
        if self._state.step % self.train.checkpoints.every == 0:
            self._newest_checkpoint = self._checkpoints.write(self._state, self._learner)

    async def _write_missing_lines(self, records: Sequence[BatchRecord], stop: asyncio.Event | None) -> None:
        """Write the metrics of finished steps that have no line yet, because an earlier launch ended before it wrote them."""
        written = {int(line["step"]): line for line in read_metrics(self.folder)}
        for step in sorted(written.keys() - {0}):
            self._evaluator.note(
                self._state, step, written[step]
            )  # from repeated steps, whose checkpoints do not have it
        if self._state.step == 0 and 0 not in written and self.train.eval is not None:
            values = await unless_stopped(stop, self._evaluate())
            if values is not None:
                self._write_line(0, values)
        for record in records:
            if not record.step_made or record.step in written:
                continue
            values = {name: math.nan if value is None else value for name, value in record.metrics.items()}
            if record.step == self._state.step and self._evaluator.due(record.step):
                found = await unless_stopped(stop, self._evaluate())
                if found is None:
                    return
                values |= found
                if self._evaluator.note(self._state, record.step, found):
                    await self._checkpoint()
            self._write_line(record.step, values)

    def _collector(self, runner: Runner, rows: RowBuilder, stored: StoredEpisodes) -> BatchCollector:
        rollout = self.spec.rollout

        def ended(trajectory: Trajectory) -> None:
            self._stall.tick()
            runner.count(trajectory)

        return BatchCollector(
            runner,
            self._order,
            rows,
            self.train,
            samples=rollout.samples_per_task,
            batches=self.train.steps - self._state.step,
            max_live_episodes=rollout.live_episodes or 2 * rollout.concurrency,
            version=self._state.version,
            consumed=self._state.groups,
            stored=stored,
            progress=ended,
        )

    async def _steps(self, result: TrainResult, collector: BatchCollector, stop: asyncio.Event | None) -> None:
        """Run steps up to the last one. `stop` ends the collection of a batch at once, but a running update is finished."""
        train, state = self.train, self._state
        while state.step < train.steps and not result.interrupted:
            began = time.perf_counter()
            with self._timed("rollout"):
                batch = await unless_stopped(stop, collector.batch())
            if batch is None:
                result.interrupted = True
                return
            values = await self._step(batch, collector)
            result.interrupted = stop is not None and stop.is_set()
            if not result.interrupted:
                with self._timed("sync"):
                    if batch.used:
                        await unless_stopped(stop, self._push_weights())
                collector.batch_trained(state.version)
            if self._evaluator.due(state.step):
                found = None if result.interrupted else await unless_stopped(stop, self._evaluate())
                if found is None:  # the next launch evaluates this step and writes its line
                    result.interrupted = True
                    return
                values |= found
            if self._evaluator.note(state, state.step, values) or state.step % train.checkpoints.every == 0:
                await self._checkpoint()
            values |= self._times(time.perf_counter() - began, values)
            self._seconds.clear()
            self._write_line(state.step, values)
            self._stall.tick()
            result.first, result.last = result.first or values, values
            result.resumed.update({name: int(values[name]) for name in _RESUMED if name in values})

    async def _step(self, batch: Batch, collector: BatchCollector) -> dict[str, float]:
        """Train on a batch and write its metrics to the batch log. Returns the metrics."""
        values = batch.metrics()
        reach = reach_of(self.spec.rewards.credit, [*batch.used, *batch.left_out], self.loaded.base)
        values |= reach.metrics()
        if unplaced := reach.unplaced():
            log.warning("rewards reach no token", step=self._state.step + 1, rewards=unplaced)
        if batch.used:
            values |= await self._learn(batch, values)
        elif not any(group.rows for group in batch.left_out):
            self._record(batch, values, step_made=False)  # marks the groups as consumed
            raise batch.no_data(collector.faults)
        else:
            values["updates"] = 0.0
        self._record(batch, values, updates=self._learner.updates if batch.used else 0)
        return values

    def _record(self, batch: Batch, values: Mapping[str, float], *, updates: int = 0, step_made: bool = True) -> None:
        """Count a step and write it to the batch log."""
        state = self._state
        state.step += step_made
        state.version += bool(updates)
        record = BatchRecord.of(
            batch,
            self._order,
            step=state.step,
            version=state.version,
            metrics=values,
            updates=updates,
            step_made=step_made,
        )
        state.groups.add(record.numbers)
        self._batch_log.append(record)
        self._weights_known = True

    async def _learn(self, batch: Batch, values: Mapping[str, float]) -> dict[str, float]:
        """Run the updates of a batch in a thread, so that rollouts can continue meanwhile."""
        self._weights_known = False
        with self._timed("update"):
            work = asyncio.ensure_future(asyncio.to_thread(self._learner.step, batch.rows, self._state.step))
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                with contextlib.suppress(Exception):  # a thread cannot be stopped in the middle of an update
                    await work
                raise
            except TrainError:
                updates = self._learner.updates
                self._weights_known = updates == 0
                if updates:  # the step counts with the updates that it made before the one that diverged
                    rate = self._learner.rate
                    self._record(batch, {**values, "lr": rate, "updates": float(updates)}, updates=updates)
                raise

    async def _checkpoint(self) -> None:
        with self._timed("checkpoint"):
            self._newest_checkpoint = await asyncio.to_thread(self._checkpoints.write, self._state, self._learner)

    async def _checkpoint_if_trained(self) -> None:
        """Write a checkpoint, unless the weights are still those of the spec's model."""
        if self._state.step:
            await self._checkpoint()

    async def _save_after(self, error: Exception) -> None:
        """Save the last finite state after an error, and name the checkpoint in the error's message."""
        try:
            if self._weights_known:
                await self._checkpoint_if_trained()
        except EngineError as failed:
            log.warning("the last state could not be saved", reason=str(failed))
        if self._newest_checkpoint is not None:
            words = f"The last saved state is {self._newest_checkpoint}"
        else:
            words = "No step was finished, so there is no checkpoint; the episodes are kept"
        if error.args and isinstance(error.args[0], str):
            error.args = (f"{error.args[0]}\n{words}", *error.args[1:])

    async def _evaluate(self) -> dict[str, float]:
        """Evaluate the current policy. Returns the metrics of the evaluation."""
        with self._timed("eval"):
            return await self._evaluator.evaluate(self._state.step, self._format, self._backend)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        if self._phase is not None:
            self._phase(phase)
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - began

    def _times(self, whole: float, values: Mapping[str, float]) -> dict[str, float]:
        sampled = values.get("episode/tokens", 0.0) * values.get("episodes/count", 0.0)
        times = {f"time/{phase}": float(seconds) for phase, seconds in self._seconds.items()}
        return times | {"step_seconds": whole, "tokens_per_second": sampled / whole}

    def _write_line(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of a step and report them."""
        self._metrics.write(step, values)
        if self._on_step is not None:
            self._on_step(step, values)


def _notified_metrics(values: Mapping[str, float]) -> dict[str, float]:
    return {name.replace("/", "_"): value for name, value in values.items() if name in ("reward/mean", "eval/reward")}
