"""The batch collector: runs groups of episodes for the trainer, as many at a time as the staleness limit allows.

A group may start while

    running + ready + used  <  (max_staleness + 1) * tasks_per_step

(near the end of the training, less: (number of batches left) * tasks_per_step), where `used` are the groups of the batch that is being collected. With `version` batches trained, this is AReaL's
(max_staleness + version + 1) * B - accepted - running (arXiv 2505.24298, section 5.1). The limit of live episodes applies as
well. Groups that dynamic sampling drops do not count, so other groups are sampled instead.

Invariants:
- Without oversampling, batches take groups in the order in which they started. With the limit above, no trained token is
  more than `max_staleness` versions old, and short episodes are not favoured.
- With oversampling, a batch takes the groups that finish first. The other groups are cancelled.
- Running groups that would be too old for the next batch are cancelled. They exist if `max_sampling_rounds` ends a batch early.
- With `max_staleness` 0 nothing is sampled between the last episode of a batch and the weight update.
- Draws of tasks that are always or never solved are skipped (`difficulty.py`), and a skipped draw is consumed.
- A group that is consumed (see `groups.py`) is never started again. A group of an earlier launch that is not consumed is started again: its
  finished episodes are read from the store and the others continue from their journals, unless its oldest token is older than
  `max_staleness` allows.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import TrainError
from engine.train.batches import Batch, Group, GroupBuilder
from engine.train.groups import ConsumedGroups

if TYPE_CHECKING:
    from engine.runner.runner import EpisodeRunner
    from engine.schemas.environment import Task
    from engine.schemas.train import TrainSpec
    from engine.schemas.trajectory import Trajectory
    from engine.spec.rows.mix import Mix
    from engine.train.difficulty import DifficultyFilter
    from engine.train.stored_groups import StoredEpisodes


class _Epochs:
    """The order in which the tasks of one source are drawn.

    Args:
        count: Number of its tasks.
        shuffle: A new random order in each epoch.
        seed: Text that the orders depend on.
    """

    def __init__(self, count: int, *, shuffle: bool, seed: str) -> None:
        self._count = count
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def place(self, draw: int) -> tuple[int, int]:
        """The place of a draw's task in the source, and the draw's epoch."""
        epoch, place = divmod(draw, self._count)
        if epoch != self._epoch:
            self._order = list(range(self._count))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._order[place], epoch


class TaskOrder:
    """The task of each group over epochs: in file order, or in a new random order in each epoch.

    The sources of a mix are drawn by their weights, and each has epochs of its own.

    >>> order = TaskOrder(tasks, shuffle=True, seed=0)
    >>> order[0], order[len(tasks)]                        # the task of any group, without reading the ones before

    Args:
        tasks: The tasks.
        shuffle: A new random order in each epoch.
        seed: Seed of the orders.
        mix: The sources, if `tasks` are mixed.

    Raises:
        TrainError: the list of tasks is empty.
    """

    def __init__(self, tasks: Sequence[Task], *, shuffle: bool, seed: int, mix: Mix | None = None) -> None:
        if not tasks:
            raise TrainError("there are no tasks to train on: check `tasks` in the spec", kind="no_data")
        self._tasks = tasks
        self._mix = mix
        if mix is None:
            self._epochs = [_Epochs(len(tasks), shuffle=shuffle, seed=str(seed))]
        else:
            self._epochs = [
                _Epochs(len(indices), shuffle=shuffle, seed=f"{seed}/{name}") for name, indices in mix.indices.items()
            ]

    @property
    def count(self) -> int:
        """Number of tasks."""
        return len(self._tasks)

    def place(self, number: int) -> tuple[int, int]:
        """The index of a group's task in the list of tasks, and its epoch."""
        if self._mix is None:
            return self._epochs[0].place(number)
        source, draw = self._mix.draws[number]
        place, epoch = self._epochs[source].place(draw)
        return int(self._mix.indices[self._mix.names[source]][place]), epoch

    def __getitem__(self, number: int) -> Task:
        index, epoch = self.place(number)
        task = self._tasks[index]
        # A later epoch gives the task another id, so that its episodes have their own store entries and seeds.
        return task.model_copy(update={"id": f"{task.id}~{epoch}"}) if epoch else task


@dataclass(slots=True, eq=False)
class _RunningGroup:
    number: int
    version: int
    work: asyncio.Task[Group]


@dataclass(frozen=True, slots=True)
class _EndedEpisode:
    trajectory: Trajectory
    resumed: bool = False
    regenerated_tokens: int = 0


class BatchCollector:
    """Collects batches of groups. Use it inside `runner.serving()`, and close it.

    Args:
        runner: Runs single episodes.
        order: The task of each group.
        rows: Builds the training rows of a group.
        train: Batch size, staleness limit, dynamic sampling.
        samples: Episodes per group.
        max_live_episodes: Maximum number of episodes that run at the same time.
        batches: Number of batches that will be collected: no group is started for later ones. None: unlimited.
        version: Version of the weights that the backend samples with.
        consumed: Groups that must not be started.
        stored: Episodes of earlier launches of the training.
        difficulty: Skips draws of tasks that are always or never solved.
        progress: Called at the end of each episode. An error that it raises ends the collection.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        order: TaskOrder,
        rows: GroupBuilder,
        train: TrainSpec,
        *,
        samples: int,
        max_live_episodes: int,
        batches: int | None = None,
        version: int = 0,
        consumed: ConsumedGroups | None = None,
        stored: StoredEpisodes | None = None,
        difficulty: DifficultyFilter | None = None,
        progress: Callable[[Trajectory], None] | None = None,
    ) -> None:
        self._runner = runner
        self._order = order
        self._row_builder = rows
        self._train = train
        self._samples = samples
        self._live_episodes = asyncio.Semaphore(max_live_episodes)
        self._max_running_groups = max(1, -(-max_live_episodes // samples))
        self._progress = progress
        self._max_staleness = train.asynchrony.max_staleness
        self._groups_per_batch = train.tasks_per_step
        self._oversampled_groups = round((train.asynchrony.oversample - 1.0) * self._groups_per_batch)
        self._batches = batches
        self.version = version
        self._consumed = consumed.copy() if consumed is not None else ConsumedGroups()
        self._stored = stored
        self._next = self._consumed.next
        """Number of the next group to start, unless it is consumed."""
        self._difficulty = difficulty
        self._skipped: list[int] = []
        """Draws that the difficulty filter skipped since the last batch."""
        self._forced = 0
        self._stale: list[int] = []
        """Groups of an earlier launch that were dropped as too stale since the last batch."""
        self._running: list[_RunningGroup] = []
        self._batch: Batch | None = None
        self._collected = 0

    @property
    def _ordered(self) -> bool:
        return self._oversampled_groups == 0

    def _start_groups(self) -> None:
        """Start as many groups as the limits allow."""
        batches_in_progress = (
            self._max_staleness + 1 if self._batches is None else min(self._max_staleness + 1, self._batches)
        )
        most = batches_in_progress * self._groups_per_batch + (self._oversampled_groups if batches_in_progress else 0)
        while len(self._running) + self._collected < most:
            running = sum(not each.work.done() for each in self._running)
            if running >= self._max_running_groups:
                return
            number, version = self._next_to_start()
            work = asyncio.create_task(self._run_group(number, version), name=f"group-{number}")
            self._running.append(_RunningGroup(number, version, work))
            work.add_done_callback(self._group_done)

    def _next_to_start(self) -> tuple[int, int]:
        """The number of the next group, and the version of its oldest token, or of the current weights if it has none."""
        skipped = 0
        while True:
            number = self._next
            self._next += 1
            if number in self._consumed:
                continue
            versions = self._stored.versions(self._order[number].id) if self._stored is not None else None
            if versions is None and self._difficulty is not None and self._difficulty.skips(number):
                if skipped < self._difficulty.most_skipped:
                    skipped += 1
                    self._skipped.append(number)
                    continue
                self._forced += 1
            if versions is None:
                return number, self.version
            # A newer version than the current one is lost, because the steps that made it could not be repeated.
            if self.version - self._max_staleness <= versions[0] <= versions[1] <= self.version:
                return number, versions[0]
            self._stale.append(number)

    def _group_done(self, _: object) -> None:
        """Start other groups after a group is done: the limit of live episodes may allow them now."""
        if self._max_staleness or self._batch is not None:
            self._start_groups()

    async def _run_group(self, number: int, version: int) -> Group:
        task = self._order[number]
        episodes = [asyncio.create_task(self._run_episode(task, sample)) for sample in range(self._samples)]
        try:
            done = await asyncio.gather(*episodes)
        except BaseException:
            for episode in episodes:
                episode.cancel()
            await asyncio.gather(*episodes, return_exceptions=True)
            raise
        ended = [each for each in done if each is not None]
        trajectories = [each.trajectory for each in ended]
        return self._row_builder.group(
            number,
            task.id,
            version,
            trajectories,
            samples=self._samples,
            resumed=sum(each.resumed for each in ended),
            regenerated_tokens=sum(each.regenerated_tokens for each in ended),
        )

    async def _run_episode(self, task: Task, sample: int) -> _EndedEpisode | None:
        """Run an episode, or read it if it is finished. Returns None if the engine itself failed; the other episodes continue."""
        stored = self._stored
        if stored is not None and (finished := stored.finished(task.id, sample)) is not None:
            return _EndedEpisode(finished)
        async with self._live_episodes:
            begun = stored is not None and stored.begun(task.id, sample)
            continues = stored is not None and begun and stored.continues(task.id, sample)
            trajectory = await self._runner.episode(task, sample)
        if trajectory is None:
            return None
        if self._progress is not None:
            self._progress(trajectory)
        if stored is None or not begun:
            return _EndedEpisode(trajectory)
        return _EndedEpisode(trajectory, continues, stored.regenerated_tokens(task.id, sample))

    async def batch(self) -> Batch:
        """Collect the next batch: `tasks_per_step` groups, or fewer if dynamic sampling reached `max_sampling_rounds`.

        Raises:
            LedgerError: the credit method cannot be computed.
            StoreError: the run store cannot be written.
            OutageError: no server replied for `backend.wait`.
            FailingError: the first episodes all failed with one cause.
            TrainError: kind `train_setup`: a bonus function returned an invalid value.
        """
        batch = self._batch = Batch(self.version)
        self._collected = 0
        try:
            while (
                len(batch.used) < self._groups_per_batch
                and self._finished_groups(batch) < self._train.max_sampling_rounds * self._groups_per_batch
            ):
                self._start_groups()
                group = await self._next_group()
                if not group.rows or (self._train.dynamic_sampling and group.without_signal):
                    batch.left_out.append(group)
                else:
                    batch.used.append(group)
                    self._collected += 1
        finally:
            self._batch = None
        await self._cancel_stale_groups(batch)
        batch.used.sort(key=lambda group: group.number)
        batch.stale, self._stale = self._stale, []
        batch.skipped, self._skipped = self._skipped, []
        batch.forced, self._forced = self._forced, 0
        return batch

    @staticmethod
    def _finished_groups(batch: Batch) -> int:
        return len(batch.used) + len(batch.left_out)

    async def _next_group(self) -> Group:
        """Wait for the oldest group; with oversampling, for the group that finishes first."""
        if self._ordered:
            await asyncio.wait([self._running[0].work])
            return self._running.pop(0).work.result()
        await asyncio.wait([each.work for each in self._running], return_when=asyncio.FIRST_COMPLETED)
        place = next(place for place, each in enumerate(self._running) if each.work.done())
        return self._running.pop(place).work.result()

    async def _cancel_stale_groups(self, batch: Batch) -> None:
        """Cancel running groups that are too old for the next batch."""
        oldest = self.version + 1 - self._max_staleness
        late = [each for each in self._running if each.version < oldest]
        self._running = [each for each in self._running if each.version >= oldest]
        batch.cancelled += [each.number for each in late]
        await _cancel(late)

    def batch_trained(self, version: int) -> None:
        """Continue after an update: the backend samples with weights of `version` from now on."""
        self.version = version
        self._collected = 0
        if self._batches is not None:
            self._batches = max(0, self._batches - 1)
        if self._max_staleness:
            self._start_groups()

    async def drain(self) -> None:
        """Wait until all running groups have ended by themselves, so that no reply under way is lost."""
        self._batch = None
        await asyncio.gather(*(each.work for each in self._running), return_exceptions=True)

    async def close(self) -> None:
        """Cancel all running groups. Finished episodes stay in the store."""
        self._max_staleness, self._batch = 0, None
        running, self._running = self._running, []
        await _cancel(running)


async def _cancel(running: Sequence[_RunningGroup]) -> None:
    for each in running:
        each.work.cancel()
    await asyncio.gather(*(each.work for each in running), return_exceptions=True)
