"""Drives many episodes: a bounded number alive, each on its own, all written down.

Invariants:
- One episode's failure, whatever it is, stops no other. Only the store's failure stops the run: no turn is sampled
  after one that cannot be written down.
- A generation slot is held while a generation is asked for, and at no other time (`actions/generate.py`).
- A server that is lost fails no episode: requests wait for it, and the clocks of all episodes stand still.
- Cancelling leaves everything that was finished in the store; `resume` does the rest and nothing twice.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog

from engine.actions.base import Services, World
from engine.actions.calls import SCOPE, EpisodeScope, LoopReplacedError
from engine.actions.images import ImageDesk
from engine.actions.registry import build_actions
from engine.actions.slots import Slots
from engine.actions.voice import Cast
from engine.actions.workers import Workers
from engine.actions.world import WorldBuilder
from engine.deadline import Standstill
from engine.episode import Episode, limit_variables
from engine.errors import EngineError, ReplayError, StoreError
from engine.executor import Executor, RestartNeededError, never_built, until_end
from engine.machine.compile import EpisodeMachine
from engine.machine.presets import resolve_machine
from engine.rewards.rules import compile_rules
from engine.runner.causes import Causes, Verdict, places
from engine.runner.stats import Live, Summary
from engine.runner.suspects import APART, Suspects
from engine.storable import words_of
from engine.store.fork import shared_entries
from engine.store.images import stored_images
from engine.store.store import episode_id_of
from engine.tokens.conversation import Conversation

if TYPE_CHECKING:
    from engine.backends.base import Backend
    from engine.backends.outage import Outage
    from engine.schemas.environment import Task
    from engine.schemas.journal import JournalEntry
    from engine.schemas.trajectory import Trajectory
    from engine.spec.load import LoadedSpec
    from engine.store.codec import Ending
    from engine.store.store import RunStore
    from engine.tokens.format import ChatFormat

log = structlog.get_logger(__name__)

MOST_LOSSES = 12
"""How often an episode is taken up again because others blocked the event loop that its objects were bound to."""
FINISHING = 64
"""Most trajectories that are whole in memory at once, waiting to be written: each is several times its episode's size."""


@dataclass(slots=True)
class RunResult:
    """What came of a run."""

    summary: Summary
    interrupted: bool = False
    """It was cancelled: some episodes are not done."""
    faults: list[str] = field(default_factory=list)
    """Episodes that could not be finished through a fault of the engine's own."""
    stopped: EngineError | None = None
    """What stopped it: no server for too long, or first episodes that all failed in one way."""


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage seldom while many episodes are alive.

    An episode's objects are freed by their reference counts; what the cyclic collector does meanwhile is walk the
    live ones, at a cost that grows with their number.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000, 50, 1_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


class Runner:
    """Runs the episodes of one spec into one store.

    Args:
        loaded: The spec.
        tasks: Every task of the run, in order.
        format: The chat format, shared by all episodes.
        backend: Started already; the caller closes it.
        store: Open for writing; the caller closes it.
        keep_going: Do not stop where the first episodes all fail in one way.
    """

    def __init__(
        self,
        loaded: LoadedSpec,
        tasks: Sequence[Task],
        format: ChatFormat,
        backend: Backend,
        store: RunStore,
        *,
        keep_going: bool = False,
    ) -> None:
        spec = loaded.spec
        self.spec = spec
        self.tasks = tasks
        self.summary = Summary(causes=Causes(places(loaded, tasks)))
        self.live = Live(total=len(tasks) * spec.rollout.samples_per_task)
        self._verdict = None if keep_going else Verdict(lambda: self.live.total)
        self._stopped: EngineError | None = None
        self._clocks = Standstill()
        self._format = format
        self._backend = backend
        self._store = store
        self._workers = Workers()
        self._suspects = Suspects(store.crashes())
        self._finishing = asyncio.Semaphore(FINISHING)
        self._services = Services(
            spec=spec,
            format=format,
            backend=backend,
            workers=self._workers,
            slots=Slots(spec.rollout.concurrency),
        )
        self.cast = Cast(loaded, format, backend, self._services.slots)
        self._services.cast = self.cast
        resolved = resolve_machine(spec.machine)
        self._machine = EpisodeMachine(resolved)
        self._worlds = WorldBuilder(self._services, loaded.base)
        self._limits = limit_variables(spec.limits)
        self._executor = Executor(
            self._machine,
            build_actions(resolved.states, self._services, loaded.base),
            compile_rules(spec.rewards.reassign),
            episode_seconds=spec.limits.episode_seconds,
            append=store.post,
            watch=self.live.watch,
            settle=ImageDesk(format, store, stored_images(store)).settle,
            clocks=self._clocks,
        )
        self._faults: list[str] = []
        self._halt: Callable[[], None] = lambda: None
        self.cast_stats: dict[str, Any] = {}
        """After the run: what the backends of models beside the policy counted."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Make ready for episodes; everything that they were given is given back when the block ends.

        Raises:
            EngineError: a model that plays a user or judges cannot be had.
        """
        await self.cast.start()
        own = getattr(self._backend, "outage", None)
        outages: list[Outage] = [*([own] if own is not None else []), *self.cast.outages]
        self.live.outages = outages
        for outage in outages:
            outage.clocks.add(self._clocks)
        try:
            with _rare_collections():
                yield
        finally:
            for outage in outages:
                outage.clocks.remove(self._clocks)
            self._workers.close()
            self.cast_stats = self.cast.stats()
            await self.cast.close()

    async def run(self, *, stop: asyncio.Event | None = None) -> RunResult:
        """Run what the store does not hold finished. `stop`, once set, ends it cleanly and early.

        A run that stops by itself (`RunResult.stopped`) leaves what was under way to a resume.

        Raises:
            EngineError: a model that plays a user or judges cannot be had.
            StoreError: what happens can no longer be written down.
        """
        async with self.serving():
            return await self._run(stop)

    async def _run(self, stop: asyncio.Event | None) -> RunResult:
        await self._store.plan(self.tasks, self.spec.rollout.samples_per_task)
        work = self._work(self._store.finished())
        alive = self.spec.rollout.live_episodes or 2 * self.spec.rollout.concurrency
        crew = [
            asyncio.create_task(self._drain(work), name=f"crew-{n}") for n in range(min(alive, self.live.total or 1))
        ]
        halt = asyncio.Event()
        self._halt = halt.set
        watchers = [asyncio.create_task(self._stop_on(event, crew)) for event in (stop, halt) if event is not None]
        try:
            finished = await asyncio.gather(*crew, return_exceptions=True)
        except asyncio.CancelledError:
            for member in crew:
                member.cancel()
            await asyncio.gather(*crew, return_exceptions=True)
            raise
        finally:
            for watcher in watchers:
                watcher.cancel()
        for fault in finished:
            if isinstance(fault, BaseException) and not isinstance(fault, asyncio.CancelledError):
                raise fault
        interrupted = stop is not None and stop.is_set() and self.summary.episodes < self.live.total
        return RunResult(self.summary, interrupted, self._faults, self._stopped)

    @staticmethod
    async def _stop_on(stop: asyncio.Event, crew: list[asyncio.Task[None]]) -> None:
        await stop.wait()
        for member in crew:
            member.cancel()

    def _work(self, done: set[str]) -> Iterator[tuple[Task, int]]:
        """What is to be done; finished episodes are only counted."""
        for trajectory in self._store.trajectories():
            self.summary.add(trajectory)
        return self._in_order(done)

    def _in_order(self, done: set[str]) -> Iterator[tuple[Task, int]]:
        """A group's samples side by side; last the episodes that may have killed the engine, the least suspect first."""
        suspects: list[tuple[int, Task, int]] = []
        for task in self.tasks:
            for sample in range(self.spec.rollout.samples_per_task):
                episode_id = episode_id_of(task.id, sample)
                if episode_id in done:
                    continue
                if (crashes := self._suspects.crashes(episode_id)) >= APART:
                    suspects.append((crashes, task, sample))
                else:
                    yield task, sample
        for _, task, sample in sorted(suspects, key=lambda suspect: suspect[0]):
            yield task, sample

    async def _drain(self, work: Iterator[tuple[Task, int]]) -> None:
        for task, sample in work:
            try:
                trajectory = await self.episode(task, sample)
                self.count(trajectory)
            except StoreError:
                raise
            except Exception as error:
                if isinstance(error, EngineError) and error.stops_run:
                    self._stopped = self._stopped or error
                    self._halt()
                    return
                log.exception("an episode could not be finished", episode=episode_id_of(task.id, sample))
                self._faults.append(f"{episode_id_of(task.id, sample)}: {words_of(error)}")

    def count(self, trajectory: Trajectory) -> None:
        """Count a finished episode of this launch.

        Raises:
            FailingError: the first ones all failed with one cause.
        """
        cause = self.summary.add(trajectory)
        if self._verdict is not None:
            self._verdict.add(cause, trajectory.outcome.failure)

    async def episode(self, task: Task, sample: int) -> Trajectory:
        """Drive one episode to its end, from where its journal stops; inside `serving` alone.

        Raises:
            StoreError: it is done already, or what happens can no longer be written down.
            OutageError: no server replied for too long; the episode stays as its journal has it.
        """
        episode_id = episode_id_of(task.id, sample)
        async with self._suspects.admitted(episode_id) as alone:
            journal = await self._store.begin(task, sample)
            given_up = self._suspects.given_up(episode_id)
            if given_up is not None and not self._executor.has_ended(until_end(journal)):
                await self._store.restart(episode_id)
                SCOPE.set(EpisodeScope(episode_id, last=True))
                return await self._attempt(task, sample, [], given_up=given_up)
            try:
                return await self._taken_up(task, sample, journal, alone=alone)
            except RestartNeededError as error:
                shared = self._shared(episode_id)
                if shared and len(journal) <= len(shared):
                    raise ReplayError(f"{error}; so it cannot share turns with a fork of its run") from error
                log.warning("episode begins anew", reason=str(error))
                await self._store.restart(episode_id, len(shared))
                return await self._taken_up(task, sample, shared, alone=alone)

    def _shared(self, episode_id: str) -> Sequence[JournalEntry]:
        """What the episode shares with the run that this one forks."""
        fork = self._store.header.fork
        return shared_entries(self._store.journal(episode_id, 0), fork.turn) if fork is not None else []

    async def _taken_up(self, task: Task, sample: int, journal: Sequence[JournalEntry], *, alone: bool) -> Trajectory:
        """`_attempt`; where other code blocked the loop that the episode's objects are bound to, again from its journal.

        An episode that cannot be restored, or that loses its loop time after time, fails instead.
        """
        episode_id = episode_id_of(task.id, sample)
        lost: LoopReplacedError | None = None
        for losses in range(1 + MOST_LOSSES):
            SCOPE.set(EpisodeScope(episode_id, losses))
            try:
                return await self._attempt(task, sample, journal, alone=alone)
            except RestartNeededError:
                if lost is None:
                    raise
                break
            except LoopReplacedError as error:
                log.debug("episode is taken up again from its journal", episode=episode_id, reason=str(error))
                lost, journal = error, self._store.journal(episode_id)
        SCOPE.set(EpisodeScope(episode_id, 1 + MOST_LOSSES, last=True))
        return await self._attempt(task, sample, journal, alone=alone, lost=lost)

    async def _attempt(
        self,
        task: Task,
        sample: int,
        journal: Sequence[JournalEntry],
        *,
        alone: bool = False,
        given_up: EngineError | None = None,
        lost: LoopReplacedError | None = None,
    ) -> Trajectory:
        """Drive one episode to its end, from where its journal stops. One that has ended is only finished.

        Args:
            task: The episode's.
            sample: Which of the task's samples.
            journal: What it has done.
            alone: Run the spec's code in a worker process; see `engine.runner.suspects`.
            given_up: Fail with this before anything is run.
            lost: Fail with this where the journal stops, and call nothing again.
        """
        journal = until_end(journal)
        ended = self._executor.has_ended(journal)
        world, broken = World(), given_up
        if broken is None and not never_built(journal):
            try:
                world = await self._worlds.open(task, alone=alone and not ended)
            except EngineError as error:
                if isinstance(error, LoopReplacedError) and error.repeatable:
                    raise
                if ended:
                    raise ReplayError(f"it has ended, but its objects cannot be built to finish it: {error}") from error
                if journal:
                    raise RestartNeededError(f"its worlds can no longer be built: {error}") from error
                broken = error
        episode = self._episode(task, sample, world)
        self.live.enter(episode.state)
        try:
            if broken is not None:
                ending = await self._executor.run_failed(episode, world, broken)
            elif lost is not None:
                await self._executor.restore(episode, world, journal, call=False)
                ending = await self._executor.run_failed(episode, world, lost)
            else:
                await self._executor.restore(episode, world, journal)
                ending = None if ended else await self._executor.run(episode, world)
            return await self._finish(episode, ending)
        finally:
            self.live.leave(episode.state)
            await self._worlds.close(world)
            release: Callable[[str], None] | None = getattr(self._backend, "release", None)
            if release is not None:
                release(episode.id)
            self.cast.release(episode.id)

    async def _finish(self, episode: Episode, ending: Ending | None) -> Trajectory:
        """Write an episode that has ended, in one commit.

        Its last action was performed, and is not performed again: an episode that is cancelled here is written first, and of
        one that cannot be written, the last entry is.
        """
        cancelled: asyncio.CancelledError | None = None
        while True:
            try:
                await self._finishing.acquire()
                break
            except asyncio.CancelledError as error:
                cancelled = error
        try:
            trajectory = episode.trajectory(self._store.run_id, exact=self._backend.trainable)
            await self._store.finish(trajectory, ending)
        except StoreError:
            raise
        except Exception:
            if ending is not None:
                await self._store.append(episode.id, *ending)
            raise
        finally:
            self._finishing.release()
        if cancelled is not None:
            raise cancelled
        return trajectory

    def _episode(self, task: Task, sample: int, world: World) -> Episode:
        schemas = world.toolbox.schemas if world.toolbox else []
        conversation = Conversation(self._format, schemas, self.spec.model.history)
        rollout = self.spec.rollout
        return Episode(task, sample, rollout.seed, conversation, self._machine.initial, self._limits, salt=rollout.salt)
