"""The episodes of a training or a service on several drivers: its process gives each group to one of them, and gets its
trajectories.

Invariants:
- That process alone decides when a group starts (`engine.runner.groups`, `engine.plugins.serve.groups`), so its limits
  hold over all drivers.
- The trainer alone sends weights to the servers. Each episode is given out with the version that they have, and a
  driver refuses replies of a server that has older weights.
- All episodes of a group run on one driver. A driver that died begins again from its journals, and what it was given is
  given to it again.
- A trajectory goes from its driver to that process, through no other one.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import StoreError
from engine.plugins.drivers.actors import PAUSE, engine_error
from engine.plugins.drivers.cluster import cluster
from engine.plugins.drivers.run import POLL, STOP_SECONDS, Fleet
from engine.plugins.drivers.session import (
    STORES,
    Report,
    Setup,
    machine_id,
    of_driver,
    open_driver_store,
    prepare_process,
    report_of,
)
from engine.runner.counters import RunCounters
from engine.runner.failure_causes import Causes, Verdict, places
from engine.runner.summary import RunSummary
from engine.store.store import RunStore, episode_id_of

if TYPE_CHECKING:
    from engine.backends.backend import Backend, ServerWeights
    from engine.runner.runner import Runner
    from engine.schemas.environment import Task
    from engine.schemas.trajectory import Trajectory
    from engine.spec.load import LoadedSpec

START_SECONDS = 120.0
"""Longest time in which Ray must start the processes of all drivers."""
CALLS = 100_000
"""Calls that a driver takes at one time: more than it has episodes."""


class EpisodeDriver:
    """A driver that runs the episodes that it is given. Its constructor takes nothing, so that Ray can repeat it."""

    def __init__(self) -> None:
        self._runner: Runner
        self._store: RunStore
        self._backend: Backend
        self._slot: int
        self._ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._incarnation = uuid.uuid4().hex[:8]
        self._episodes: dict[str, asyncio.Task[Trajectory | None]] = {}
        self._finished: set[str] = set()

    async def run(self, setup: Setup, slot: int, machine: str, weights: ServerWeights | None) -> None:
        """Take episodes until `stop`.

        Args:
            setup: What every driver is given; its folder is that of the run, in a training of its episodes.
            slot: The number of this one.
            machine: The machine on whose disk the folder is.
            weights: What a trainer has given the servers; None: the versions are not known here.

        Raises:
            StoreError: this is another machine, or the store cannot be written.
            EngineError: the backend cannot be used.
        """
        from engine.backends.registry import open_backend
        from engine.logs import configure_logging
        from engine.runner.runner import Runner
        from engine.tokens.loading import load_format

        if machine != machine_id():
            raise StoreError(
                f"driver {slot} of this training or service must run on its machine, {machine}, and runs on "
                f"{machine_id()}"
            )
        prepare_process(setup)
        configure_logging(json=True)
        loaded = of_driver(setup.loaded, setup.drivers, slot)
        stores = Path(setup.folder) / STORES
        existing = (stores / str(slot) / "run.db").is_file()
        store = open_driver_store(stores, str(slot), setup.header, existing=existing)
        try:
            chat_format = load_format(loaded.spec.model, loaded.base)
            backend = open_backend(loaded, chat_format)
            backend.logs = store.folder / "servers"
            backend.spread(slot)
            if weights is not None:
                backend.follow(weights)
            runner = Runner(loaded, [], chat_format, backend, store, keep_going=True, training=True)
            self._runner, self._store, self._backend, self._slot = runner, store, backend, slot
            self._finished = store.finished()
            try:
                await backend.start()
                async with runner.serving():
                    self._ready.set()
                    await self._stop.wait()
                    for work in self._episodes.values():
                        work.cancel()
                    await asyncio.gather(*self._episodes.values(), return_exceptions=True)
            finally:
                await backend.close()
        finally:
            store.close()

    async def episode(self, task: Task, sample: int, attempt: int, weights: ServerWeights | None) -> bytes:
        """Run an episode, or continue it from its journal. An episode that was given twice runs once.

        Args:
            task: Its task.
            sample: Its index in the group.
            attempt: The number of its first attempt, if it is new here.
            weights: As in `run`.

        Returns:
            Its trajectory, None if the engine itself failed, and the reasons; pickled, so that the reader has arrays of
            its own.

        Raises:
            EngineError: it stops the training or the service.
        """
        await self._ready.wait()
        if weights is not None:
            self._backend.follow(weights)
        episode_id = episode_id_of(task.id, sample)
        if episode_id in self._finished:
            return pickle.dumps((self._store.trajectory(episode_id), []))
        work = self._episodes.get(episode_id)
        if work is None:
            work = asyncio.create_task(self._runner.episode(task, sample, attempt), name=episode_id)
            self._episodes[episode_id] = work
        try:
            trajectory = await asyncio.shield(work)
        except asyncio.CancelledError:
            trajectory = None  # nobody waits for it
        finally:
            if work.done():
                self._episodes.pop(episode_id, None)
        if trajectory is not None:
            self._finished.add(episode_id)
        faults = [fault for fault in self._runner.faults if fault.startswith(f"{episode_id}: ")]
        return pickle.dumps((trajectory, faults))

    async def cancel(self, episode_id: str) -> None:
        """End an episode where it is; its journal keeps what it did."""
        work = self._episodes.get(episode_id)
        if work is not None:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def follow(self, weights: ServerWeights) -> None:
        """Take in what the servers have."""
        await self._ready.wait()
        self._backend.follow(weights)

    async def render_whole(self, reason: str) -> None:
        """Render every prompt whole from now on, because another driver found a row with a wrong bridge."""
        if self._runner.guard is not None:
            self._runner.guard.render_whole(reason)

    async def report(self) -> Report:
        """Return the counts of this driver."""
        await self._ready.wait()
        return report_of(self._runner, str(self._slot), self._incarnation)

    async def stop(self) -> None:
        """End `run`."""
        self._stop.set()


class DriverRunner:
    """Runs single episodes on `rollout.drivers` drivers. Use it inside `serving`, as a `Runner`.

    Args:
        loaded: The spec.
        store: The run's store, open for writing; the drivers' stores are in its folder.
        weights: What a trainer has given the servers; None: the versions are not known here.
        keep_going: See `Runner`.

    Raises:
        StoreError: the folder cannot be read or written.
    """

    def __init__(self, loaded: LoadedSpec, store: RunStore, weights: ServerWeights | None, *, keep_going: bool) -> None:
        from engine.plugins.drivers.sharded import ShardedRun
        from engine.plugins.drivers.shards import create_shards, shards_of

        if shards_of(store.folder) is None:
            create_shards(store.folder, store.header)
        self.counters = RunCounters(total=0)
        self.faults: list[str] = []
        self.summary = RunSummary(causes=Causes(places(loaded, [])), mix=tuple(loaded.spec.tasks.mix or ()))
        self._verdict = None if keep_going else Verdict(lambda: self.counters.total)
        self._setup = Setup.of(loaded, store.header, store.folder, keep_going=keep_going)
        self._weights = weights
        self._fleet = Fleet(self.counters, RunSummary())
        self._begun = ShardedRun(store.folder).begun()
        self._homes = {episode_id.rpartition("/")[0]: store for episode_id, (store, _) in self._begun.items()}
        """Task id -> the store that has unfinished episodes of its group."""
        self._slots: dict[str, int] = {}
        """Task id -> the driver of its group."""
        self._running: Counter[int] = Counter()
        self._groups: Counter[int] = Counter()
        self._actors: list[Any] = []
        self._failed: asyncio.Future[None]
        self._closing = False

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Start the drivers, and stop them when the block ends.

        Raises:
            EngineError: no cluster, or no driver that can work.
            StoreError: too few drivers were started on this machine in time.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as Near

        with cluster(self._setup.drivers) as ray:
            self._failed = asyncio.get_running_loop().create_future()
            options: dict[str, Any] = {
                "num_cpus": 1,
                "max_restarts": -1,
                "max_task_retries": 0,
                "max_concurrency": CALLS,
                "scheduling_strategy": Near(ray.get_runtime_context().get_node_id(), soft=False),
                "runtime_env": self._setup.runtime_env,
            }
            remote = ray.remote(EpisodeDriver).options(**options)
            self._actors = [remote.remote() for _ in range(self._setup.drivers)]
            works: list[asyncio.Task[None]] = []
            try:
                calls = [asyncio.ensure_future(actor.__ray_ready__.remote()) for actor in self._actors]
                try:
                    async with asyncio.timeout(START_SECONDS):
                        await asyncio.gather(*calls)
                except TimeoutError:
                    raise StoreError(
                        f"Ray has started {sum(call.done() for call in calls)} of {len(calls)} drivers on this machine "
                        f"in {START_SECONDS:g} s; it needs one free CPU each"
                    ) from None
                for slot in range(len(self._actors)):
                    works.append(asyncio.create_task(self._drive(slot), name=f"driver-{slot}"))
                    works[-1].add_done_callback(self._note_failure)
                watching = asyncio.create_task(self._watch())
                try:
                    yield
                finally:
                    watching.cancel()
                    await asyncio.gather(watching, return_exceptions=True)
            finally:
                await self._end(works)
                for actor in self._actors:
                    ray.kill(actor)

    async def _end(self, works: list[asyncio.Task[None]]) -> None:
        self._closing = True
        for actor in self._actors:
            actor.stop.remote()
        if works:
            await asyncio.wait(works, timeout=STOP_SECONDS)
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
        if self._failed.done() and not self._failed.cancelled():
            self._failed.exception()  # it was raised where an episode was waited for, or nobody waits

    async def _drive(self, slot: int) -> None:
        """Keep a driver running; an error of it is raised where its episodes are waited for."""
        import ray.exceptions as lost

        while not self._closing:
            try:
                await self._actors[slot].run.remote(self._setup, slot, machine_id(), self._weights)
                return
            except lost.RayTaskError as error:
                raise engine_error(error) from error
            except (lost.RayActorError, lost.WorkerCrashedError) as error:
                if self._closing:
                    return
                self._fleet.died(slot, error)
                await self._begun_again(slot)

    async def _begun_again(self, slot: int) -> None:
        """Wait until Ray has started the process of a driver that died: calls before that are refused, and no deaths.

        Raises:
            StoreError: it takes too long.
        """
        import ray.exceptions as lost

        try:
            async with asyncio.timeout(START_SECONDS):
                while not self._closing:
                    await asyncio.sleep(PAUSE)
                    with contextlib.suppress(lost.ActorUnavailableError):
                        await self._actors[slot].__ray_ready__.remote()
                        return
        except TimeoutError:
            raise StoreError(f"Ray has not started driver {slot} again in {START_SECONDS:g} s") from None
        except lost.ActorDiedError:
            return  # `run` says why it died

    def _note_failure(self, work: asyncio.Task[None]) -> None:
        if not work.cancelled() and (error := work.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _watch(self) -> None:
        """Keep the counters up to date."""
        before = self.counters.before
        while True:
            calls = [asyncio.ensure_future(actor.report.remote()) for actor in self._actors]
            done, late = await asyncio.wait(calls, timeout=POLL)
            reports = {}
            for slot, call in enumerate(calls):
                if call in done and not call.cancelled() and call.exception() is None:
                    reports[slot, call.result()["incarnation"]] = call.result()
            for call in late:
                call.cancel()
            self._fleet.take({"reports": reports, "expired": 0, "cpu": 0.0})
            whole = next((report["whole"] for report in reports.values() if report["whole"] is not None), None)
            if whole is not None:
                ignorant = [slot for (slot, _), report in reports.items() if report["whole"] is None]
                calls = [self._actors[slot].render_whole.remote(whole) for slot in ignorant]
                await asyncio.gather(*calls, return_exceptions=True)
            self.counters.before = before
            await asyncio.sleep(POLL)

    async def follow(self, weights: ServerWeights) -> None:
        """Tell all drivers what the servers have. A driver that is being started again is told then."""
        import ray.exceptions as lost

        self._weights = weights
        calls = [asyncio.ensure_future(actor.follow.remote(weights)) for actor in self._actors]
        every = asyncio.gather(*calls, return_exceptions=True)
        either: set[asyncio.Future[Any]] = {every, self._failed}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not every.done():
            every.cancel()
            self._failed.result()
        for outcome in every.result():
            if isinstance(outcome, BaseException) and not isinstance(outcome, lost.RayActorError):
                raise outcome

    def _place(self, task: Task, episode_id: str) -> tuple[int, int]:
        """The driver of an episode, and the number of its first attempt there."""
        slot = self._slots.get(task.id)
        if slot is None:
            drivers = range(len(self._actors))
            home = self._homes.get(task.id, "")
            if home.isdigit() and int(home) in drivers:
                slot = int(home)
            else:
                slot = min(drivers, key=lambda driver: (self._running[driver], self._groups[driver], driver))
            self._slots[task.id] = slot
            self._groups[slot] += 1
        store, attempt = self._begun.get(episode_id, (str(slot), 0))
        return slot, attempt if store == str(slot) else attempt + 1

    async def episode(self, task: Task, sample: int, attempt: int = 0) -> Trajectory | None:
        """Run one episode on the driver of its group, as `Runner.episode`. Cancelling the call ends the episode there.

        Raises:
            EngineError: as `Runner.episode`, or a driver cannot work.
        """
        import ray.exceptions as lost

        episode_id = episode_id_of(task.id, sample)
        slot, attempt = self._place(task, episode_id)
        actor = self._actors[slot]
        self._running[slot] += 1
        try:
            while True:
                call = asyncio.ensure_future(actor.episode.remote(task, sample, attempt, self._weights))
                await asyncio.wait({call, self._failed}, return_when=asyncio.FIRST_COMPLETED)
                if not call.done():
                    self._failed.result()
                try:
                    trajectory, faults = pickle.loads(call.result())
                except lost.RayTaskError as error:
                    raise engine_error(error) from error
                except (lost.RayActorError, lost.WorkerCrashedError):
                    await asyncio.sleep(PAUSE)
                    continue
                self.faults += faults
                ended: Trajectory | None = trajectory
                return ended
        except asyncio.CancelledError:
            with contextlib.suppress(lost.RayError):
                await actor.cancel.remote(episode_id)
            raise
        finally:
            self._running[slot] -= 1

    def count(self, trajectory: Trajectory) -> None:
        """Count a finished episode of this launch.

        Raises:
            FailingError: the first episodes all failed with one cause.
        """
        cause = self.summary.add(trajectory)
        if self._verdict is not None:
            self._verdict.add(cause, trajectory.outcome.failure)
