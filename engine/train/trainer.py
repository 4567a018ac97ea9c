"""The training loop over episodes: collect a batch, train on it, send the new weights to the backend, repeat.

Invariants, in addition to those of `loop.py`:
- A group is trained on at most once, and all sampled tokens are used or counted: see `batch_log.py`, `groups.py`.
- With `asynchrony.max_staleness: 0` sampling and training alternate.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from engine.backends.registry import open_backend
from engine.backends.weight_target import weight_target
from engine.errors import EngineError, StoreError, TrainError
from engine.runner.batch import Batch
from engine.runner.groups import GroupRunner, GroupSchedule
from engine.runner.overlong import fitting_tasks
from engine.runner.runner import Runner
from engine.runner.task_order import TaskOrder
from engine.spec.tasks import load_tasks
from engine.store import training as folders
from engine.tokens.loading import load_format
from engine.train.batch_log import BatchRecord, check_tasks
from engine.train.batches import GroupBuilder
from engine.train.credit_reach import reach_of
from engine.train.difficulty import DifficultyFilter
from engine.train.keep import compact_training, plan_of
from engine.train.loop import TrainingLoop, TrainResult
from engine.train.missing_signal import MissingSignal
from engine.train.overlong import masked_metrics
from engine.train.repeated_steps import StepRepeater, stored_rows
from engine.train.setup import learner_of
from engine.train.stopping import unless_stopped
from engine.train.stored_groups import StoredEpisodes
from engine.train.sync import open_sync
from engine.validate import refuse_first_tasks
from engine.validate.drivers import refuse_training

if TYPE_CHECKING:
    from engine.actions.services import Cost
    from engine.drivers.rollouts import DriverRollouts
    from engine.runner.stats import RunCounters
    from engine.store import RunStore

log = structlog.get_logger(__name__)

_RESUMED = ("rollout/resumed_episodes", "rollout/regenerated_tokens", "rollout/dropped_stale_groups")


def free_cached_memory() -> None:
    """Give GPU memory that torch holds for later allocations back to the servers on the same GPUs."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Trainer(TrainingLoop):
    """One training on the model's own episodes, new or resumed. Arguments as in `TrainingLoop`."""

    _kept = "; the episodes are kept"
    _order: TaskOrder
    _difficulty: DifficultyFilter | None = None
    _store: RunStore
    _drivers: DriverRollouts | None = None
    """With `rollout.drivers`: what runs the episodes."""
    _dropped_until: int | None = None
    """Groups of steps up to this one were dropped in this launch already."""

    async def _run_prepared(self, stop: asyncio.Event | None) -> TrainResult:
        self._format = load_format(self.spec.model, self.loaded.base)
        every = load_tasks(self.loaded)
        refuse_first_tasks(self.loaded, every)
        tasks = fitting_tasks(every, self.loaded, self._format)
        self._order = TaskOrder(tasks, shuffle=self.train.shuffle, seed=self.train.seed, mix=tasks.mix)
        self._backend = open_backend(self.loaded, self._format)
        self._backend.logs = self.folder / "servers"
        self._backend.training = True
        try:
            await self._backend.start()
            self._learner = await asyncio.to_thread(learner_of, self.loaded, self._format, self._process_group)
            self._sync = open_sync(self.spec, self._backend, self.folder, lora=self.train.lora is not None)
            store = folders.open_rollouts(
                self.folder, self.loaded
            )  # locks the folder: no other process can train in it
            try:
                result = await self._run_with_store(store, stop)
            finally:
                store.close()
            await self._compact_at_end(result)
            return result
        finally:
            await self._backend.close()

    _live: RunCounters | None = None
    _episodes: Runner | DriverRollouts | None = None

    @property
    def _cost(self) -> Cost | None:
        own = self._episodes.cost if isinstance(self._episodes, Runner) else None
        return own or self._evaluator.cost

    def _sampled_tokens(self) -> int:
        return self._live.tokens if self._live is not None else 0

    async def _run_with_store(self, store: RunStore, stop: asyncio.Event | None) -> TrainResult:
        self._store = store
        await self._open_state()
        try:
            runner = self._runner(store)
            self._live = runner.counters
            self._episodes = runner
            runner.counters.total = self.train.steps * self.train.tasks_per_step * self.spec.rollout.samples_per_task
            if self._watch is not None:
                self._watch(runner.counters)
            result = TrainResult(self._state.step)
            reader = await asyncio.to_thread(folders.open_reader, store)
            async with runner.serving(), self._saving(result):
                await self._run_saved(result, runner, StoredEpisodes(reader, self.spec.rollout.samples_per_task), stop)
            return result
        finally:
            self._metrics.close()

    def _runner(self, store: RunStore) -> Runner | DriverRollouts:
        """What runs the episodes: this process, or several drivers."""
        if self.spec.rollout.drivers > 1:
            refuse_training(self.loaded)
            from engine.drivers.rollouts import DriverRollouts

            self._drivers = DriverRollouts(
                self.loaded,
                store,
                weight_target(self._backend).server_weights(self._state.version),
                keep_going=self._keep_going,
            )
            return self._drivers
        return Runner(
            self.loaded,
            [],
            self._format,
            self._backend,
            store,
            keep_going=self._keep_going,
            training=True,
            folder=self.folder,
        )

    async def _push_weights(self) -> None:
        """Send the current weights to the backend, once; drivers, which sample from the same servers, are told the version."""
        await super()._push_weights()
        if self._drivers is not None:
            await self._drivers.follow(weight_target(self._backend).server_weights(self._state.version))

    async def _run_saved(
        self, result: TrainResult, runner: Runner | DriverRollouts, stored: StoredEpisodes, stop: asyncio.Event | None
    ) -> None:
        """Repeat the steps after the checkpoint, then train."""
        rows = GroupBuilder(self.spec, self.train, self.loaded.base)
        repeater = StepRepeater(self._batch_log, stored_rows(rows, stored))
        check_tasks(repeater.records, self._order)
        self._weights_known = False
        async with self._servers_memory(needed=bool(repeater.records)):
            result.repeated_steps = await asyncio.to_thread(
                repeater.repeat, self._state, self._learner, self._repeated_step
            )
        self._weights_known = True
        self._continue_metrics()
        if self._state.version or self.spec.backend.weights_in_servers:
            # A server may have other weights: send the current ones before the first token is sampled.
            await self._push_weights()
        if self.train.difficulty is not None:
            self._difficulty = DifficultyFilter(self.train.difficulty, self._order, self.train.seed)
            for record in repeater.records:
                self._difficulty.add(record.solved)
        await self._write_missing_lines(repeater.records, stop)
        schedule = self._schedule(runner, rows, stored)
        result.faults = runner.faults
        try:
            await self._steps(result, schedule, stop)
        except EngineError as error:
            if error.drains:
                await unless_stopped(stop, schedule.drain())
            raise
        finally:
            await schedule.close()
            if self.train.colocate:
                await weight_target(self._backend).take_memory_back()

    def _schedule(self, runner: Runner | DriverRollouts, rows: GroupBuilder, stored: StoredEpisodes) -> GroupSchedule:
        rollout = self.spec.rollout
        most = rollout.live_episodes or 2 * rollout.concurrency
        groups = GroupRunner(runner, rows, asyncio.Semaphore(most), stored, progress=self._observers.progressed)
        return GroupSchedule(
            groups,
            self._order,
            self.train,
            samples=rollout.samples_per_task,
            batches=self.train.steps - self._state.step,
            max_live_episodes=most,
            version=self._state.version,
            consumed=self._state.groups,
            stored=stored,
            difficulty=self._difficulty,
        )

    async def _steps(self, result: TrainResult, schedule: GroupSchedule, stop: asyncio.Event | None) -> None:
        """Run steps up to the last one. `stop` ends the collection of a batch at once, but a running update is finished."""
        train, state = self.train, self._state
        missing = MissingSignal(train)
        while state.step < train.steps and not result.interrupted:
            began = time.perf_counter()
            with self._timed("rollout"):
                batch = await unless_stopped(stop, schedule.batch())
            if batch is None:
                result.interrupted = True
                return
            values = await self._step(batch)
            if warning := missing.add(batch):
                log.warning(warning, step=state.step)
                await self._observers.lacks_signal(state.step, warning)
            result.missing_signal = missing.summary
            result.interrupted = stop is not None and stop.is_set()
            if not result.interrupted:
                with self._timed("sync"):
                    if batch.used:
                        await unless_stopped(stop, self._push_weights())
                schedule.trained(state.version)
            if self._evaluator.due(state.step):
                found = None if result.interrupted else await unless_stopped(stop, self._evaluate())
                if found is None:  # the next launch evaluates this step and writes its line
                    result.interrupted = True
                    return
                values |= found
            if self._evaluator.note(state, state.step, values) or state.step % train.checkpoints.every == 0:
                await self._checkpoint()
                values |= await self._drop_episodes()
            values |= self._times(time.perf_counter() - began, values) | self._pushed
            self._seconds.clear()
            self._pushed.clear()
            self._write_line(state.step, values)
            self._observers.progressed()
            result.first, result.last = result.first or values, values
            result.resumed.update({name: int(values[name]) for name in _RESUMED if name in values})

    async def _drop_episodes(self) -> dict[str, float]:
        """After a checkpoint: drop the stored episodes that `rollout.keep` does not keep. Returns the metrics."""
        keep = self.spec.rollout.keep
        if keep is None:
            return {}
        before, episodes = self._store.space(), 0
        try:
            with self._timed("compact"):
                found = await asyncio.to_thread(plan_of, self.folder, self.spec, keep, after=self._dropped_until)
                for group in found.groups:
                    episodes += len((await self._store.drop(group, keep_failed=keep.failures)).sizes)
            self._dropped_until = found.until
        except StoreError as error:  # each group is dropped whole or not at all; the next checkpoint tries again
            log.warning("episodes could not be dropped", reason=str(error))
        after = self._store.space()
        return {
            "store/dropped_episodes": float(episodes),
            "store/bytes_before": float(before.used),
            "store/bytes": float(after.used),
            "store/file_bytes": float(after.file),
        }

    async def _compact_at_end(self, result: TrainResult) -> None:
        """After a training that was not interrupted: drop what `rollout.keep` does not keep, and shrink the file."""
        keep = self.spec.rollout.keep
        if keep is None or result.interrupted:
            return
        try:
            _, result.disk = await asyncio.to_thread(compact_training, self.folder, self.spec, keep)
        except StoreError as error:
            log.warning("the run store could not be compacted; `engine compact` does it later", reason=str(error))

    async def _step(self, batch: Batch) -> dict[str, float]:
        """Train on a batch and write its metrics to the batch log. Returns the metrics."""
        values = batch.metrics(tuple(self.spec.tasks.mix or ()))
        reach = reach_of(self.spec.rewards.credit, [*batch.used, *batch.left_out], self.loaded.base)
        values |= reach.metrics()
        ended = (each for group in (*batch.used, *batch.left_out) for each in group.trajectories)
        values |= masked_metrics(self.spec, ended)
        if self._difficulty is not None:
            values |= self._difficulty.metrics(len(batch.skipped), batch.forced)
            if batch.forced:
                log.warning(
                    "tasks were drawn although they are always or never solved, because the filter skipped all others",
                    step=self._state.step + 1,
                    groups=batch.forced,
                )
        if unplaced := reach.unplaced():
            log.warning("rewards reach no token", step=self._state.step + 1, rewards=unplaced)
        if batch.used:
            values |= await self._learn_batch(batch, values)
        elif not any(group.rows for group in batch.left_out):
            self._record(batch, values, step_made=False)  # marks the groups as consumed
            raise batch.no_data(self._episodes.faults if self._episodes else [])
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
            difficulty=self._difficulty,
        )
        state.groups.add(record.numbers)
        self._batch_log.append(record)
        if self._difficulty is not None:
            self._difficulty.add(record.solved)
        self._weights_known = True

    async def _learn_batch(self, batch: Batch, values: Mapping[str, float]) -> dict[str, float]:
        """Run the updates of a batch. A step that diverged after some updates counts with these."""
        try:
            async with self._servers_memory():
                return await self._learn(batch.rows)
        except TrainError:
            updates = self._learner.updates
            self._weights_known = updates == 0
            if updates:
                rate = self._learner.rate
                self._record(batch, {**values, "lr": rate, "updates": float(updates)}, updates=updates)
            raise

    @asynccontextmanager
    async def _servers_memory(self, *, needed: bool = True) -> AsyncIterator[None]:
        """Inside the block the servers' GPUs are free for an update, with `train.colocate`. The next push gives the memory back."""
        if not (self.train.colocate and needed):
            yield
            return
        with self._timed("release"):
            await weight_target(self._backend).lend_memory()
        try:
            yield
        except BaseException:
            free_cached_memory()
            await weight_target(self._backend).take_memory_back()
            raise
        free_cached_memory()

    def _times(self, whole: float, values: Mapping[str, float]) -> dict[str, float]:
        sampled = values.get("episode/tokens", 0.0) * values.get("episodes/count", 0.0)
        times = {f"time/{phase}": float(seconds) for phase, seconds in self._seconds.items()}
        return times | {"step_seconds": whole, "tokens_per_second": sampled / whole}
