"""Groups of episodes for a trainer: begun as far ahead as staleness admits, handed on whole.

A group may begin while

    running + ready + used  <  (max_staleness + 1) * tasks_per_step

where `used` are those of the batch that is being collected: with `version` batches trained, this is AReaL's
(max_staleness + version + 1) * B - accepted - running (arXiv 2505.24298, section 5.1), also bounded by the episodes
that may be max_live_episodes. Groups that have nothing to teach do not count, so others take their place.

Invariants:
- Without over-sampling, batches take groups in the order in which they were begun. Together with the bound, no token
  that trains is more than `max_staleness` versions old, and nobody is favoured for being quick.
- With over-sampling, a batch takes whoever is ready; stragglers are cancelled.
- What would be too old for the next batch is cancelled: where `max_sampling_rounds` ends a batch early, groups are still under way.
- `max_staleness` 0: nothing is sampled between the last episode of a batch and the weights that it makes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from engine.errors import EngineError, StoreError, TrainError
from engine.train.batches import Batch, Group, RowBuilder

if TYPE_CHECKING:
    from engine.runner.run import Runner
    from engine.schemas.environment import Task
    from engine.schemas.train import TrainSpec
    from engine.schemas.trajectory import Trajectory

log = structlog.get_logger(__name__)


class TaskOrder:
    """Every task once, then every task again: in file order, or shuffled anew each time round.

    >>> order = TaskOrder(tasks, shuffle=True, seed=0)
    >>> order[0], order[len(tasks)]                        # any group's task, without those before it
    """

    def __init__(self, tasks: Sequence[Task], *, shuffle: bool, seed: int) -> None:
        if not tasks:
            raise TrainError("there are no tasks to train on: look at `tasks` in the spec", kind="no_data")
        self._tasks = tasks
        self._shuffle = shuffle
        self._seed = seed
        self._round = -1
        self._order: list[int] = []

    def __getitem__(self, number: int) -> Task:
        round_, place = divmod(number, len(self._tasks))
        if round_ != self._round:
            self._order = list(range(len(self._tasks)))
            if self._shuffle:
                random.Random(f"{self._seed}/{round_}").shuffle(self._order)
            self._round = round_
        task = self._tasks[self._order[place]]
        # Another time round it is another task to the store, and its episodes have other seeds.
        return task.model_copy(update={"id": f"{task.id}~{round_}"}) if round_ else task


@dataclass(slots=True, eq=False)
class _RunningGroup:
    number: int
    version: int
    work: asyncio.Task[Group]


class BatchCollector:
    """Collects batches. Used inside `runner.serving()`; `close` it.

    Args:
        runner: Drives single episodes.
        order: Which task each group has.
        rows: Makes a group's rows.
        train: Sizes, staleness, what is left out.
        samples: Episodes of each group.
        max_live_episodes: Most episodes max_live_episodes at once.
        version: Of the weights that are sampled with.
        begun: Groups that were begun before: where a resumed training goes on.
        progress: Called as each episode ends; what it raises ends the collecting.
    """

    def __init__(
        self,
        runner: Runner,
        order: TaskOrder,
        rows: RowBuilder,
        train: TrainSpec,
        *,
        samples: int,
        max_live_episodes: int,
        version: int = 0,
        begun: int = 0,
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
        self.version = version
        self.begun = begun
        """Groups begun so far."""
        self.next_group = begun
        """Groups before this one are trained on, left out or cancelled: where a resumed training begins."""
        self._running: list[_RunningGroup] = []
        self._batch: Batch | None = None
        self._collected = 0
        self.faults: list[str] = []

    @property
    def _ordered(self) -> bool:
        return self._oversampled_groups == 0

    def _start_groups(self) -> None:
        """Begin what may begin."""
        most = (self._max_staleness + 1) * self._groups_per_batch + self._oversampled_groups
        while len(self._running) + self._collected < most:
            running = sum(not each.work.done() for each in self._running)
            if running >= self._max_running_groups:
                return
            number, version = self.begun, self.version
            self.begun += 1
            work = asyncio.create_task(self._run_group(number, version), name=f"group-{number}")
            self._running.append(_RunningGroup(number, version, work))
            work.add_done_callback(self._group_done)

    def _group_done(self, _: object) -> None:
        """A group is over: where its episodes were the bound, another may begin."""
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
        trajectories = [trajectory for trajectory in done if trajectory is not None]
        return Group(number, task.id, version, trajectories, self._row_builder.rows(trajectories))

    async def _run_episode(self, task: Task, sample: int) -> Trajectory | None:
        """One episode; None where the engine itself failed at it, which stops no other."""
        async with self._live_episodes:
            try:
                trajectory = await self._runner.episode(task, sample)
            except StoreError:
                raise
            except Exception as error:
                if isinstance(error, EngineError) and error.stops_run:
                    raise
                log.exception("an episode could not be finished", task=task.id, sample=sample)
                self.faults.append(f"{task.id}/{sample}: {type(error).__name__}: {error}")
                return None
        if self._progress is not None:
            self._progress(trajectory)
        return trajectory

    async def batch(self) -> Batch:
        """The next batch: `tasks_per_step` groups that teach something, or fewer where `max_sampling_rounds` times as many did not.

        Raises:
            LedgerError: the credit method cannot be carried out.
            StoreError: what happens can no longer be written down.
            OutageError: no server replied for `backend.wait`.
            FailingError: the first episodes all failed in one way.
            TrainError: a bonus answers nonsense.
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
        await self._cancel_stragglers(batch)
        batch.used.sort(key=lambda group: group.number)
        self.next_group = min((each.number for each in self._running), default=self.begun)
        return batch

    @staticmethod
    def _finished_groups(batch: Batch) -> int:
        return len(batch.used) + len(batch.left_out)

    async def _next_group(self) -> Group:
        """The oldest group, once it is done; with over-sampling, whichever is done first."""
        if self._ordered:
            await asyncio.wait([self._running[0].work])
            return self._running.pop(0).work.result()
        await asyncio.wait([each.work for each in self._running], return_when=asyncio.FIRST_COMPLETED)
        place = next(place for place, each in enumerate(self._running) if each.work.done())
        return self._running.pop(place).work.result()

    async def _cancel_stragglers(self, batch: Batch) -> None:
        """Give up what the next batch could not take any more."""
        oldest = self.version + 1 - self._max_staleness
        late = [each for each in self._running if each.version < oldest]
        self._running = [each for each in self._running if each.version >= oldest]
        batch.cancelled += len(late)
        await _cancel(late)

    def batch_trained(self, version: int) -> None:
        """A batch is trained on and its weights are being sampled with: `version` from now on."""
        self.version = version
        self._collected = 0
        if self._max_staleness:
            self._start_groups()

    async def close(self) -> None:
        """Cancel what is under way; the store keeps what had ended."""
        self._max_staleness, self._batch = 0, None
        running, self._running = self._running, []
        await _cancel(running)


async def _cancel(running: Sequence[_RunningGroup]) -> None:
    for each in running:
        each.work.cancel()
    await asyncio.gather(*(each.work for each in running), return_exceptions=True)
