"""A runner's question -> the next task and sample to run, and when it may begin, until there is none; and the tasks
that ask it, which end together."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.errors import SpecCodeError
from engine.plugin import entries, load
from engine.store.episode_rows import episode_id_of

if TYPE_CHECKING:
    from engine.schemas.environment import Task
    from engine.spec.load import LoadedSpec
    from engine.spec.rows.mix import TaskList
    from engine.tokens.template import ChatTemplate


def fitting_tasks(tasks: TaskList, loaded: LoadedSpec, template: ChatTemplate) -> TaskList:
    """The tasks to run: without those whose prompt leaves no room for a turn, if `tasks.overlong` asks to count them.

    Raises:
        SpecError: a prompt is too long, and is not to be left out; or all of them are.
    """
    if not loaded.spec.tasks.overlong:
        return tasks
    fitting: TaskList = load(entries("overlong")[loaded.spec.tasks.overlong])(tasks, loaded, template)
    return fitting


@dataclass(eq=False)
class EpisodeSource:
    """Gives a runner its episodes, one after another: here those of an iterator."""

    episodes: Iterator[tuple[Task, int]]

    async def next(self) -> tuple[Task, int, int] | None:
        """Return the next episode: its task, its index in the group, and the number of its first attempt; None: no
        more."""
        episode = next(self.episodes, None)
        return None if episode is None else (*episode, 0)

    def ended(self, task: Task, sample: int, *, finished: bool) -> None:
        """Count an episode that has ended. finished: it is stored; else the engine could not finish it."""


APART = 2
"""Number of crashes from which an episode's code runs in a worker process."""
BY_ITSELF = 3
"""Number of crashes from which no other episode runs at the same time."""
GIVEN_UP = 5
"""Number of crashes from which an episode is not run again."""


@dataclass(eq=False)
class CrashIsolation:
    """Admits episodes by how often each was running when the engine died, so that none can kill the run again.

    Such an episode may be the cause. The measures depend on its number of crashes:

    - from 2: all code of the spec that the episode calls runs in a separate worker process, so that it can only kill
      that process, which is a failure with blame;
    - from 3: no other episode runs at the same time, because something else of the episode must have killed the engine;
    - from 5: it ran alone at two crashes. It becomes a failure with blame `engine` and is not run.

    Args:
        crashes: How many crashes of the engine each episode was running at, by episode id.
    """

    crashes: Mapping[str, int]
    running: int = 0
    waiting: int = 0
    """Number of episodes that wait for all others to end; no other episode is admitted before them."""
    alone: bool = False
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def given_up(self, episode: str) -> SpecCodeError | None:
        """Return why an episode is not run any more; None if it is run."""
        count = self.crashes.get(episode, 0)
        if count < GIVEN_UP:
            return None
        return SpecCodeError(
            f"the engine died {count} times while this episode was running, the last {GIVEN_UP - BY_ITSELF} times with "
            "no other episode running; look for what its task, its images or its replies do to the engine's process",
            blame="engine",
            kind="engine_crashed",
        )

    @asynccontextmanager
    async def admitted(self, episode: str) -> AsyncIterator[bool]:
        """Wait until the episode may run; the value says whether its code runs in a worker process."""
        if not self.crashes:  # the usual case
            yield False
            return
        count = self.crashes.get(episode, 0)
        by_itself = count >= BY_ITSELF
        async with self.changed:
            self.waiting += by_itself
            try:
                await self.changed.wait_for(
                    lambda: not self.alone and not (self.running if by_itself else self.waiting)
                )
            finally:
                self.waiting -= by_itself
            self.alone = by_itself
            self.running += 1
        try:
            yield count >= APART
        finally:
            self.running -= 1
            self.alone = self.alone and not by_itself
            await asyncio.shield(self._notify())

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()


def unfinished_episodes(
    tasks: Sequence[Task], samples: int, done: set[str], isolation: CrashIsolation
) -> Iterator[tuple[Task, int]]:
    """Yield the unfinished episodes, task by task; last those that may have killed the engine, fewest crashes first.

    Args:
        tasks: The tasks of the run.
        samples: Episodes of a task.
        done: Ids of the episodes that are finished.
        isolation: How often the engine crashed while each episode ran.
    """
    last: list[tuple[int, Task, int]] = []
    for task in tasks:
        for sample in range(samples):
            episode_id = episode_id_of(task.id, sample)
            if episode_id in done:
                continue
            if (crashes := isolation.crashes.get(episode_id, 0)) >= APART:
                last.append((crashes, task, sample))
            else:
                yield task, sample
    for _, task, sample in sorted(last, key=lambda suspect: suspect[0]):
        yield task, sample


ROUND_SECONDS = 0.02
"""How long a round of the event loop should take while tasks begin; a round with 32 beginnings takes about 10 ms."""


async def run_workers(
    work: Callable[[], Coroutine[Any, Any, None]], count: int, stops: Sequence[asyncio.Event]
) -> None:
    """Run `work` in a number of tasks until all of them have ended. An event of `stops` cancels them.

    Few of them begin in each round of the event loop: the first replies are handled while others begin, and do not all
    come at once.

    Args:
        work: Called once for each task.
        count: Number of tasks.
        stops: Events that end the work early.

    Raises:
        BaseException: the first error of a task, after all of them have ended; a cancellation by `stops` is none.
    """
    workers: list[asyncio.Task[None]] = []
    watchers = [asyncio.create_task(_cancel_on(event, workers)) for event in stops]
    step = 32
    try:
        while len(workers) < count and not any(event.is_set() for event in stops):
            began = time.perf_counter()
            workers += [asyncio.create_task(work(), name="episodes") for _ in range(min(step, count - len(workers)))]
            await asyncio.sleep(0.001)  # the loop waits for events, so that the writer's thread gets Python's lock
            took = time.perf_counter() - began
            step = max(4, step // 2) if took > ROUND_SECONDS else min(64, step * 2)
        finished = await asyncio.gather(*workers, return_exceptions=True)
    except asyncio.CancelledError:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        raise
    finally:
        for watcher in watchers:
            watcher.cancel()
    for fault in finished:
        if isinstance(fault, BaseException) and not isinstance(fault, asyncio.CancelledError):
            raise fault


async def _cancel_on(event: asyncio.Event, workers: Sequence[asyncio.Task[None]]) -> None:
    await event.wait()
    for worker in workers:
        worker.cancel()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage rarely while many episodes are running.

    An episode's objects are freed by their reference counts. The cyclic collector only visits the live ones, at a cost
    that grows with their number. Objects that the caller has frozen stay frozen: nothing else is frozen then.
    """
    before = gc.get_threshold()
    frozen_by_caller = gc.get_freeze_count() > 1_000  # Python 3.12 freezes a few hundred when it starts
    if not frozen_by_caller:
        gc.freeze()
    gc.set_threshold(200_000, 50, 1_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen_by_caller:
            gc.unfreeze()
