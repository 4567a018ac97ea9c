"""The training loop: collect a batch, train on it, send the new weights to the backend, repeat.

Invariants:
- However the training ends, a checkpoint has the last good weights: an update with a loss that is not finite is not applied.
- The metrics of a step are written after the backend has its weights, so each line of `metrics.jsonl` is a finished step.
- With `asynchrony.max_staleness: 0` sampling and training alternate.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import structlog

from engine.backends.base import open_backend
from engine.errors import OutageError, TrainError
from engine.masking import mask_values
from engine.runner.evaluate import evaluate
from engine.runner.run import Runner
from engine.runner.stats import label
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore
from engine.tokens.loading import load_format
from engine.train import folder as folders
from engine.train.batches import Batch, RowBuilder
from engine.train.checkpoint import Checkpoints, State
from engine.train.distributed import ProcessGroup, SingleProcessGroup
from engine.train.learner import Learner
from engine.train.metrics import MetricsLog
from engine.train.notify import Notifier, StallWatch
from engine.train.rollouts import BatchCollector, TaskOrder
from engine.train.setup import evaluation_of, learner_of, train_spec_of
from engine.train.sync import open_sync

if TYPE_CHECKING:
    from engine.backends.base import Backend
    from engine.backends.outage import Outage
    from engine.schemas.environment import Task
    from engine.schemas.trajectory import Trajectory
    from engine.spec.load import LoadedSpec
    from engine.tokens.format import ChatFormat
    from engine.train.sync import WeightSync

log = structlog.get_logger(__name__)
T = TypeVar("T")

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


class Trainer:
    """One training, new or resumed.

    Args:
        loaded: The spec.
        folder: The folder of the training, made by `folder.begin`.
        tell: Called after each step.
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
        tell: StepCallback | None = None,
        phase: Callable[[str], None] | None = None,
        watch: Callable[[Runner], None] | None = None,
        keep_going: bool = False,
    ) -> None:
        self.loaded = loaded
        self.spec = loaded.spec
        self.train = train_spec_of(loaded)
        self.folder = folder
        self._process_group = process_group or SingleProcessGroup()
        self._tell = tell
        self._phase = phase
        self._watch = watch
        self._keep_going = keep_going
        self._state = State(step=0, version=0, next_group=0)
        self._checkpoints = Checkpoints(folder, self.train.checkpoints.keep)
        self._newest_checkpoint: Path | None = None
        self._seconds: dict[str, float] = {}
        self._notifier = Notifier(self.train.notify, folder.name, base=loaded.base)
        self._stall = StallWatch(self._notifier, self.train.notify.stall_timeout, lambda: {"step": self._state.step})
        self._format: ChatFormat
        self._backend: Backend
        self._learner: Learner
        self._sync: WeightSync

    async def run(self, *, stop: asyncio.Event | None = None) -> TrainResult:
        """Train to the last step, or until `stop` is set. Then the current batch is dropped and a checkpoint is written.

        Raises:
            TrainError: kind `train_setup`: the training cannot start; `diverged`; `no_data`: no episode can be trained on.
            EngineError: the backend, the store or the evaluation failed.
        """
        try:
            with self._stall:
                result = await self._run_prepared(stop)
            if not result.interrupted:
                await self._notifier.tell("finished", step=result.steps, **_notified_metrics(result.last))
            return result
        except asyncio.CancelledError:
            raise
        except Exception as error:
            kind = "diverged" if isinstance(error, TrainError) and error.kind == "diverged" else "failed"
            await self._notifier.tell(kind, step=self._state.step, reason=f"{type(error).__name__}: {error}")
            raise

    async def _run_prepared(self, stop: asyncio.Event | None) -> TrainResult:
        tasks = load_tasks(self.loaded)
        self._format = load_format(self.spec.model, self.loaded.base)
        self._backend = open_backend(self.loaded, self._format)
        try:
            await self._backend.start()
            self._learner = await asyncio.to_thread(learner_of, self.loaded, self._format, self._process_group)
            self._sync = open_sync(self.spec, self._backend, self.folder, lora=self.train.lora is not None)
            resumed = self._checkpoints.newest()
            if resumed is not None:
                self._state = await asyncio.to_thread(self._checkpoints.read, resumed, self._learner)
                self._newest_checkpoint = resumed
            if resumed is not None or self.spec.backend.kind == "sglang":
                # A server may hold any weights: send ours before the first token is sampled.
                await self._push_weights()
            metrics = MetricsLog(
                self.folder, self.train.report_to, self.folder.name, mask_values(self.spec.model_dump(mode="json"))
            )
            try:
                metrics.truncate(self._state.step)
                return await self._run_with_store(tasks, metrics, stop)
            finally:
                metrics.close()
        finally:
            await self._backend.close()

    async def _push_weights(self) -> None:
        """Send the current weights to the backend."""
        policy = self._learner.policy
        outage: Outage | None = getattr(self._backend, "outage", None)
        if outage is not None:
            await outage.wait()
        with contextlib.ExitStack() as whole:
            await asyncio.to_thread(whole.enter_context, self._process_group.full_parameters(policy.model))
            await self._sync.push(policy, self._state.version)

    async def _run_with_store(self, tasks: list[Task], metrics: MetricsLog, stop: asyncio.Event | None) -> TrainResult:
        name = folders.next_rollouts(self.folder)
        store = RunStore.create(self.folder, RunHeader.of(self.loaded, run_id=name))
        try:
            runner = Runner(self.loaded, [], self._format, self._backend, store, keep_going=self._keep_going)
            runner.live.total = self.train.steps * self.train.tasks_per_step * self.spec.rollout.samples_per_task
            if self._watch is not None:
                self._watch(runner)
            async with runner.serving():
                collector = self._collector(runner, tasks)
                try:
                    return await self._steps(collector, metrics, stop)
                finally:
                    await collector.close()
        finally:
            store.close()

    def _collector(self, runner: Runner, tasks: list[Task]) -> BatchCollector:
        rollout = self.spec.rollout

        def ended(trajectory: Trajectory) -> None:
            self._stall.tick()
            runner.count(trajectory)

        return BatchCollector(
            runner,
            TaskOrder(tasks, shuffle=self.train.shuffle, seed=self.train.seed),
            RowBuilder(self.spec, self.train, self.loaded.base),
            self.train,
            samples=rollout.samples_per_task,
            max_live_episodes=rollout.live_episodes or 2 * rollout.concurrency,
            version=self._state.version,
            begun=self._state.next_group,
            progress=ended,
        )

    @staticmethod
    async def _unless_stopped(stop: asyncio.Event | None, work: Awaitable[T]) -> T | None:
        """The result of `work`; None if `stop` is set first. Then `work` is cancelled."""
        task = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(stop.wait()) if stop is not None else None
        try:
            await asyncio.wait([each for each in (task, stopped) if each is not None], return_when="FIRST_COMPLETED")
            return task.result() if task.done() else None
        finally:
            for each in (task, stopped):
                if each is not None:
                    each.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _steps(self, collector: BatchCollector, metrics: MetricsLog, stop: asyncio.Event | None) -> TrainResult:
        """Run steps up to the last one. `stop` drops the batch that is being collected, but a running update is finished."""
        train, state = self.train, self._state
        result = TrainResult(state.step, faults=collector.faults)
        if train.eval is not None and state.step == 0:
            told = await self._evaluate()
            metrics.write(0, told)
            self._report_step(0, told)
        while state.step < train.steps:
            began = time.perf_counter()
            self._seconds.clear()
            try:
                with self._timed("rollout"):
                    batch = await self._unless_stopped(stop, collector.batch())
            except OutageError:
                await self._checkpoint()
                raise
            if batch is None:
                result.interrupted = True
                break
            told = await self._step(batch, collector)
            told |= self._times(time.perf_counter() - began, told)
            metrics.write(state.step, told)
            self._stall.tick()
            self._report_step(state.step, told)
            result.first, result.last = result.first or told, told
        await self._checkpoint()
        result.steps, result.checkpoint = state.step, self._newest_checkpoint
        result.best, result.best_step = state.best, state.best_step
        return result

    async def _step(self, batch: Batch, collector: BatchCollector) -> dict[str, float]:
        """Train on a batch and send the new weights to the backend."""
        state = self._state
        told = batch.metrics()
        if batch.used:
            told |= await self._learn(batch)
        else:
            _require_data(batch, collector.faults)
        state.step += 1
        state.version += bool(batch.used)
        state.next_group = collector.next_group
        with self._timed("sync"):
            if batch.used:
                await self._push_weights()
            collector.batch_trained(state.version)
        return told | await self._evaluate_and_checkpoint(state.step)

    async def _learn(self, batch: Batch) -> dict[str, float]:
        """Run the updates of a batch in a thread, so that rollouts can continue meanwhile."""
        with self._timed("update"):
            work = asyncio.ensure_future(asyncio.to_thread(self._learner.step, batch.rows, self._state.step))
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                with contextlib.suppress(Exception):  # a thread cannot be stopped in the middle of an update
                    await work
                raise
            except TrainError:
                if self._state.step and not self._learner.dirty:
                    await self._checkpoint()
                raise

    async def _evaluate_and_checkpoint(self, step: int) -> dict[str, float]:
        """Evaluate and write a checkpoint if they are due at this step. Returns the metrics of the evaluation."""
        train = self.train
        told: dict[str, float] = {}
        better = False
        if train.eval is not None and (step % train.eval.every == 0 or step == train.steps):
            told = await self._evaluate()
            value = told.get(f"eval/{train.eval.metric}")
            if value is not None and (self._state.best is None or value > self._state.best):
                self._state.best, self._state.best_step, better = value, step, True
        if better or step % train.checkpoints.every == 0:
            await self._checkpoint()
        return told

    async def _checkpoint(self) -> None:
        with self._timed("checkpoint"):
            self._newest_checkpoint = await asyncio.to_thread(self._checkpoints.write, self._state, self._learner)

    async def _evaluate(self) -> dict[str, float]:
        """Evaluate the current policy on the evaluation's tasks. Returns its metrics."""
        with self._timed("eval"):
            loaded = evaluation_of(self.loaded)
            name = f"step-{self._state.step:06d}"
            folder = self.folder / "evals"
            while (folder / name).exists():
                name += "-again"
            store = RunStore.create(folder, RunHeader.of(loaded, run_id=name, evaluation=True))
            try:
                tasks = load_tasks(loaded)
                runner = Runner(loaded, tasks, self._format, self._backend, store, keep_going=self._keep_going)
                result = await runner.run()
                if result.stopped is not None:
                    raise result.stopped
                found = evaluate(store.trajectories(), seed=self.train.seed)
            finally:
                store.close()
            return {
                f"eval/{name}": value.value for name, value in found.estimates.items() if value.value == value.value
            }

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        if self._phase is not None:
            self._phase(phase)
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - began

    def _times(self, whole: float, told: Mapping[str, float]) -> dict[str, float]:
        sampled = told.get("episode/tokens", 0.0) * told.get("episodes/count", 0.0)
        times = {f"time/{phase}": float(seconds) for phase, seconds in self._seconds.items()}
        return times | {"step_seconds": whole, "tokens_per_second": sampled / whole}

    def _report_step(self, step: int, told: Mapping[str, float]) -> None:
        if self._tell is not None:
            self._tell(step, told)


def _require_data(batch: Batch, faults: Sequence[str]) -> None:
    """Check a batch without used groups: groups without signal are fine, but some episode must be trainable.

    Raises:
        TrainError: kind `no_data`: no group of the batch has a training row.
    """
    if any(group.rows for group in batch.left_out):
        return
    ends = Counter(label(each.outcome) for group in batch.left_out for each in group.trajectories)
    listed = ", ".join(f"{name} {count}" for name, count in ends.most_common(4))
    if faults:
        listed = f"{listed}{'; ' if listed else ''}{len(faults)} could not be finished, for example {faults[0]}"
    raise TrainError(
        f"no episode of {len(batch.left_out)} groups can be trained on: {listed or 'none was finished'}",
        kind="no_data",
    )


def _notified_metrics(told: Mapping[str, float]) -> dict[str, float]:
    return {name.replace("/", "_"): value for name, value in told.items() if name in ("reward/mean", "eval/reward")}
