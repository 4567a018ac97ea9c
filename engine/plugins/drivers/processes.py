"""The drivers of one spec, as the engine asks for them (`engine.runner.processes.Processes`), and a line for each."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import numpy as np

from engine.api.progress import RunPanel, duration
from engine.errors import StoreError
from engine.plugins.drivers import rules
from engine.plugins.drivers.session import of_driver
from engine.plugins.drivers.spec import DriversSpec
from engine.spec.added import spec_facts
from engine.store.find import is_divided

if TYPE_CHECKING:
    from engine.api.progress import Progress
    from engine.backends.backend import ServerWeights
    from engine.plugins.drivers.driver_runner import DriverRunner
    from engine.plugins.drivers.run import Fleet
    from engine.runner.summary import RunResult
    from engine.spec.load import LoadedSpec
    from engine.spec.rows.mix import TaskList
    from engine.spec.text.diagnostic import DataPath
    from engine.store.store import RunStore


def driver_lines(fleet: Fleet) -> list[str]:
    """One line for each driver: its store and host, episodes, running ones, turns and tokens per second, CPU time,
    deaths."""
    lines = []
    for slot, report in dict(fleet.reports).items():
        died = f", died {fleet.deaths[slot]} times" if fleet.deaths[slot] else ""
        lines.append(
            f"driver {report['store']} on {report['host']}: {report['episodes']} episodes, "
            f"{sum(report['states'].values())} running, {report['turns'] / report['seconds']:.1f} turns/s, "
            f"{report['tokens'] / report['seconds']:.0f} tokens/s, CPU {duration(report['cpu'])}{died}"
        )
    return lines


class DriverProcesses:
    """`rollout.drivers` drivers, none of them started."""

    rule: str = rules.RULE
    path: DataPath = ("rollout", "drivers")

    def __init__(self, loaded: LoadedSpec) -> None:
        self._loaded = loaded
        self._runner: DriverRunner | None = None
        self.optional = DriversSpec.of(loaded.spec).drivers == "auto"

    @property
    def alone(self) -> LoadedSpec:
        """As in `Processes`."""
        return of_driver(self._loaded, 1, 0)

    def refuse_resume(self, store: RunStore, *, retry: bool) -> None:
        """As in `Processes`. The store is closed if the resume is refused.

        Raises:
            StoreError: One process began the run, or something in the spec or the command needs one.
        """
        spec = self._loaded.spec
        try:
            if not is_divided(store.folder) and store.statuses():
                raise StoreError(
                    f"{store.folder} was begun by one process, and is continued by one: leave out `rollout.drivers`"
                )
            refused = [message for facts in spec_facts(spec) for message, _, _ in facts.one_process]
            if retry:
                refused = ["--retry-failed is not supported in a run with several drivers: leave it out"]
            if refused:
                raise StoreError(refused[0])
            rules.refuse(self._loaded, rules.problems(spec))
        except BaseException:
            store.close()
            raise

    def refuse_training(self) -> None:
        """As in `Processes`."""
        rules.refuse(self._loaded, rules.training_problems(self._loaded.spec))

    def refuse_serving(self, store: RunStore) -> None:
        """As in `Processes`.

        Raises:
            StoreError: The run is one of several drivers.
        """
        from engine.plugins.drivers.leases import FILE

        if DriversSpec.of(self._loaded.spec).shards is not None:
            message = "a service publishes no shards; its drivers run on its machine"
            fix = "remove it, or set `rollout.drivers: 1`"
            rules.refuse(self._loaded, [(message, ("rollout", "shards"), fix)])
        if (store.folder / FILE).exists():
            raise StoreError(f"{store.folder} is a run of several drivers: `engine run --resume` continues it")

    async def run(
        self,
        tasks: TaskList,
        store: RunStore,
        progress: Progress,
        *,
        keep_going: bool,
        stop: asyncio.Event,
    ) -> RunResult:
        """As in `Processes`."""
        from engine.plugins.drivers.sharded import note_status

        note_status(store.folder, "running")
        try:
            return await self._run(tasks, store, progress, keep_going=keep_going, stop=stop)
        finally:
            store.close()
            note_status(store.folder)

    async def _run(
        self, tasks: TaskList, store: RunStore, progress: Progress, *, keep_going: bool, stop: asyncio.Event
    ) -> RunResult:
        from engine.api.launch import write_counts
        from engine.plugins.drivers.run import Fleet, result_of, run_drivers
        from engine.runner.counters import RunCounters
        from engine.runner.observers import RunObservers
        from engine.runner.source import fitting_tasks
        from engine.runner.summary import RunSummary
        from engine.tokens.loading import load_format

        began = time.perf_counter()
        loaded = self._loaded
        spec, samples = loaded.spec, loaded.spec.rollout.samples_per_task
        fitting = fitting_tasks(tasks, loaded, load_format(spec.model, loaded.base))
        kept = None
        if fitting is not tasks:
            chosen = {task.id for task in fitting}
            kept = np.asarray([at for at, task in enumerate(tasks) if task.id in chosen])
        fleet = Fleet(RunCounters(total=len(fitting) * samples), RunSummary())
        observers = RunObservers(loaded, store)

        def ready() -> None:
            progress.say(
                f"{spec.name}: {len(fitting)} tasks × {samples} samples on {spec.backend.kind}, "
                f"{rules.number_of_drivers(spec)} drivers asked to begin after {time.perf_counter() - began:.1f} s"
            )
            fleet.counters.began = time.perf_counter()

        async with observers.of_errors():
            panel = RunPanel(fleet.counters, fleet.summary, lambda: driver_lines(fleet))
            with observers.watch(fleet.counters, fleet.summary), progress.watching(panel):
                ended = await run_drivers(
                    loaded, fitting, kept, store, fleet, stop=stop, keep_going=keep_going, ready=ready
                )
                folder, stopped = store.folder.absolute(), stop.is_set()
                result = await asyncio.to_thread(result_of, folder, loaded, fitting, ended, stopped=stopped)
        await observers.of_result(result)
        write_counts(store.folder, {"drivers": {done.store: done.counts for done in ended}}, progress)
        store.close("interrupted" if result.summary.episodes < fleet.counters.total else "done")
        result.seconds, result.tokens = fleet.counters.seconds, fleet.counters.tokens
        result.notes = driver_lines(fleet)
        if spent := sum(done.spent for done in ended):
            result.notes.append(f"Cost of the run: {spent:.6g}, with users, judges and unfinished episodes")
        return result

    def episodes(self, store: RunStore, weights: ServerWeights | None, *, keep_going: bool) -> DriverRunner:
        """As in `Processes`."""
        from engine.plugins.drivers.driver_runner import DriverRunner

        self._runner = DriverRunner(self._loaded, store, weights, keep_going=keep_going)
        return self._runner

    async def follow(self, weights: ServerWeights) -> None:
        """As in `Processes`."""
        if self._runner is not None:
            await self._runner.follow(weights)
