"""The episodes of one driver: leases that it has got, in order, and reports of the groups that are done.

Invariants:
- The driver asks for groups only for the places that it has, and a few ahead, so that no place waits for an answer.
- A group is reported as done after all its episodes are stored, and after `publish` has copied them where other hosts
  read them.
- A report that got no answer is sent again under the same number.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from engine.plugins.drivers.leases import EPOCH_ATTEMPTS, Lease, LeaseAnswer
from engine.runner.source import EpisodeSource
from engine.store.episode_rows import episode_id_of

if TYPE_CHECKING:
    from engine.schemas.environment import Task

HEARTBEAT = 0.5
"""Longest time between two calls, in seconds."""
EMPTY = 0.1
"""Shortest time between two calls if the first got fewer groups than it asked for, in seconds."""
PUBLISH_SECONDS = 15.0
"""Longest time for which a group that is done waits for others before it is published, in seconds."""
PUBLISH_GROUPS = 256
"""Number of groups that are published at once, at most."""

Call = Callable[[int, int, Sequence[int], Sequence[int]], Awaitable[LeaseAnswer]]
"""Called with the call's number, the number of groups that there is room for, and the groups that are done and
faulty."""


class Feed(EpisodeSource):
    """Gives a runner the episodes that a coordinator leases to its driver.

    Args:
        call: Calls the coordinator; it returns when it has got an answer.
        tasks: The tasks of the run; a lease names a position among them.
        samples: Episodes of a group.
        room: Number of episodes that may run at once.
        finished: Ids of the episodes that are in the driver's store already.
        publish: Copies groups, by the ids of their tasks, to where other hosts read them; called in a thread.
    """

    def __init__(
        self,
        call: Call,
        tasks: Sequence[Task],
        samples: int,
        *,
        room: int,
        finished: set[str],
        publish: Callable[[list[str]], object] | None = None,
    ) -> None:
        super().__init__(iter(()))
        self._call = call
        self._tasks = tasks
        self._samples = samples
        self._room = room
        self._ahead = max(samples, room // 4)
        self._finished = finished
        self._publish = publish
        self._buffer: deque[tuple[Task, int, int]] = deque()
        self._running = 0
        self._open: dict[str, list[int]] = {}
        """Task id -> position, episodes that have not ended, and whether one could not be finished."""
        self._unpublished: list[tuple[int, str]] = []
        self._done: list[int] = []
        self._faulty: list[int] = []
        self._published = time.monotonic()
        self._wake = asyncio.Event()
        self._more = asyncio.Event()
        self._closed = False
        self.word = "run"
        """The word of the last answer."""

    def add(self, leases: Sequence[Lease]) -> None:
        """Take in leases."""
        for position, epoch in leases:
            task = self._tasks[position]
            left = [sample for sample in range(self._samples) if episode_id_of(task.id, sample) not in self._finished]
            if not left:
                self._complete(position, task.id)
                continue
            self._open[task.id] = [position, len(left), 0]
            self._buffer.extend((task, sample, EPOCH_ATTEMPTS * epoch) for sample in left)
        self._more.set()

    async def next(self) -> tuple[Task, int, int] | None:
        """See `EpisodeSource.next`."""
        while not self._buffer:
            if self._closed:
                return None
            self._wake.set()
            self._more.clear()
            await self._more.wait()
        self._running += 1
        if len(self._buffer) <= self._ahead // 2:
            self._wake.set()
        return self._buffer.popleft()

    def ended(self, task: Task, sample: int, *, finished: bool) -> None:
        """See `EpisodeSource.ended`."""
        self._running -= 1
        group = self._open[task.id]
        group[1] -= 1
        group[2] |= not finished
        if not group[1]:
            del self._open[task.id]
            if group[2]:
                self._faulty.append(group[0])
            else:
                self._complete(group[0], task.id)
        if not self._running and not self._buffer:
            self._wake.set()

    def _complete(self, position: int, task_id: str) -> None:
        if self._publish is None:
            self._done.append(position)
        else:
            self._unpublished.append((position, task_id))

    @property
    def wanted(self) -> int:
        """Number of groups that there is room for."""
        if len(self._buffer) > self._ahead // 2:
            return 0
        return max(0, -(-(self._room + self._ahead - self._running - len(self._buffer)) // self._samples))

    async def serve(self) -> None:
        """Call the coordinator whenever there is room or something to report, until no group is left or the leases were
        taken.

        Raises:
            StoreError: rows cannot be published.
        """
        number = 0
        try:
            while True:
                self._wake.clear()
                await self._publish_done(all_of_them=not self._running and not self._buffer)
                number += 1
                wanted = self.wanted
                answer = await self._report(number, wanted)
                if answer.word == "rejoin" or (answer.word == "over" and not self._unpublished):
                    return
                self.add(answer.leases)
                if len(answer.leases) < wanted:
                    await asyncio.sleep(EMPTY)
                try:
                    await asyncio.wait_for(self._wake.wait(), HEARTBEAT)
                except TimeoutError:
                    pass
        finally:
            self._closed = True
            self._more.set()

    async def flush(self, number: int = 1 << 40) -> None:
        """Report what is done, at the end of a driver that was stopped."""
        await self._publish_done(all_of_them=True)
        await self._report(number, 0)

    async def _report(self, number: int, wanted: int) -> LeaseAnswer:
        done, faulty = list(self._done), list(self._faulty)
        answer = await self._call(number, wanted, done, faulty)
        del self._done[: len(done)], self._faulty[: len(faulty)]
        self.word = answer.word
        return answer

    async def _publish_done(self, *, all_of_them: bool) -> None:
        if self._publish is None or not self._unpublished:
            return
        due = time.monotonic() - self._published > PUBLISH_SECONDS or len(self._unpublished) >= PUBLISH_GROUPS
        if not due and not all_of_them:
            return
        part = self._unpublished[:PUBLISH_GROUPS]
        await asyncio.to_thread(self._publish, [task_id for _, task_id in part])
        del self._unpublished[: len(part)]
        self._done += [position for position, _ in part]
        self._published = time.monotonic()
