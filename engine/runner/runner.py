"""Runs many episodes: a bounded number at a time, each independent of the others, all stored.

Read it from the top: `run` runs what is not finished; `episode` runs one episode and decides whether it is repeated;
`execute` is one attempt at it, from its journal to the commit of its end.

Invariants:
- A failed episode stops no other episode. Only a failure of the store stops the run: no turn is sampled
  after a turn that cannot be stored.
- A generation slot is held while a generation is requested, and at no other time (`actions/generate.py`).
- A lost server fails no episode: requests wait for it, and that time counts against no deadline or time limit.
- After a cancellation the store has everything that was finished; a resume does the rest and repeats nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from engine.actions.calling.code_call import SCOPE, EpisodeScope, LoopReplacedError
from engine.actions.calling.workers import Workers
from engine.actions.images import ImageStorer
from engine.actions.objects import ObjectBuilder
from engine.actions.role_models import RoleModels
from engine.deadline import PausableClocks
from engine.episode.compiled import compile_spec
from engine.episode.episode import never_built, until_end
from engine.episode.executor import Executor, RestartNeededError
from engine.errors import EngineError, ReplayError, SpecCodeError, StoreError
from engine.runner.crash_isolation import Suspects
from engine.runner.crew import rare_collections, run_crew
from engine.runner.failure_causes import Causes, Verdict, places
from engine.runner.guarded import EpisodeGuard
from engine.runner.observers import episode_observers
from engine.runner.services import open_services
from engine.runner.source import Episodes, InOrder, unfinished
from engine.runner.stats import Live, Summary
from engine.storable import words_of
from engine.store.images import stored_images
from engine.store.store import episode_id_of
from engine.store.tool_schemas import ToolSchemas
from engine.store.upkeep.fork import shared_entries
from engine.validate.drivers import refuse_many

if TYPE_CHECKING:
    from pathlib import Path

    from engine.agents.program import ProgramBodies
    from engine.backends.backend import Backend
    from engine.episode.episode import Episode
    from engine.runner.services import Cost
    from engine.schemas.environment import Task
    from engine.schemas.journal import JournalEntry
    from engine.schemas.trajectory import Trajectory
    from engine.spec.load import LoadedSpec
    from engine.store.journal import Journal
    from engine.store.store import RunStore
    from engine.tokens.template import ChatTemplate

log = structlog.get_logger(__name__)

MAX_LOSSES = 12
"""How often an episode is resumed because other code blocked the event loop that its objects were bound to."""


@dataclass(slots=True)
class RunResult:
    """The outcome of a run."""

    summary: Summary
    interrupted: bool = False
    """Whether the run was cancelled, so that some episodes are not done."""
    faults: list[str] = field(default_factory=list)
    """Episodes that could not be finished because of an error in the engine."""
    stopped: EngineError | None = None
    """Why the run stopped by itself: no server for too long, or all first episodes failed with one cause."""


class Runner:
    """Runs the episodes of one spec into one store.

    Args:
        loaded: The spec.
        tasks: Every task of the run, in order.
        format: The chat format, shared by all episodes.
        backend: The started backend; the caller closes it.
        store: The store, open for writing; the caller closes it.
        keep_going: Do not stop if all first episodes fail with one cause.
        training: The weights of the policy change while episodes run.
        folder: The folder of the training that these episodes are part of. Default: that of the store.
        programs: Agent programs that run elsewhere, instead of the spec's.

    Raises:
        SpecError: `rollout.drivers` is more than 1: `engine.drivers.run.run_drivers` runs such a spec.
    """

    def __init__(
        self,
        loaded: LoadedSpec,
        tasks: Sequence[Task],
        format: ChatTemplate,
        backend: Backend,
        store: RunStore,
        *,
        keep_going: bool = False,
        training: bool = False,
        folder: Path | None = None,
        programs: ProgramBodies | None = None,
    ) -> None:
        refuse_many(loaded, "`Runner`, which runs in one process,")
        spec = loaded.spec
        self.spec = spec
        self.tasks = tasks
        self.summary = Summary(causes=Causes(places(loaded, tasks)), mix=tuple(loaded.spec.tasks.mix or ()))
        self.live = Live(total=len(tasks) * spec.rollout.samples_per_task)
        self._verdict = None if keep_going else Verdict(lambda: self.live.total)
        self._backend = backend
        self._store = store
        self._workers = Workers()
        self._clocks = PausableClocks()
        self._suspects = Suspects(store.crashes())
        slots = asyncio.Semaphore(spec.rollout.concurrency)
        self._compiled = compile_spec(loaded, format, self._workers, context=backend.context)
        self._roles = RoleModels(loaded, format, backend, slots, training=training)
        self._object_builder = ObjectBuilder(
            loaded,
            self._compiled.machine,
            self._workers,
            backend=backend,
            slots=slots,
            roles=self._roles,
            programs=programs,
        )
        self._services = open_services(loaded, folder or store.folder)
        images = ImageStorer(format, store, stored_images(store), spec)
        self._executor = Executor(
            self._compiled, watch=self.live.watch, store_images=images.store_images, clocks=self._clocks
        )
        self._tool_schemas = ToolSchemas(store.folder)
        self._observers = episode_observers(loaded, store)
        self.guard = EpisodeGuard(format, loaded, store.folder) if backend.declared.exact_ids else None
        """Judges ended episodes; None where no row is trained on, because its exact ids are not known."""
        self._elsewhere = programs
        self._faults: list[str] = []
        self._stopped: EngineError | None = None
        self._halt = asyncio.Event()
        """Set if an error stops the whole run."""
        self.role_stats: dict[str, Any] = {}
        """After the run: counts of the backends of model-played users and judges."""

    async def run(self, *, stop: asyncio.Event | None = None) -> RunResult:
        """Run all episodes that are not finished in the store. Setting `stop` ends the run early and cleanly.

        After a run that stops by itself (`RunResult.stopped`), a resume runs the unfinished episodes.

        Raises:
            EngineError: a model that plays a user or judges is not available.
            StoreError: a record cannot be stored.
        """
        async with self.serving():
            samples = self.spec.rollout.samples_per_task
            await self._store.plan(self.tasks, samples)
            for trajectory in self._store.trajectories():
                self.summary.add(trajectory)
                self.live.before += 1
            rest = unfinished(self.tasks, samples, self._store.finished(), self._suspects)
            await self._run_all(InOrder(rest), stop)
        interrupted = stop is not None and stop.is_set() and self.summary.episodes < self.live.total
        return RunResult(self.summary, interrupted, self._faults, self._stopped)

    async def run_given(self, episodes: Episodes, stop: asyncio.Event) -> RunResult:
        """Run the episodes that `episodes` gives, until it gives no more. Setting `stop` ends the run early and cleanly.

        The summary has those that are in the store already.

        Raises:
            EngineError: as `run`.
            StoreError: a record cannot be stored.
        """
        async with self.serving():
            for trajectory in self._store.trajectories():
                self.summary.add(trajectory)
            self.live.before = self.summary.episodes
            await self._run_all(episodes, stop)
        return RunResult(self.summary, stop.is_set(), self._faults, self._stopped)

    async def episode(self, task: Task, sample: int, attempt: int = 0) -> Trajectory:
        """Run one episode from the end of its journal to its end. Call it only inside `serving`.

        Args:
            task: The episode's task.
            sample: Index of the episode in its group.
            attempt: Number of its first attempt in this store, if it is new here.

        Raises:
            StoreError: the episode is done already, or a record cannot be stored.
            OutageError: no server replied for too long; the journal has what the episode did.
            ReplayError: the episode must begin anew, but shares turns with a fork of its run.
        """
        episode_id = episode_id_of(task.id, sample)
        async with self._suspects.admitted(episode_id) as alone:
            journal = await self._store.begin(task, sample, attempt=attempt)
            given_up = self._suspects.given_up(episode_id)
            if given_up is not None and not self._compiled.has_ended(until_end(journal.entries)):
                await journal.restart()
                SCOPE.set(EpisodeScope(episode_id, last=True))
                return await self.execute(task, sample, journal, given_up=given_up)
            try:
                return await self._execute_on_new_loops(task, sample, journal, alone=alone)
            except RestartNeededError as error:
                shared = self._shared(episode_id)
                if shared and len(journal.entries) <= len(shared):
                    raise ReplayError(f"{error}; so it cannot share turns with a fork of its run") from error
                log.warning("episode begins anew", reason=str(error))
                await journal.restart(len(shared))
                return await self._execute_on_new_loops(task, sample, journal, alone=alone)

    async def episode_or_none(self, task: Task, sample: int, faults: list[str], attempt: int = 0) -> Trajectory | None:
        """Run one episode, as `episode`. Returns None, and adds the reason to `faults`, if the engine itself failed in it.

        Raises:
            StoreError: as `episode`.
            EngineError: it stops the run (`stops_run`).
        """
        try:
            return await self.episode(task, sample, attempt)
        except StoreError:
            raise
        except Exception as error:
            if isinstance(error, EngineError) and error.stops_run:
                raise
            log.exception("an episode could not be finished", episode=episode_id_of(task.id, sample))
            faults.append(f"{episode_id_of(task.id, sample)}: {words_of(error)}")
            return None

    async def execute(
        self,
        task: Task,
        sample: int,
        journal: Journal,
        *,
        alone: bool = False,
        given_up: EngineError | None = None,
        lost: LoopReplacedError | None = None,
    ) -> Trajectory:
        """Run one attempt of an episode, from the end of its journal to its end. An episode that has ended is only written.

        Args:
            task: The episode's task.
            sample: Index of the episode in its group.
            journal: The journal of this attempt.
            alone: Run the spec's code in a worker process; see `engine.runner.crash_isolation`.
            given_up: Fail with this error before anything runs.
            lost: Fail with this error at the end of the journal, and call nothing again.

        Raises:
            RestartNeededError: the journal cannot be resumed; the episode must begin anew.
            LoopReplacedError: other code blocked the loop of its objects; it can be resumed from its journal.
            ReplayError: the episode has ended, but cannot be rebuilt.
            StoreError: a record cannot be stored.
        """
        entries = until_end(journal.entries)
        ended = self._compiled.has_ended(entries)
        objects, broken = self._object_builder.none(), given_up
        if broken is None and not never_built(entries):
            try:
                objects = await self._object_builder.open(task, alone=alone and not ended)
            except EngineError as error:
                if isinstance(error, LoopReplacedError) and error.repeatable:
                    raise
                if ended:
                    raise ReplayError(f"it has ended, but its objects cannot be built to finish it: {error}") from error
                if entries:
                    raise RestartNeededError(
                        f"its environment, tools or user can no longer be built: {error}"
                    ) from error
                broken = error
        tools = objects.toolbox.schemas if objects.toolbox else []
        episode = self._compiled.episode(task, sample, tools)
        if broken is None:
            self._tool_schemas.note(episode.id, tools)
        self.live.enter(episode.state)
        try:
            if broken is not None:
                await self._executor.run_failed(episode, objects, journal, broken)
            elif lost is not None:
                await self._executor.restore(episode, objects, entries, call=False)
                await self._executor.run_failed(episode, objects, journal, lost)
            else:
                await self._executor.restore(episode, objects, entries)
                if not ended:
                    await self._executor.run(episode, objects, journal)
            trajectory = await self._finish(episode, journal)
            self.live.end(trajectory)
            return trajectory
        finally:
            self.live.leave(episode.state)
            await self._object_builder.close(objects)
            self._backend.release(episode.id)
            self._roles.release(episode.id)
            for service in self._services:
                service.release(episode.id)

    async def _finish(self, episode: Episode, journal: Journal) -> Trajectory:
        """Have an ended episode judged, store its result, and tell the observers, also if this is cancelled meanwhile."""
        make = partial(episode.trajectory, self._store.run_id, exact=self.guard is not None)
        try:
            return await journal.finish(make, None if self.guard is None else partial(self.guard.judged, episode))
        finally:
            if journal.trajectory is not None:
                for observer in self._observers:
                    observer.episode_ended(journal.trajectory)

    def count(self, trajectory: Trajectory) -> None:
        """Count a finished episode of this launch.

        Raises:
            FailingError: the first episodes all failed with one cause.
        """
        cause = self.summary.add(trajectory)
        if self._verdict is not None:
            self._verdict.add(cause, trajectory.outcome.failure)

    @property
    def cost(self) -> Cost | None:
        """What the run, or the training that it is part of, has cost; None before `serving`, and where no costs are counted."""
        return next((cost for service in self._services if (cost := service.cost) is not None), None)

    @property
    def busy_calls(self) -> str:
        """Describe the calls that were still computing after their deadlines; empty if there were none."""
        return self._workers.interrupter.summary

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Start the services that episodes need, and close them when the block ends.

        Raises:
            EngineError: a model that plays a user or judges is not available.
            SpecCodeError: the spec's agent has no program, and none runs elsewhere.
        """
        if (agent := self.spec.agent) is not None and agent.elsewhere and self._elsewhere is None:
            raise SpecCodeError(
                "`agent` has neither `run` nor `use`, so its programs run elsewhere: open episodes with `engine serve --api`",
                blame="spec",
                kind="agent_elsewhere",
            )
        await self._roles.start()
        own = self._backend.outage
        outages = [*([own] if own is not None else []), *self._roles.outages]
        self.live.outages = outages
        for outage in outages:
            outage.clocks.add(self._clocks)
        async with AsyncExitStack() as ending:  # one that cannot be closed leaves none of the others open
            ending.push_async_callback(self._close_roles)
            for observer in reversed(self._observers):
                ending.push_async_callback(asyncio.to_thread, observer.close)
            ending.callback(self._workers.close)
            for outage in outages:
                ending.callback(outage.clocks.remove, self._clocks)
            for service in reversed(self._services):
                ending.push_async_callback(service.close)
            with rare_collections():
                for service in self._services:
                    await service.start([self._backend, *self._roles.backends])
                yield

    async def _close_roles(self) -> None:
        self.role_stats = self._roles.stats()
        await self._roles.close()

    async def _run_all(self, episodes: Episodes, stop: asyncio.Event | None) -> None:
        """Run episodes, a bounded number at a time, until none is left or `stop` or `_halt` is set."""
        alive = self.spec.rollout.live_episodes or 2 * self.spec.rollout.concurrency
        count = min(alive, self.live.total or 1)
        stops = [self._halt] if stop is None else [stop, self._halt]
        await run_crew(lambda: self._run_next(episodes), count, stops)

    async def _run_next(self, episodes: Episodes) -> None:
        """Run one episode after another, until none is left."""
        while (given := await episodes.next()) is not None:
            task, sample, attempt = given
            try:
                trajectory = await self.episode_or_none(task, sample, self._faults, attempt)
                if trajectory is not None:
                    self.count(trajectory)
            except StoreError:
                raise
            except EngineError as error:  # it stops the run
                self._stopped = self._stopped or error
                if not error.drains:
                    self._halt.set()
                return
            episodes.ended(task, sample, finished=trajectory is not None)

    def _shared(self, episode_id: str) -> Sequence[JournalEntry]:
        """Return the entries that the episode shares with the run from which this one was forked."""
        fork = self._store.header.fork
        return shared_entries(self._store.journal(episode_id, 0), fork.turn) if fork is not None else []

    async def _execute_on_new_loops(self, task: Task, sample: int, journal: Journal, *, alone: bool) -> Trajectory:
        """Call `execute`, and again from the journal if other code blocked the event loop that the episode's objects are bound to.

        An episode that cannot be restored, or that loses its loop `MAX_LOSSES` times, fails instead.
        """
        episode_id = episode_id_of(task.id, sample)
        lost: LoopReplacedError | None = None
        for losses in range(1 + MAX_LOSSES):
            SCOPE.set(EpisodeScope(episode_id, losses))
            try:
                return await self.execute(task, sample, journal, alone=alone)
            except RestartNeededError:
                if lost is None:
                    raise
                break
            except LoopReplacedError as error:
                log.debug("episode is resumed from its journal", episode=episode_id, reason=str(error))
                lost = error
                await journal.reread()
        SCOPE.set(EpisodeScope(episode_id, 1 + MAX_LOSSES, last=True))
        return await self.execute(task, sample, journal, alone=alone, lost=lost)
