"""Groups of episodes: each is run as a whole, and the batches of a training decide when each may start.

A group may start while

    running + ready + used  <  (max_staleness + 1) * tasks_per_step

where `used` are the groups of the batch that is being collected; near the end of the training the right side is at most
(number of batches left) * tasks_per_step. With `version` batches trained, this is AReaL's
(max_staleness + version + 1) * B - accepted - running (arXiv 2505.24298, section 5.1). The limit of live episodes holds
as well. Groups that dynamic sampling drops do not count, so other groups are sampled instead.

Invariants:
- A group is whole: all of its episodes have ended before its rows are made, because they are each other's baseline.
- Without oversampling, batches take groups in the order in which they started. With the limit above, no trained token
  is more than `max_staleness` versions old, and short episodes are not favoured.
- With oversampling, a batch takes the groups that finish first. The other groups are cancelled.
- Running groups that would be too old for the next batch, after `max_sampling_rounds` ended one early, are cancelled.
- With `max_staleness` 0 nothing is sampled between the last episode of a batch and the weight update.
- A draw that the filter skips (`DrawFilter`) is consumed.
- A group that is consumed (`ConsumedGroups`) is never started again. Another one of an earlier launch is: its finished
  episodes are read from the store and the others continue from their journals, unless its oldest token is older than
  `max_staleness` allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from engine.errors import first_of
from engine.runner.batch import Batch, Group
from engine.runner.task_order import ConsumedGroups, DrawFilter, TaskOrder
from engine.schemas.base import Struct

if TYPE_CHECKING:
    from engine.runner.processes import EpisodeRunner
    from engine.schemas.environment import Task
    from engine.schemas.train import TrainSpec
    from engine.schemas.trajectory import Trajectory
    from engine.train.episode_steps import StoredEpisodes


class GroupRequest(Struct, frozen=True, kw_only=True):
    """One group to run."""

    number: int
    """Number of the group in the order of starts, from 0."""
    task: Task
    samples: int
    """Number of its episodes."""
    version: int
    """Version of the weights when the group starts; of its oldest token, if it continues."""


RowMaker = Callable[[GroupRequest, "Sequence[Trajectory]"], Group]
"""Makes a group of its finished episodes, as `engine.train.batches.GroupBuilder.group`: without rows if too few of them
are trainable."""
FinishedEpisode = Callable[[str, int], "Trajectory | None"]
"""(task id, sample) -> an episode that need not be run, because it is finished and stored; None if it is not
finished."""


@dataclass(eq=False)
class GroupRunner:
    """Runs groups, each episode as `engine run` does. Use it inside `runner.serving()`.

    Args:
        runner: Runs single episodes.
        rows: Makes the training rows of a group.
        live: Bounds the episodes that run at the same time.
        finished: Finds episodes that are read instead of run.
        progress: Called with each episode that has ended. An error that it raises ends the group.
    """

    runner: EpisodeRunner
    rows: RowMaker
    live: asyncio.Semaphore
    finished: FinishedEpisode = lambda task_id, sample: None
    progress: Callable[[Trajectory], None] | None = None
    running: int = 0
    """Number of episodes that run."""

    async def group(self, request: GroupRequest) -> Group:
        """Run a group's episodes, and make its rows. An episode that the engine could not finish is missing.

        Raises: EngineError: as `episode` (the group's other episodes are cancelled), or the rows cannot be made.
        """
        try:
            async with asyncio.TaskGroup() as episodes:
                works = [
                    episodes.create_task(self.episode(request.task, sample), name=f"{request.task.id}/{sample}")
                    for sample in range(request.samples)
                ]
        except BaseExceptionGroup as several:
            raise first_of(several) from None
        ended = [trajectory for work in works if (trajectory := work.result()) is not None]
        return self.rows(request, ended)

    async def episode(self, task: Task, sample: int) -> Trajectory | None:
        """Run an episode, or read it if it is finished. None: the engine itself failed, and the runner's `faults` say
        why.

        Raises: StoreError, OutageError (no server replied for `backend.wait`), FailingError (the first all failed with
            one cause).
        """
        if (finished := self.finished(task.id, sample)) is not None:
            return finished
        async with self.live:
            self.running += 1
            try:
                trajectory = await self.runner.episode(task, sample)
            finally:
                self.running -= 1
        if trajectory is None:
            return None
        if self.progress is not None:
            self.progress(trajectory)
        self.runner.count(trajectory)
        return trajectory


class GroupSchedule:
    """Collects the batches of a training. Use it inside `runner.serving()`, and close it.

    Args:
        batches: Number of batches that will be collected: no group is started for later ones. None: unlimited.
        version: Version of the weights that the backend samples with.
        consumed: Groups that must not be started.
        stored: Episodes of earlier launches of the training.
    """

    def __init__(
        self,
        groups: GroupRunner,
        order: TaskOrder,
        train: TrainSpec,
        *,
        samples: int,
        max_live_episodes: int,
        batches: int | None = None,
        version: int = 0,
        consumed: ConsumedGroups | None = None,
        stored: StoredEpisodes | None = None,
        draws: DrawFilter | None = None,
    ) -> None:
        self._groups = groups
        self._order = order
        self._train = train
        self._samples = samples
        self._max_running_groups = max(1, -(-max_live_episodes // samples))
        self._max_staleness = train.asynchrony.max_staleness
        self._groups_per_batch = train.tasks_per_step
        self._oversampled_groups = round((train.asynchrony.oversample - 1.0) * self._groups_per_batch)
        self._batches = batches
        self.version = version
        self._consumed = consumed.copy() if consumed is not None else ConsumedGroups()
        self._stored = stored
        self._next = self._consumed.next
        """Number of the next group to start, unless it is consumed."""
        self._draws = draws or DrawFilter()
        self._skipped: list[int] = []
        """Draws that the filter skipped since the last batch."""
        self._forced = 0
        self._stale: list[int] = []
        """Groups of an earlier launch that were dropped as too stale since the last batch."""
        self._running: dict[asyncio.Task[Group], GroupRequest] = {}
        """In the order of starts."""
        self._batch: Batch | None = None
        self._collected = 0

    async def batch(self) -> Batch:
        """Collect the next batch: `tasks_per_step` groups, or fewer if dynamic sampling reached
        `max_sampling_rounds`."""
        batch = self._batch = Batch(self.version)
        self._collected = 0
        most_groups = self._train.max_sampling_rounds * self._groups_per_batch
        try:
            while len(batch.used) < self._groups_per_batch and len(batch.used) + len(batch.left_out) < most_groups:
                self._start_groups()
                group = await self._next_group()
                if not group.rows or (self._train.dynamic_sampling and group.without_signal):
                    batch.left_out.append(group)
                else:
                    batch.used.append(group)
                    self._collected += 1
        finally:
            self._batch = None
        oldest = self.version + 1 - self._max_staleness
        too_old = [work for work, request in self._running.items() if request.version < oldest]
        batch.cancelled += [self._running.pop(work).number for work in too_old]
        await _cancel(too_old)
        batch.used.sort(key=lambda group: group.number)
        batch.stale, self._stale = self._stale, []
        batch.skipped, self._skipped = self._skipped, []
        batch.forced, self._forced = self._forced, 0
        return batch

    def trained(self, version: int) -> None:
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
        await asyncio.gather(*self._running, return_exceptions=True)

    async def close(self) -> None:
        """Cancel all running groups. Finished episodes stay in the store."""
        self._max_staleness, self._batch = 0, None
        running, self._running = self._running, {}
        await _cancel(running)

    def _start_groups(self) -> None:
        """Start as many groups as the limits allow."""
        batches_in_progress = (
            self._max_staleness + 1 if self._batches is None else min(self._max_staleness + 1, self._batches)
        )
        most = batches_in_progress * self._groups_per_batch + (self._oversampled_groups if batches_in_progress else 0)
        while len(self._running) + self._collected < most:
            if sum(not work.done() for work in self._running) >= self._max_running_groups:
                return
            request = self._next_to_start()
            work = asyncio.create_task(self._run(request), name=f"group-{request.number}")
            self._running[work] = request
            work.add_done_callback(self._group_done)

    def _next_to_start(self) -> GroupRequest:
        """The next group, with the version of its oldest token; without tokens, of the current weights."""
        skipped = 0
        while True:
            number = self._next
            self._next += 1
            if number in self._consumed:
                continue
            task = self._order[number]
            versions = self._stored.versions(task.id) if self._stored is not None else None
            if versions is None and self._draws.skips(number):
                if skipped < self._draws.most_skipped:
                    skipped += 1
                    self._skipped.append(number)
                    continue
                self._forced += 1
            oldest, newest = versions or (self.version, self.version)
            # A newer version than the current one is lost, because the steps that made it could not be repeated.
            if self.version - self._max_staleness <= oldest <= newest <= self.version:
                return GroupRequest(number=number, task=task, samples=self._samples, version=oldest)
            self._stale.append(number)

    async def _run(self, request: GroupRequest) -> Group:
        """Run a group, and count what it continues of an earlier launch."""
        task, stored = request.task, self._stored
        if stored is None:
            return await self._groups.group(request)
        begun = stored.begun(task.id)
        group = await self._groups.group(request)
        continued = [trajectory.sample_index for trajectory in group.trajectories if trajectory.sample_index in begun]
        return replace(
            group,
            resumed=sum(begun[sample] for sample in continued),
            regenerated_tokens=sum(stored.regenerated_tokens(task.id, sample) for sample in continued),
        )

    def _group_done(self, _: object) -> None:
        """Start other groups after a group is done: the limit of live episodes may allow them now."""
        if self._max_staleness or self._batch is not None:
            self._start_groups()

    async def _next_group(self) -> Group:
        """Wait for the oldest group; with oversampling, for the group that finishes first."""
        if not self._oversampled_groups:
            await asyncio.wait([next(iter(self._running))])
        else:
            await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        ended = next(work for work in self._running if work.done())
        del self._running[ended]
        return ended.result()


async def _cancel(running: Collection[asyncio.Task[Group]]) -> None:
    for work in running:
        work.cancel()
    await asyncio.gather(*running, return_exceptions=True)
