"""One training, new or resumed. A step is in the batch log before its weights are sent out, and its line of
`metrics.jsonl` follows it.

    result = await Trainer(loaded, folder).run()

However a training ends, by an error, a divergence, a signal or a lost server, the weights after the last update are in
a checkpoint, and an error's message names it. Before the first update there is nothing to save.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import structlog
import torch
from msgspec.structs import replace

from engine.backends.registry import open_backend
from engine.errors import EngineError, TrainError
from engine.runner.observers import OBSERVE_TRAINING
from engine.schemas.sections import used_plugins, written
from engine.spec.added import trains_backend
from engine.store.lock import RunLock
from engine.tokens.loading import load_format
from engine.train.batch_log import BatchLog, BatchRecord, same_loss, to_repeat
from engine.train.checkpoint import State, checkpoints_of, read_checkpoint, step_of, write_checkpoint
from engine.train.distributed import ProcessGroup
from engine.train.metrics import MetricsLog, finite, read_metrics
from engine.train.setup import learner_of, source_class, train_spec_of
from engine.train.step_source import EVALUATE_TRAINING, Evaluator, TrainResult
from engine.train.sync import LEND_MEMORY, LentMemory, open_sync

if TYPE_CHECKING:
    from engine.backends.backend import Backend
    from engine.runner.counters import RunCounters
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate
    from engine.train.learner import Learner
    from engine.train.step_source import StepBatch, StepSource
    from engine.train.sync import WeightSync

log = structlog.get_logger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

StepCallback = Callable[[int, Mapping[str, float]], None]
"""Called after each finished step with its number, from 1 (0: evaluation before the first step), and its metrics."""
_RESUMED = ("rollout/resumed_episodes", "rollout/regenerated_tokens", "rollout/dropped_stale_groups")


class Trainer:
    """One training, new or resumed, in the folder that `engine.store.training.begin` made.

    Args:
        phase: Called at the start of each phase: `rollout`, `update`, `sync`, `eval`, `checkpoint`, `compact`.
        watch: Called with the counters of its episodes when they exist, for a live display.
        keep_going: Do not stop if the first episodes all fail with one cause.
        process_group: The processes of the training. This is process 0; the others run `setup.follow`.
    """

    template: ChatTemplate
    backend: Backend
    """Of a training that samples or evaluates."""
    learner: Learner
    _memory = LentMemory()
    _metrics: MetricsLog

    def __init__(
        self,
        loaded: LoadedSpec,
        folder: Path,
        *,
        process_group: ProcessGroup | None = None,
        on_step: StepCallback | None = None,
        phase: Callable[[str], None] | None = None,
        watch: Callable[[RunCounters], None] | None = None,
        keep_going: bool = False,
    ) -> None:
        self.loaded = loaded
        self.spec = loaded.spec
        self.train = train_spec_of(loaded)
        self.folder = folder
        self.watch = watch
        self.keep_going = keep_going
        self.state = State()
        self.batch_log = BatchLog(folder)
        self.observers = OBSERVE_TRAINING.made(written(loaded.spec), loaded, folder)
        self.last_lines: list[str] = []
        """What observers show at the end of the command's output."""
        self.source: StepSource = source_class(self.train)(self)
        self._process_group = process_group or ProcessGroup()
        self._on_step = on_step
        self._phase = phase
        self._newest_checkpoint: Path | None = None
        # of the first plugin that has one
        self._evaluator = next(iter(EVALUATE_TRAINING.made(written(loaded.spec), self)), Evaluator())
        self._sync: WeightSync | None = None
        self._weights_known = True
        """Whether the learner's weights are those after the updates that `state` counts."""
        self._seconds: dict[str, float] = {}
        self._pushed: dict[str, float] = {}
        """Metrics of the step's push of weights."""

    async def run(self, *, stop: asyncio.Event | None = None) -> TrainResult:
        """Train to the last step, or until `stop` is set. Then a checkpoint is written; running episodes stay in the
        store.

        Raises:
            TrainError: kind `train_setup`: the training cannot start; `diverged`; `no_data`: there is nothing to train
                on.
            EngineError: the backend, the store or the evaluation failed.
        """
        try:
            with ExitStack() as watched:
                for observer in self.observers:
                    watched.enter_context(observer.watch(lambda: self.state.step, lambda: self.source.sampled_tokens))
                result = await self._run_opened(stop)
            for observer in self.observers if not result.interrupted else ():
                await observer.ended(result.steps, result.last)
            return result
        except asyncio.CancelledError:
            raise
        except Exception as error:
            for observer in self.observers:
                await observer.failed(error, self.state.step)
            raise
        finally:
            self.last_lines = [line for observer in self.observers if (line := observer.close()) is not None]

    # --- beginning and end ----------------------------------------------------------------------------------

    async def _run_opened(self, stop: asyncio.Event | None) -> TrainResult:
        """Open what the training needs, and train."""
        async with AsyncExitStack() as stack:
            stack.callback(RunLock(self.folder).release)
            self.template = load_format(self.spec.model, self.loaded.base)
            await self.source.prepare()
            if trains_backend(self.spec):
                self.backend = open_backend(self.loaded, self.template)
                self.backend.logs = self.folder / "servers"
                self.backend.training = True
                stack.push_async_callback(self.backend.close)
                lent = LEND_MEMORY.made(used_plugins(self.spec), self.loaded, self.backend)
                self._memory = next(iter(lent), LentMemory())
                await self.backend.start()
            self.learner = await asyncio.to_thread(learner_of, self.loaded, self.template, self._process_group)
            if trains_backend(self.spec):
                self._sync = open_sync(self.spec, self.backend, self.folder, lora=self.train.adapter is not None)
            resumed = max(checkpoints_of(self.folder), key=step_of, default=None)
            if resumed is None:
                torch.manual_seed(self.train.seed)
            else:
                self.state = await asyncio.to_thread(read_checkpoint, resumed, self.learner)
                self._newest_checkpoint = resumed
            self._metrics = MetricsLog(self.folder)
            for observer in self.observers:
                observer.began()
            result = TrainResult(self.state.step)
            async with self.source.opened(result), self._saving(result):
                await self._train(result, stop)
            return result

    async def _train(self, result: TrainResult, stop: asyncio.Event | None) -> None:
        """Repeat the steps after the checkpoint, then train."""
        began, records = self.state.step, self.batch_log.read()
        self._weights_known = False
        async with self._memory.lent(self.timed) if records else contextlib.nullcontext():
            records = await asyncio.to_thread(self._repeat, records)
        self._weights_known = True
        result.repeated_steps = self.state.step - began
        self._metrics.truncate(self.state.step)
        for observer in self.observers:
            observer.continued(self.state.step)
        if self.state.version or self.spec.backend.weights_in_servers:
            # A server may have other weights: send the current ones before the first token is sampled.
            await self._push_weights()
        await self._write_missing_lines(records, stop)
        await self.source.begin(records)
        try:
            await self._steps(result, stop)
        except EngineError as error:
            if error.drains:
                await unless_stopped(stop, self.source.drain())
            raise
        finally:
            await self.source.close()
            await self._memory.take_back()

    def _repeat(self, records: Sequence[BatchRecord]) -> list[BatchRecord]:
        """Bring the learner from a checkpoint to the newest step of the batch log. A checkpoint is written where it is
        due, so that repeated kills do not repeat the same steps."""
        state = self.state
        for record in to_repeat(records, state.step):
            rows = self.source.rows_of(record)
            if rows is None:
                lacking = "episodes of a step after the checkpoint are not in the run store; it is sampled again"
                log.warning(lacking, step=record.step)
                break
            if record.used:
                loss = self.learner.step(rows, state.step, rate=record.rate, most_updates=record.updates)["loss"]
                if not same_loss(record, loss):
                    before = record.metrics["loss"]
                    log.warning(
                        "a repeated step has another loss than before", step=record.step, loss=loss, before=before
                    )
            state.step, state.version = record.step, record.version
            state.groups.add(record.numbers)
            if state.step % self.train.checkpoints.every == 0:
                self._newest_checkpoint = write_checkpoint(
                    self.folder, self.train.checkpoints.keep, state, self.learner
                )
        self.batch_log.cut(lambda record: record.step <= state.step)
        remaining = [record for record in records if record.step <= state.step]
        for record in remaining:
            state.groups.add(record.numbers)
        return remaining

    async def _write_missing_lines(self, records: Sequence[BatchRecord], stop: asyncio.Event | None) -> None:
        """Write the metrics of finished steps that have no line yet, because an earlier launch ended before it wrote
        them."""
        written = {int(line["step"]): line for line in read_metrics(self.folder)}
        for step in sorted(written.keys() - {0}):  # also of repeated steps, whose checkpoints do not have it
            self._evaluator.note(step, written[step])
        if self.state.step == 0 and 0 not in written and self._evaluator.due(0):
            values = await unless_stopped(stop, self._evaluate())
            if values is not None:
                self._write_line(0, values)
        for record in records:
            if not record.step_made or record.step in written:
                continue
            values = {name: math.nan if value is None else value for name, value in record.metrics.items()}
            if record.step == self.state.step and self._evaluator.due(record.step):
                evaluation = await unless_stopped(stop, self._evaluate())
                if evaluation is None:
                    return
                values |= evaluation
                if self._evaluator.note(record.step, evaluation):
                    await self._checkpoint()
            self._write_line(record.step, values)

    @contextlib.asynccontextmanager
    async def _saving(self, result: TrainResult) -> AsyncIterator[None]:
        """Save the last finite state at the end and on errors, whose message then names the checkpoint, and complete
        the result."""
        try:
            yield
        except Exception as error:
            try:
                if self._weights_known:
                    await self._checkpoint()
            except EngineError as failed:
                log.warning("the last state could not be saved", reason=str(failed))
            words = f"The last saved state is {self._newest_checkpoint}"
            if self._newest_checkpoint is None:
                words = f"No step was finished, so there is no checkpoint{self.source.remains}"
            if error.args and isinstance(error.args[0], str):
                error.args = (f"{error.args[0]}\n{words}", *error.args[1:])
            raise
        await self._checkpoint()
        result.steps, result.checkpoint = self.state.step, self._newest_checkpoint
        result.best, result.best_step = self.state.best, self.state.best_step
        result.cost = self.source.cost or self._evaluator.cost

    # --- steps ----------------------------------------------------------------------------------------------

    async def _steps(self, result: TrainResult, stop: asyncio.Event | None) -> None:
        """Make steps up to the last one. `stop` ends the collection of a batch at once, but a running update is
        finished."""
        while self.state.step < self.train.steps and not result.interrupted:
            began = time.perf_counter()
            batch = await unless_stopped(stop, self.source.batch())
            if batch is None:
                result.interrupted = True
                return
            values = await self._step(batch)
            result.interrupted = stop is not None and stop.is_set()
            if not result.interrupted:
                if batch.rows if self.train.samples_episodes else self._evaluator.due(self.state.step):
                    with self.timed("sync"):
                        await unless_stopped(stop, self._push_weights())
                await self.source.trained(self.state.version)
            if self._evaluator.due(self.state.step):
                evaluation = None if result.interrupted else await unless_stopped(stop, self._evaluate())
                if evaluation is None:  # the next launch evaluates this step and writes its line
                    result.interrupted = True
                    return
                values |= evaluation
            await self._end_step(batch, values, began)
            result.first, result.last = result.first or values, values
            result.resumed.update({name: int(values[name]) for name in _RESUMED if name in values})

    async def _step(self, batch: StepBatch) -> dict[str, float]:
        """Make the updates of a batch and write it to the batch log. Returns its metrics."""
        values = dict(batch.metrics)
        if batch.rows:
            values |= await self._learn_batch(batch, values)
        elif batch.lacking is not None:
            self._record(batch, values, step_made=False)  # marks the groups as consumed
            raise batch.lacking
        else:
            values["updates"] = 0.0
        self._record(batch, values, updates=self.learner.updates if batch.rows else 0)
        return values

    async def _learn_batch(self, batch: StepBatch, values: Mapping[str, float]) -> dict[str, float]:
        """Run the updates of a batch. A step that diverged after some updates counts with these."""
        async with self._memory.lent(self.timed):
            self._weights_known = False
            try:
                with self.timed("update"):
                    learned = await in_whole(self.learner.step, batch.rows, self.state.step)
            except TrainError:
                updates = self.learner.updates
                self._weights_known = updates == 0
                if updates:
                    rate = self.learner.rate
                    self._record(batch, {**values, "lr": rate, "updates": float(updates)}, updates=updates)
                raise
        names = batch.update_metrics
        return learned if names is None else {name: value for name, value in learned.items() if name in names}

    def _record(
        self, batch: StepBatch, values: Mapping[str, float], *, updates: int = 0, step_made: bool = True
    ) -> None:
        """Count a step and write it to the batch log."""
        state = self.state
        state.step += step_made
        state.version += bool(updates)
        record = replace(
            batch.record,
            step=state.step,
            version=state.version,
            rows=len(batch.rows),
            updates=updates,
            rate=values.get("lr", 0.0),
            metrics=finite(values),
            step_made=step_made,
        )
        state.groups.add(record.numbers)
        self.batch_log.append(record)
        self._weights_known = True

    async def _end_step(self, batch: StepBatch, values: dict[str, float], began: float) -> None:
        """Write the checkpoint that is due, and the line of metrics."""
        state = self.state
        if self._evaluator.note(state.step, values) or state.step % self.train.checkpoints.every == 0:
            await self._checkpoint()
            for observer in self.observers:
                values |= await observer.checkpointed(self.timed)
        seconds = time.perf_counter() - began
        values |= {f"time/{phase}": spent for phase, spent in self._seconds.items()}
        values |= {"step_seconds": seconds, "tokens_per_second": batch.tokens / seconds} | self._pushed
        self._seconds.clear()
        self._pushed.clear()
        self._write_line(state.step, values)
        for observer in self.observers:
            observer.progressed()

    # --- parts of a step ------------------------------------------------------------------------------------

    async def _push_weights(self) -> None:
        """Send the current weights to the backend, if there is one."""
        if self._sync is not None:
            pushed = await self._sync.push(self.learner.policy, self.state.version)
            self._pushed = {"sync/bytes": float(pushed.bytes), "sync/pause_seconds": pushed.pause_seconds}

    async def _evaluate(self) -> dict[str, float]:
        """Evaluate the current policy. Returns the metrics of the evaluation."""
        with self.timed("eval"):
            return await self._evaluator.evaluate(self.state.step)

    async def _checkpoint(self) -> None:
        """Write a checkpoint, unless the weights are still those of the spec's model."""
        if self.state.step:
            with self.timed("checkpoint"):
                keep = self.train.checkpoints.keep
                self._newest_checkpoint = await asyncio.to_thread(
                    write_checkpoint, self.folder, keep, self.state, self.learner
                )

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Show a phase, and count its seconds in the metric `time/PHASE`."""
        if self._phase is not None:
            self._phase(phase)
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - began

    def _write_line(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of a step and report them."""
        self._metrics.write(step, values)
        for observer in self.observers:
            observer.stepped(step, values)
        if self._on_step is not None:
            self._on_step(step, values)


async def unless_stopped(stop: asyncio.Event | None, work: Awaitable[T]) -> T | None:
    """The result of `work`; None if `stop` is set first. Then `work` is cancelled."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait()) if stop is not None else None
    waits = [waiting for waiting in (task, stopped) if waiting is not None]
    try:
        await asyncio.wait(waits, return_when="FIRST_COMPLETED")
        return task.result() if task.done() else None
    finally:
        for waiting in waits:
            waiting.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def in_whole(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a function that runs in a thread, in which it cannot be stopped: a cancellation waits for its
    end."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            await work
        raise
