"""A run with several drivers, from the cluster to the summary."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from engine.errors import EngineError, StoreError
from engine.plugins.drivers.actors import Coordinator, Driver, ask, engine_error
from engine.plugins.drivers.cluster import cluster, nodes_of
from engine.plugins.drivers.leases import FILE, Leases
from engine.plugins.drivers.rules import number_of_drivers
from engine.plugins.drivers.session import STORES, Done, Report, Setup
from engine.plugins.drivers.spec import DriversSpec
from engine.runner.counters import RunCounters
from engine.runner.failure_causes import Causes, places
from engine.runner.summary import RunResult, RunSummary

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec
    from engine.spec.rows.mix import TaskList
    from engine.store.store import RunStore

log = structlog.get_logger(__name__)

LEASE_SECONDS = 60.0
"""Time without a call after which a driver loses its leases."""
POLL = 0.5
"""Seconds between two questions for the state of the run."""
STOP_SECONDS = 15.0
"""Longest time that drivers get for a clean stop."""
ABSENT = 10.0
"""Seconds without a process after which a driver is asked again."""
MAX_DEATHS = 8
"""How often a driver may die without having finished an episode in between."""


@dataclass
class Fleet:
    """The state of all drivers: what the panel of the command shows."""

    counters: RunCounters
    summary: RunSummary
    reports: dict[int, Report] = field(default_factory=dict)
    """The newest report of each driver, by its number."""
    deaths: Counter[int] = field(default_factory=Counter)
    expired: int = 0
    """How often leases were taken from a driver that was silent for too long."""
    coordinator_cpu: float = 0.0
    """CPU time of the coordinator, in seconds."""
    _by_life: dict[tuple[int, str], Report] = field(default_factory=dict)
    _useless: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Deaths of each driver since an episode was finished, and the number of finished episodes at the newest one."""

    def died(self, slot: int, error: Exception) -> None:
        """Count a death of a driver.

        Raises:
            EngineError: it has died `MAX_DEATHS` times, and no episode was finished in between.
        """
        self.deaths[slot] += 1
        deaths, finished = self._useless.get(slot, (0, -1))
        deaths = deaths + 1 if self.counters.finished == finished else 1
        self._useless[slot] = deaths, self.counters.finished
        if deaths > MAX_DEATHS:
            raise EngineError(
                f"driver {slot} died {deaths} times while no episode was finished: {error}; its log is in Ray's folder "
                "(/tmp/ray/session_latest/logs)"
            ) from error
        log.warning("a driver died; it begins again from its journals", driver=slot, reason=str(error).splitlines()[0])

    def take(self, status: dict[str, Any]) -> None:
        """Take in the reports that the coordinator has; a coordinator that began again has fewer."""
        self._by_life |= status["reports"]
        self.expired, self.coordinator_cpu = status["expired"], status["cpu"]
        newest: dict[int, Report] = {}
        for (slot, _), report in self._by_life.items():
            newest[slot] = report
        self.reports = dict(sorted(newest.items()))
        live, lives = self.counters, list(self._by_life.values())
        for name in ("tokens", "turns", "finished", "finished_turns"):
            setattr(live, name, sum(report[name] for report in lives))
        for name in ("failures", "limits"):
            setattr(live, name, sum((Counter(report[name]) for report in lives), Counter()))
        live.states = sum((Counter(report["states"]) for report in self.reports.values()), Counter())
        stores = {report["store"]: report for report in lives}
        self.summary.episodes = sum(report["episodes"] for report in stores.values())
        self.summary.reward = sum(report["reward"] for report in stores.values())
        self.summary.unchecked_prompts = sum(report["unchecked"] for report in stores.values())
        live.before = max(0, self.summary.episodes - live.finished)


async def run_drivers(
    loaded: LoadedSpec,
    tasks: TaskList,
    kept: np.ndarray | None,
    store: RunStore,
    fleet: Fleet,
    *,
    stop: asyncio.Event,
    keep_going: bool,
    ready: Callable[[], None],
) -> list[Done]:
    """Run all episodes of a run that are not finished, on `rollout.drivers` drivers. Returns how each driver ended.

    Args:
        loaded: The spec.
        tasks: The tasks of the run.
        kept: Their indices among the spec's tasks, of shape [tasks], if some are left out.
        store: The run's own store, which has the header and the plan.
        fleet: Kept up to date while the run goes on.
        stop: Ends the run early and cleanly.
        keep_going: See `Runner`.
        ready: Called when all drivers have been asked to begin.

    Raises:
        EngineError: no cluster, or no driver that can work.
        StoreError: a store cannot be read or written.
    """
    from engine.plugins.drivers.shards import create_shards, shards_of

    samples, section = loaded.spec.rollout.samples_per_task, DriversSpec.of(loaded.spec)
    drivers = number_of_drivers(loaded.spec)
    folder = store.folder.absolute()
    place = await asyncio.to_thread(shards_of, folder)
    if place is None:
        place = await asyncio.to_thread(create_shards, folder, store.header, section.shards)
    await asyncio.to_thread(prepare_leases, folder, tasks, drivers, samples)
    await store.plan(tasks, samples)
    setup = Setup.of(
        loaded,
        store.header,
        folder,
        kept=None if kept is None else kept.tolist(),
        shards=place if section.shards is not None else None,
        keep_going=keep_going,
    )
    with cluster(drivers) as ray:
        crew = _Crew(ray, setup, fleet, len(tasks), stop)
        ready()
        return await crew.run()


def result_of(folder: Path, loaded: LoadedSpec, tasks: TaskList, ended: Sequence[Done], *, stopped: bool) -> RunResult:
    """The result of the run from those of its drivers; `stopped`: a signal ended it.

    Where their summaries are not exactly the episodes that readers list, these episodes are read instead: one was
    finished in two stores, or in that of a host that is lost, from which its shards are left.

    Raises:
        StoreError: episodes are gone.
    """
    from engine.plugins.drivers.sharded import ShardedRun

    summary = RunSummary(causes=Causes(places(loaded, tasks)), mix=tuple(loaded.spec.tasks.mix or ()))
    merged = ShardedRun(folder)
    if merged.finished_by_store() == Counter({done.store: done.summary.episodes for done in ended}):
        for done in ended:
            summary.merge(done.summary)
    else:
        for trajectory in merged.trajectories():
            summary.add(trajectory)
    faults = [fault for done in ended for fault in done.faults]
    reason = next((done.stopped for done in ended if done.stopped is not None), None)
    total = len(tasks) * loaded.spec.rollout.samples_per_task
    interrupted = stopped and summary.episodes < total
    if not interrupted and reason is None and not faults and summary.episodes < total:
        raise StoreError(
            f"{folder}: {summary.episodes} of {total} episodes can be read; was a driver's store removed, or is it on "
            "another host? Resume the run to do the others again"
        )
    return RunResult(summary, interrupted, faults, reason)


def prepare_leases(folder: Path, tasks: TaskList, drivers: int, samples: int) -> None:
    """On a resume, free the groups that nobody holds any more, and those that are not complete in what readers read.

    Raises:
        StoreError: drivers have run, but their leases are missing, or a store cannot be read.
    """
    if not (folder / FILE).exists():
        if (folder / STORES).is_dir() and any((folder / STORES).iterdir()):
            raise StoreError(
                f"{folder / FILE} is missing, and drivers have run already; restore it, or begin a new run"
            )
        return
    from engine.store.store import RunStore, episode_id_of

    with RunStore.open(folder, readonly=True) as merged:
        statuses = merged.statuses()
    incomplete = [
        position
        for position, task in enumerate(tasks)
        if any(statuses.get(episode_id_of(task.id, sample)) != "done" for sample in range(samples))
    ]
    leases = Leases(folder / FILE, len(tasks))
    try:
        leases.restart(drivers, incomplete)
    finally:
        leases.close()


class _Crew:
    """The actors of one run."""

    def __init__(self, ray: Any, setup: Setup, fleet: Fleet, groups: int, stop: asyncio.Event) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as Near

        self._ray = ray
        self._fleet = fleet
        self._setup = setup
        self._stop = stop
        self._over = asyncio.Event()
        """Set when no group is left."""
        here = ray.get_runtime_context().get_node_id()
        self._actor = (
            ray.remote(Coordinator)
            .options(
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=0,
                scheduling_strategy=Near(here, soft=False),
                runtime_env=setup.runtime_env,
            )
            .remote(setup.folder, groups, LEASE_SECONDS, shared=setup.shards is not None)
        )
        self._status = partial(ask, self._actor, LEASE_SECONDS, "status")
        remote = ray.remote(Driver)
        self._drivers = [
            remote.options(
                num_cpus=1,
                max_restarts=-1,
                max_task_retries=0,
                max_concurrency=3,
                scheduling_strategy=Near(node, soft=True),
                runtime_env=setup.runtime_env,
            ).remote()
            for node in nodes_of(ray, setup.drivers)
        ]

    async def run(self) -> list[Done]:
        """Run all drivers to their ends.

        Raises:
            EngineError: one cannot work, and the others were stopped.
        """
        works = [asyncio.create_task(self._drive(slot), name=f"driver-{slot}") for slot in range(len(self._drivers))]
        watching = asyncio.create_task(self._watch(works), name="drivers")
        try:
            ended = await asyncio.gather(*works, return_exceptions=True)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            with contextlib.suppress(EngineError):
                self._fleet.take(await self._status(stop=True))
            for actor in (*self._drivers, self._actor):
                self._ray.kill(actor)
        for outcome in ended:
            if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
                raise outcome
        return [outcome for outcome in ended if isinstance(outcome, Done)]

    async def _drive(self, slot: int) -> Done | None:
        """Run one driver; again each time that its process dies. None: it was lost, and others have run its groups."""
        import ray.exceptions as lost

        while True:
            if not await self._present(slot):
                return None
            try:
                done: Done = await self._drivers[slot].run.remote(self._setup, slot, self._actor, LEASE_SECONDS)
                return done
            except lost.RayTaskError as error:
                raise engine_error(error) from error
            except (lost.RayActorError, lost.WorkerCrashedError) as error:
                self._fleet.died(slot, error)

    async def _present(self, slot: int) -> bool:
        """Wait until a driver has a process, which it may never get on a cluster that lost a node; False: no group is
        left for it."""
        import ray.exceptions as lost

        over = asyncio.create_task(self._over.wait(), name="drivers-over")
        warned = False
        try:
            while True:
                asked = asyncio.ensure_future(self._drivers[slot].__ray_ready__.remote())
                done, _ = await asyncio.wait({asked, over}, timeout=ABSENT, return_when=asyncio.FIRST_COMPLETED)
                if asked in done:
                    error = asked.exception()
                    if error is None or isinstance(error, lost.ActorDiedError):  # `run` says why it died
                        return True
                else:
                    asked.cancel()
                if self._over.is_set():
                    return False
                if not warned and asked not in done:
                    warned = True
                    log.warning("a driver waits for a free CPU of the cluster; others run its groups", driver=slot)
                await asyncio.sleep(POLL)
        finally:
            over.cancel()

    async def _watch(self, works: Sequence[asyncio.Task[Done | None]]) -> None:
        """Keep the state up to date; stop all drivers after a signal, an error of one of them, or a reason that stops
        the run."""
        asked: float | None = None
        loop = asyncio.get_running_loop()
        while True:
            failed = any(work.done() and _has_stopped(work) for work in works)
            stopping = failed or self._stop.is_set()
            try:
                status = await self._status(stop=stopping)
                self._fleet.take(status)
                if not status["counts"].free + status["counts"].leased:
                    self._over.set()
            except EngineError as error:
                log.error("the coordinator does not answer", reason=str(error))
            if stopping:
                asked = asked or loop.time()
                if loop.time() - asked > STOP_SECONDS:
                    for work in works:
                        work.cancel()
                    return
            await asyncio.sleep(POLL)


def _has_stopped(work: asyncio.Task[Done | None]) -> bool:
    """Whether a driver's work ended with an error, or with a reason that stops the run."""
    if work.cancelled() or work.exception() is not None:
        return True
    done = work.result()
    return done is not None and done.stopped is not None
