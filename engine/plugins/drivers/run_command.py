"""`engine run` with several drivers: the drivers' table, and the run from its tasks to its summary."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console, Group
from rich.table import Table

from engine.api.progress import RunPanel, duration

if TYPE_CHECKING:
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
        parts = [
            f"driver {slot}: {report['episodes']} episodes, {report['turns'] / report['seconds']:.1f} turns/s"
            for slot, report in dict(self._fleet.reports).items()
        ]
        return " · ".join([super().line(), *parts, *self._deaths()])

    def __rich__(self) -> Group:
        return Group(super().__rich__(), drivers_table(self._fleet), *self._deaths())

    def _deaths(self) -> list[str]:
        count = self._fleet.deaths.total()
        return [f"{count} drivers died and began again"] if count else []


def drivers_table(fleet: Fleet) -> Table:
    """One line for each driver: host, episodes in its store, running ones, turns and tokens per second, CPU time,
    deaths."""
    table = Table(
        "driver",
        "host",
        "episodes",
        "running",
        "turns/s",
        "tokens/s",
        "CPU",
        "deaths",
        title="Drivers",
        title_justify="left",
    )
    for slot, report in dict(fleet.reports).items():
        table.add_row(
            report["store"],
            report["host"],
            str(report["episodes"]),
            str(sum(report["states"].values())),
            f"{report['turns'] / report['seconds']:.1f}",
            f"{report['tokens'] / report['seconds']:.0f}",
            duration(report["cpu"]),
            str(fleet.deaths[slot]),
        )
    return table


async def drive_many(
    loaded: LoadedSpec,
    tasks: TaskList,
    store: RunStore,
    console: Console,
    *,
    quiet: bool,
    summary: bool = True,
    keep_going: bool = False,
) -> RunResult:
    """Run a prepared run to its end with several drivers; the arguments are those of `engine.cli.run.drive`."""
    from engine.api.progress import ConsoleProgress
    from engine.cli.exits import stop_on_signals
    from engine.cli.run_report import print_summary
    from engine.masking import mask_credentials
    from engine.plugins.drivers.rules import number_of_drivers
    from engine.plugins.drivers.run import Fleet, run_drivers
    from engine.runner.counters import RunCounters
    from engine.runner.observers import RunObservers
    from engine.runner.source import fitting_tasks
    from engine.runner.summary import RunSummary
    from engine.store.private import private_file
    from engine.tokens.loading import load_format

    began = time.perf_counter()
    rollout = loaded.spec.rollout
    fitting = fitting_tasks(tasks, loaded, load_format(loaded.spec.model, loaded.base))
    kept = None
    if fitting is not tasks:
        chosen = {task.id for task in fitting}
        kept = np.asarray([at for at, task in enumerate(tasks) if task.id in chosen])
    fleet = Fleet(RunCounters(total=len(fitting) * rollout.samples_per_task), RunSummary())
    stop = asyncio.Event()
    observers = RunObservers(loaded, store)

    def ready() -> None:
        console.print(
            f"{loaded.spec.name}: {len(fitting)} tasks × {rollout.samples_per_task} samples on "
            f"{loaded.spec.backend.kind}, "
            f"{number_of_drivers(loaded.spec)} drivers asked to begin after {time.perf_counter() - began:.1f} s",
        )
        fleet.counters.began = time.perf_counter()

    with stop_on_signals(stop, f"To finish it: engine run --resume {store.folder}"):
        async with observers.of_errors():
            work = run_drivers(loaded, fitting, kept, store, fleet, stop=stop, keep_going=keep_going, ready=ready)
            watching = ConsoleProgress(console, quiet=quiet).watching(DriversPanel(fleet))
            with observers.watch(fleet.counters, fleet.summary), watching:
                ended = await work
        await observers.of_result(ended.result)
    report = private_file(store.folder / "backend.json")
    report.write_text(mask_credentials(json.dumps({"drivers": ended.counts}, indent=2, default=str)) + "\n")
    store.close("interrupted" if ended.result.summary.episodes < fleet.counters.total else "done")
    if summary:
        print_summary(console, ended.result.summary, seconds=fleet.counters.seconds, tokens=fleet.counters.tokens)
        console.print(drivers_table(fleet))
    if ended.spent:
        console.print(f"Cost of the run: {ended.spent:.6g}, with users, judges and unfinished episodes")
    return ended.result
