"""Runs many episodes: a bounded number at a time, each independent of the others, all stored.

Read it from the top: `run` runs the episodes of a source; `episode` runs one episode, again from its journal where that
is needed.

Invariants:
- A failed episode stops no other episode. Only a failure of the store stops the run: no turn is sampled
  after a turn that cannot be stored.
- A generation slot is held while a generation is requested, and at no other time.
- A lost server fails no episode: requests wait for it, and that time counts against no deadline or time limit.
- After a cancellation the store has everything that was finished; a resume does the rest and repeats nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from engine.actions.calling.code_call import SCOPE, EpisodeScope, LoopReplacedError
from engine.actions.calling.workers import Workers
from engine.actions.objects import ObjectBuilder
from engine.actions.record_filters import ImageStorer, record_filters
from engine.actions.services import ServiceInputs, open_services
from engine.backends.backend import SlotSampler
from engine.backends.slots import Slots
from engine.clocks import PausableClocks
from engine.episode.compiled import compile_spec
from engine.episode.executor import Executor, RestartNeededError
from engine.errors import EngineError, ReplayError, StoreError
from engine.runner.counters import RunCounters
from engine.runner.failure_causes import Causes, Verdict, places
from engine.runner.guarded import EpisodeGuard
from engine.runner.observers import OBSERVE_EPISODES
from engine.runner.processes import refuse_many
from engine.runner.source import CrashIsolation, EpisodeSource, rare_collections, run_workers, unfinished_episodes
from engine.runner.summary import RunResult, RunSummary
from engine.schemas.sections import written
from engine.storable import words_of
from engine.store.episode_rows import shared_entries
from engine.store.images import stored_images
from engine.store.reading import never_built
from engine.store.store import episode_id_of
from engine.store.tool_schemas import ToolSchemas

if TYPE_CHECKING:
    from pathlib import Path

    from engine.actions.action import EpisodeObjects
    from engine.actions.services import Cost, EpisodeService
    from engine.backends.backend import Backend
    from engine.episode.episode import Episode
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
class _Attempt:
    """One attempt at an episode, and why there was another one before it."""

    task: Task
    sample: int
    journal: Journal
    alone: bool
    """Run the spec's code in a worker process; see `engine.runner.source.CrashIsolation`."""
    given_up: EngineError | None
    """The episode fails with this error before anything runs."""
    losses: int = 0
    """How often other code blocked the event loop of its objects; beyond `MAX_LOSSES` it fails at the end of its
    journal."""
    lost: LoopReplacedError | None = None
    """The newest loss."""
    anew: bool = False
    """Whether it began anew already."""
    objects: EpisodeObjects | None = None
    episode: Episode | None = None

    @property
    def last(self) -> bool:
        """Whether no other attempt follows: this one only fails."""
        return self.given_up is not None or self.losses > MAX_LOSSES


class Runner:
    """Runs the episodes of one spec into one store.

    Args:
        loaded: The spec.
        tasks: Every task of the run, in order.
        format: The chat format, shared by all episodes.
        backend: The started backend; the caller closes it, as the store.
        store: The store, open for writing.
        keep_going: Do not stop if all first episodes fail with one cause.
        training: The weights of the policy change while episodes run.
        folder: The folder of the training that these episodes are part of. Default: that of the store.
        given: Objects for the services of plugins; each takes those of its class.

    Raises:
        SpecError: the spec asks for several processes; see `engine.runner.processes`.
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
        given: Sequence[object] = (),
    ) -> None:
        refuse_many(loaded, "`Runner`, which runs in one process,")
        spec = loaded.spec
        self.spec = spec
        self.tasks = tasks
        self.summary = RunSummary(causes=Causes(places(loaded, tasks)), mix=tuple(loaded.spec.tasks.mix or ()))
        self.counters = RunCounters(total=len(tasks) * spec.rollout.samples_per_task)
        self._verdict = None if keep_going else Verdict(lambda: self.counters.total)
        self._backend = backend
        self._store = store
        self._workers = Workers()
        self._clocks = PausableClocks()
        self._isolation = CrashIsolation(store.crashes())
        slots = Slots(spec.rollout.concurrency)
        self._compiled = compile_spec(loaded, format, self._workers, context=backend.context)
        inputs = ServiceInputs(
            loaded=loaded,
            template=format,
            code=self._workers,
            backend=backend,
            slots=slots,
            folder=folder or store.folder,
            training=training,
            given=given,
        )
        self._services = open_services(inputs)
        self._object_builder = ObjectBuilder(
            loaded,
            self._compiled.machine,
            self._workers,
            sampler=SlotSampler(backend, slots),
            services=self._services,
        )
        images = ImageStorer(format, store, stored_images(store), spec)
        filters = record_filters(spec, format, self._services, images)
        self._executor = Executor(self._compiled, watch=self.counters.watch, filters=filters, clocks=self._clocks)
        self._tool_schemas = ToolSchemas(store.folder)
        self._observers = OBSERVE_EPISODES.made(written(spec), loaded, store)
        self.guard = EpisodeGuard(format, loaded, store.folder) if backend.declared.exact_ids else None
        """Judges ended episodes; None where no row is trained on, because its exact ids are not known."""
        self.faults: list[str] = []
        """Episodes that could not be finished because of an error in the engine, and why."""
        self._stopped: EngineError | None = None
        self._halt = asyncio.Event()
        """Set if an error stops the whole run."""
        self.service_stats: dict[str, Any] = {}
        """After the run: counts of the backends of services, such as those of model-played users and judges."""

    async def run(self, source: EpisodeSource | None = None, stop: asyncio.Event | None = None) -> RunResult:
        """Run the episodes that `source` gives. The summary has those that are in the store already.

        Args:
            source: Gives the episodes. None: those of the run's tasks that are not finished in the store.
            stop: Setting it ends the run early and cleanly.

        Raises:
            EngineError: a model that plays a user or judges is not available.
            StoreError: a record cannot be stored.
        """
        async with self.serving():
            samples = self.spec.rollout.samples_per_task
            if source is None:
                await self._store.plan(self.tasks, samples)
            for trajectory in self._store.trajectories():
                self.summary.add(trajectory)
            self.counters.before = self.summary.episodes
            episodes = source or EpisodeSource(
                unfinished_episodes(self.tasks, samples, self._store.finished(), self._isolation)
            )
            alive = self.spec.rollout.live_episodes or 2 * self.spec.rollout.concurrency
            stops = [self._halt] if stop is None else [stop, self._halt]
            await run_workers(lambda: self._run_next(episodes), min(alive, self.counters.total or 1), stops)
        unfinished = source is not None or self.summary.episodes < self.counters.total
        interrupted = stop is not None and stop.is_set() and unfinished
        return RunResult(self.summary, interrupted, self.faults, self._stopped)

    async def _run_next(self, source: EpisodeSource) -> None:
        """Run one episode after another, until none is left."""
        while (chosen := await source.next()) is not None:
            task, sample, attempt = chosen
            try:
                trajectory = await self.episode(task, sample, attempt)
                if trajectory is not None:
                    self.count(trajectory)
            except StoreError:
                raise
            except EngineError as error:  # it stops the run
                self._stopped = self._stopped or error
                if not error.drains:
                    self._halt.set()
                return
            source.ended(task, sample, finished=trajectory is not None)

    async def episode(self, task: Task, sample: int, attempt: int = 0) -> Trajectory | None:
        """Run one episode from the end of its journal to its end. Call it only inside `serving`.

        Args:
            task: The episode's task.
            sample: Index of the episode in its group.
            attempt: Number of its first attempt in this store, if it is new here.

        Returns:
            What is stored. None: the engine itself failed in it, and `faults` says why.

        Raises:
            StoreError: the episode is done already, or a record cannot be stored.
            EngineError: it stops the run (`stops_run`): no server replied for too long; the journal has what the
                episode did.
        """
        episode_id = episode_id_of(task.id, sample)
        try:
            async with self._isolation.admitted(episode_id) as alone:
                attempt_ = await self._begin(task, sample, attempt, alone=alone)
                while True:
                    try:
                        episode, objects, ended = await self._open(attempt_)
                        if not ended:
                            await self._executor.run(episode, objects, attempt_.journal)
                        return await self._finish(episode, attempt_.journal)
                    except (RestartNeededError, LoopReplacedError) as error:
                        stopped = error
                    finally:
                        await self._close(attempt_)
                    await self._prepare_another(attempt_, stopped)
        except StoreError:
            raise
        except Exception as error:
            if isinstance(error, EngineError) and error.stops_run:
                raise
            log.exception("an episode could not be finished", episode=episode_id)
            self.faults.append(f"{episode_id}: {words_of(error)}")
            return None

    async def _begin(self, task: Task, sample: int, attempt: int, *, alone: bool) -> _Attempt:
        """Open the journal of an episode. One at which the engine died too often begins anew, and fails."""
        journal = await self._store.begin(task, sample, attempt=attempt)
        given_up = self._isolation.given_up(journal.episode_id)
        if self._compiled.has_ended(journal.entries):
            given_up = None
        if given_up is not None:
            await journal.restart()
        return _Attempt(task, sample, journal, alone, given_up)

    async def _open(self, attempt: _Attempt) -> tuple[Episode, EpisodeObjects, bool]:
        """Build an episode and its objects, and bring it to the end of its journal. The bool: only its result is still
        to be written.

        Raises:
            RestartNeededError: the journal cannot be resumed; the episode must begin anew.
            LoopReplacedError: other code blocked the loop of its objects; it can be resumed from its journal.
        """
        journal, builder = attempt.journal, self._object_builder
        entries = journal.entries
        ended = self._compiled.has_ended(entries)
        SCOPE.set(EpisodeScope(journal.episode_id, attempt.losses, last=attempt.last))
        objects, broken = builder.bare(), attempt.given_up
        if broken is None and not never_built(entries):
            try:
                objects = await builder.open(attempt.task, alone=attempt.alone and not ended)
            except EngineError as error:
                broken = _of_objects(error, entries, ended=ended)
        attempt.objects = objects
        tools = objects.toolbox.schemas if objects.toolbox else []
        episode = attempt.episode = self._compiled.episode(attempt.task, attempt.sample, tools)
        if broken is None:
            self._tool_schemas.note(episode.id, tools)
        self.counters.states[episode.state] += 1
        if broken is None:
            await self._executor.restore(episode, objects, entries, call=not attempt.last)
        failure = broken or (attempt.lost if attempt.last else None)
        if failure is not None and not ended:
            ended = await self._executor.fail(episode, journal, failure)
        return episode, objects, ended

    async def _close(self, attempt: _Attempt) -> None:
        """Close what an attempt opened."""
        if (episode := attempt.episode) is not None:
            self.counters.states[episode.state] -= 1
        if attempt.objects is not None:
            await self._object_builder.close(attempt.objects)
            self._backend.release(attempt.journal.episode_id)
            for service in self._services:
                service.release(attempt.journal.episode_id)
        attempt.objects = attempt.episode = None

    async def _prepare_another(self, attempt: _Attempt, error: RestartNeededError | LoopReplacedError) -> None:
        """Prepare another attempt: from the journal if other code blocked the event loop of the episode's objects, else
        anew.

        An episode that cannot be restored after such a loss, or that loses its loop `MAX_LOSSES` times, fails instead.
        Raises the error where there is no other attempt.
        """
        if attempt.last:
            raise error
        if isinstance(error, LoopReplacedError):
            log.debug("episode is resumed from its journal", episode=attempt.journal.episode_id, reason=str(error))
            attempt.lost = error
            attempt.losses += 1
            await attempt.journal.reread()
        elif attempt.lost is not None:
            attempt.losses = 1 + MAX_LOSSES
        elif attempt.anew:
            raise error
        else:
            fork = self._store.header.fork
            first = self._store.journal(attempt.journal.episode_id, 0) if fork is not None else []
            shared = shared_entries(first, fork.turn) if fork is not None else first
            if shared and len(attempt.journal.entries) <= len(shared):
                raise ReplayError(f"{error}; so it cannot share turns with a fork of its run") from error
            log.warning("episode begins anew", reason=str(error))
            await attempt.journal.restart(len(shared))
            attempt.anew = True

    async def _finish(self, episode: Episode, journal: Journal) -> Trajectory:
        """Have an ended episode judged, store its result, and tell the observers, also if this is cancelled
        meanwhile."""
        make = partial(episode.trajectory, self._store.run_id, exact=self.guard is not None)
        try:
            trajectory = await journal.finish(make, None if self.guard is None else partial(self.guard.judged, episode))
            self.counters.end(trajectory)
            return trajectory
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
        """What the run, or the training that it is part of, has cost; None before `serving`, and where no costs are
        counted."""
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
            SpecCodeError: a service refuses the spec.
        """
        for service in self._services:
            service.check()
        async with AsyncExitStack() as ending:  # one that cannot be closed leaves none of the others open
            for observer in reversed(self._observers):
                ending.push_async_callback(asyncio.to_thread, observer.close)
            ending.callback(self._workers.close)
            for service in self._services:
                ending.push_async_callback(self._close_service, service)
            with rare_collections():
                backends = [self._backend]
                for service in self._services:
                    await service.start(backends)
                    backends += service.backends
                self.counters.outages = [backend.outage for backend in backends if backend.outage is not None]
                for outage in self.counters.outages:
                    outage.clocks.add(self._clocks)
                    ending.callback(outage.clocks.remove, self._clocks)
                yield

    async def _close_service(self, service: EpisodeService) -> None:
        self.service_stats |= service.stats()
        await service.close()


def _of_objects(error: EngineError, entries: Sequence[JournalEntry], *, ended: bool) -> EngineError:
    """The error with which an episode fails whose objects cannot be built. Raises: as `Runner._open`."""
    if isinstance(error, LoopReplacedError) and error.repeatable:
        raise error
    if ended:
        raise ReplayError(f"it has ended, but its objects cannot be built to finish it: {error}") from error
    if entries:
        raise RestartNeededError(f"its environment, tools or user can no longer be built: {error}") from error
    return error
