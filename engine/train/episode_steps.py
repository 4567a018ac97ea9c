"""The steps of a training on the model's own episodes: a group is trained on at most once, and all sampled tokens are
used or counted.

See `batch_log.py` and `groups.py`. With `asynchrony.max_staleness: 0` sampling and training alternate.

The store is asked for episodes of earlier launches only for what was there when this launch began: finished ones are
used, the others continue at their turn. Episodes that were dropped do not count as stored; they are sampled again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from engine.runner.groups import GroupRunner, GroupSchedule
from engine.runner.processes import EpisodeRunner, processes_of
from engine.runner.runner import Runner
from engine.runner.source import fitting_tasks
from engine.runner.task_order import FILTER_DRAWS, DrawFilter, TaskOrder
from engine.schemas.journal import GenerationRecord
from engine.schemas.sections import written
from engine.spec.tasks import load_tasks
from engine.store import training as folders
from engine.store.find import open_elsewhere
from engine.store.store import episode_id_of
from engine.train.batch_log import BatchRecord, check_tasks
from engine.train.batches import GroupBuilder, masked_metrics
from engine.train.step_source import StepBatch, StepSource, TrainResult
from engine.validate import refuse_first_tasks

if TYPE_CHECKING:
    from engine.actions.services import Cost
    from engine.runner.counters import RunCounters
    from engine.schemas.generation import Generation
    from engine.schemas.journal import JournalEntry
    from engine.schemas.train import TrainSpec
    from engine.schemas.trajectory import Trajectory
    from engine.spec.load import LoadedSpec
    from engine.store import RunStore
    from engine.store.reader import RunReader
    from engine.store.rows.row import TrainingRow
    from engine.train.trainer import Trainer

log = structlog.get_logger(__name__)


class EpisodeSteps(StepSource):
    """Batches of groups of episodes, which the model samples while the training runs. See `StepSource`."""

    remains = "; the episodes are kept"
    _order: TaskOrder
    _rows: GroupBuilder
    _store: RunStore
    _stored: StoredEpisodes
    _runner: EpisodeRunner
    _schedule: GroupSchedule
    _counters: RunCounters | None = None
    _draws: DrawFilter

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._processes = processes_of(trainer.loaded)
        self._warnings: list[str] = []
        """About the newest batch and those before it: they have no learning signal."""
        self._solved: dict[str, list[int]] = {}
        """Of the newest batch: see `BatchRecord.solved`."""

    @classmethod
    def steps_of(cls, loaded: LoadedSpec, train: TrainSpec, epochs: float) -> float:
        """See `StepSource`."""
        return epochs * len(load_tasks(loaded)) / train.tasks_per_step

    @property
    def sampled_tokens(self) -> int:
        """See `StepSource`."""
        return self._counters.tokens if self._counters is not None else 0

    @property
    def cost(self) -> Cost | None:
        """See `StepSource`."""
        return self._runner.cost if isinstance(self._runner, Runner) else None

    # --- beginning and end ----------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Read the tasks, and leave those out that do not fit."""
        loaded, train = self._trainer.loaded, self._trainer.train
        every = load_tasks(loaded)
        refuse_first_tasks(loaded, every)
        tasks = fitting_tasks(every, loaded, self._trainer.template)
        self._order = TaskOrder(tasks, shuffle=train.shuffle, seed=train.seed, mix=tasks.mix)
        self._rows = GroupBuilder(loaded.spec, train, loaded.base)

    @asynccontextmanager
    async def opened(self, result: TrainResult) -> AsyncIterator[None]:
        """Open the run store, and serve what runs the episodes."""
        trainer = self._trainer
        self._store = folders.open_rollouts(trainer.folder, trainer.loaded)
        try:
            for observer in trainer.observers:
                observer.opened(self._store)
            check_tasks(trainer.batch_log.read(), self._order)
            runner: EpisodeRunner
            if self._processes is not None:
                self._processes.refuse_training()
                weights = trainer.backend.server_weights(trainer.state.version)
                runner = self._processes.episodes(self._store, weights, keep_going=trainer.keep_going)
            else:
                runner = Runner(
                    trainer.loaded,
                    [],
                    trainer.template,
                    trainer.backend,
                    self._store,
                    keep_going=trainer.keep_going,
                    training=True,
                    folder=trainer.folder,
                )
            self._runner, self._counters = runner, runner.counters
            samples = trainer.spec.rollout.samples_per_task
            runner.counters.total = trainer.train.steps * trainer.train.tasks_per_step * samples
            if trainer.watch is not None:
                trainer.watch(runner.counters)
            elsewhere = await asyncio.to_thread(open_elsewhere, self._store.folder)
            self._stored = StoredEpisodes(elsewhere or self._store, samples)
            async with runner.serving():
                yield
        finally:
            self._store.close()
        result.faults = runner.faults

    def rows_of(self, record: BatchRecord) -> list[TrainingRow] | None:
        """Build the training rows of a step from the run store."""
        rows: list[TrainingRow] = []
        for number in record.used:
            samples = range(self._trainer.spec.rollout.samples_per_task)
            episodes = [self._stored.finished(record.tasks[str(number)], sample) for sample in samples]
            of_group = self._rows.rows([trajectory for trajectory in episodes if trajectory is not None])
            if not of_group:
                return None
            rows += of_group
        return rows if len(rows) == record.rows else None

    async def begin(self, records: Sequence[BatchRecord]) -> None:
        """Make the schedule, and tell the version to the processes that sample from the same servers."""
        trainer, rollout = self._trainer, self._trainer.spec.rollout
        runner, version = self._runner, trainer.state.version
        await self._tell_processes(version)
        filters = FILTER_DRAWS.made(written(trainer.spec), trainer.train, self._order)
        self._draws = next(iter(filters), DrawFilter())
        for record in records:
            self._draws.add(record.solved)

        def progressed(_: Trajectory) -> None:
            for observer in trainer.observers:
                observer.progressed()

        live = rollout.live_episodes or 2 * rollout.concurrency
        groups = GroupRunner(
            runner,
            self._rows.group,
            asyncio.Semaphore(live),
            self._stored.finished,
            progress=progressed,
        )
        self._schedule = GroupSchedule(
            groups,
            self._order,
            trainer.train,
            samples=rollout.samples_per_task,
            batches=trainer.train.steps - trainer.state.step,
            max_live_episodes=live,
            version=version,
            consumed=trainer.state.groups,
            stored=self._stored,
            draws=self._draws,
        )

    # --- steps ----------------------------------------------------------------------------------------------

    async def batch(self) -> StepBatch:
        """Collect a batch of groups."""
        with self._trainer.timed("rollout"):
            batch = await self._schedule.batch()
        trainer, step = self._trainer, self._trainer.state.step + 1
        metrics = batch.metrics(tuple(trainer.spec.tasks.mix or ()))
        self._warnings = []
        for observer in trainer.observers:
            more, warning = observer.sampled(step, batch)
            metrics |= more
            self._warnings += [warning] if warning else []
        groups = [*batch.used, *batch.left_out]
        metrics |= masked_metrics(trainer.spec, (trajectory for group in groups for trajectory in group.trajectories))
        metrics |= self._draws.metrics(step, len(batch.skipped), batch.forced)
        self._solved = self._draws.results(groups)
        lacks_data = not batch.used and not any(group.rows for group in batch.left_out)
        return StepBatch(
            rows=batch.rows,
            metrics=metrics,
            record=BatchRecord.of(batch, self._order, self._solved),
            tokens=metrics["episode/tokens"] * metrics["episodes/count"],
            lacking=batch.no_data(self._runner.faults) if lacks_data else None,
        )

    async def trained(self, version: int) -> None:
        """Let the schedule go on with the new weights."""
        for warning in self._warnings:
            log.warning(warning, step=self._trainer.state.step)
            for observer in self._trainer.observers:
                await observer.lacks_signal(self._trainer.state.step, warning)
        self._draws.add(self._solved)
        await self._tell_processes(version)
        self._schedule.trained(version)

    async def _tell_processes(self, version: int) -> None:
        if self._processes is not None:
            await self._processes.follow(self._trainer.backend.server_weights(version))

    async def drain(self) -> None:
        """See `StepSource`."""
        await self._schedule.drain()

    async def close(self) -> None:
        """Cancel the groups that run. Finished episodes stay in the store."""
        await self._schedule.close()


class StoredEpisodes:
    """The episodes of earlier launches, by task and sample.

    Args:
        store: The run store of the training, or a reader of it and of its drivers' stores.
        samples: Episodes per group.
    """

    def __init__(self, store: RunReader, samples: int) -> None:
        self._store = store
        self._samples = samples
        dropped = store.dropped_ids()
        self._statuses = {name: status for name, status in store.statuses().items() if name not in dropped}
        self._openings = store.openings()

    def finished(self, task_id: str, sample: int) -> Trajectory | None:
        """A finished episode; None if it is not finished."""
        episode_id = episode_id_of(task_id, sample)
        return self._store.trajectory(episode_id) if self._statuses.get(episode_id) == "done" else None

    def begun(self, task_id: str) -> dict[int, bool]:
        """The samples of a group that were begun and not finished, and whether each has sampled a turn."""
        ids = {sample: episode_id_of(task_id, sample) for sample in range(self._samples)}
        running = {sample: name for sample, name in ids.items() if self._statuses.get(name) == "running"}
        return {sample: bool(_generations(self._store.journal(name))) for sample, name in running.items()}

    def versions(self, task_id: str) -> tuple[int, int] | None:
        """The smallest and the largest weight version of a group's sampled tokens; None if it has none."""
        versions: set[int] = set()
        for sample in range(self._samples):
            trajectory = self.finished(task_id, sample)
            if trajectory is not None:
                for branch in trajectory.branches:
                    versions.update(branch.weight_versions[branch.loss_mask == 1].tolist())
            elif episode_id_of(task_id, sample) in self._statuses:
                for generation in _generations(self._store.journal(episode_id_of(task_id, sample))):
                    versions.update(span.version for span in generation.versions)
                    if not generation.versions:  # version 0 throughout
                        versions.add(0)
        return (min(versions), max(versions)) if versions else None

    def regenerated_tokens(self, task_id: str, sample: int) -> int:
        """Tokens of an episode, finished now, that were sampled again in any launch: an upper bound.

        A turn that was due when a launch ended counts, because its generation may have been cut off; it is sampled
        again with the same seed. An episode that had to begin again, because an effect outside cannot be repeated, has
        earlier attempts, all of whose tokens count.
        """
        self._store.refresh()
        row = self._store.episode(episode_id_of(task_id, sample))
        earlier = (self._store.journal(row.id, attempt) for attempt in range(row.attempt))
        again = sum(len(generation.output_ids) for journal in earlier for generation in _generations(journal))
        journal = self._store.journal(row.id)
        first_of_launch: dict[int, JournalEntry] = {}
        for opened in self._openings:
            if opened > (row.started or 0.0):
                entry = next((entry for entry in journal if entry.at >= opened), None)
                if entry is not None:
                    first_of_launch[entry.seq] = entry
        return again + sum(len(generation.output_ids) for generation in _generations(list(first_of_launch.values())))


def _generations(journal: Sequence[JournalEntry]) -> list[Generation]:
    return [entry.record.generation for entry in journal if isinstance(entry.record, GenerationRecord)]
