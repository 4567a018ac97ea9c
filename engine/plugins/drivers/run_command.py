"""A run with several drivers, from its tasks to its result, and a line for each driver."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Group

from engine.api.progress import RunPanel, duration

if TYPE_CHECKING:
    import asyncio

    from engine.api.progress import Progress
    from engine.plugins.drivers.run import Fleet
    from engine.runner.summary import RunResult
    from engine.spec.load import LoadedSpec
    from engine.spec.rows.mix import TaskList
    from engine.store.store import RunStore


class DriversPanel(RunPanel):
    """The panel of a run, with one line for each driver."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet.counters, fleet.summary)
        self._fleet = fleet

    def line(self) -> str:
        """Return the main numbers on one line, and those of each driver."""
        return " · ".join([super().line(), *driver_lines(self._fleet)])

    def __rich__(self) -> Group:
        return Group(super().__rich__(), *driver_lines(self._fleet))


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


async def drive_many(
    loaded: LoadedSpec,
    tasks: TaskList,
    store: RunStore,
    progress: Progress,
    *,
    keep_going: bool,
    stop: asyncio.Event,
) -> RunResult:
    """Run all episodes that are not done with several drivers; the arguments are those of `Processes.run`."""
    from engine.api.launch import write_counts
    from engine.plugins.drivers.rules import number_of_drivers
    from engine.plugins.drivers.run import Fleet, run_drivers
    from engine.runner.counters import RunCounters
    from engine.runner.observers import RunObservers
    from engine.runner.source import fitting_tasks
    from engine.runner.summary import RunSummary
    from engine.tokens.loading import load_format

    began = time.perf_counter()
    rollout = loaded.spec.rollout
    fitting = fitting_tasks(tasks, loaded, load_format(loaded.spec.model, loaded.base))
    kept = None
    if fitting is not tasks:
        chosen = {task.id for task in fitting}
        kept = np.asarray([at for at, task in enumerate(tasks) if task.id in chosen])
    fleet = Fleet(RunCounters(total=len(fitting) * rollout.samples_per_task), RunSummary())
    observers = RunObservers(loaded, store)

    def ready() -> None:
        progress.say(
            f"{loaded.spec.name}: {len(fitting)} tasks × {rollout.samples_per_task} samples on "
            f"{loaded.spec.backend.kind}, "
            f"{number_of_drivers(loaded.spec)} drivers asked to begin after {time.perf_counter() - began:.1f} s"
        )
        fleet.counters.began = time.perf_counter()

    async with observers.of_errors():
        work = run_drivers(loaded, fitting, kept, store, fleet, stop=stop, keep_going=keep_going, ready=ready)
        with observers.watch(fleet.counters, fleet.summary), progress.watching(DriversPanel(fleet)):
            ended = await work
    await observers.of_result(ended.result)
    write_counts(store.folder, {"drivers": ended.counts}, progress)
    result = ended.result
    store.close("interrupted" if result.summary.episodes < fleet.counters.total else "done")
    result.seconds, result.tokens = fleet.counters.seconds, fleet.counters.tokens
    result.notes = driver_lines(fleet)
    if ended.spent:
        result.notes.append(f"Cost of the run: {ended.spent:.6g}, with users, judges and unfinished episodes")
    return result
