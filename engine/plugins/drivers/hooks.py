"""What the engine asks of this plugin: which runs its files are, and who runs the episodes of a spec."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.store.find import is_divided

if TYPE_CHECKING:
    from engine.runner.processes import Processes
    from engine.spec.load import LoadedSpec
    from engine.store.reader import RunReader


def find_run(run: str) -> Path | None:
    """The hook `find_run`: a folder that stands for the shards at a URL, or in a folder without the run's store."""
    from engine.plugins.drivers.places import is_url
    from engine.plugins.drivers.sharded import stand_in
    from engine.plugins.drivers.shards import RUN
    from engine.store import database
    from engine.store.find import is_file

    if is_url(run):
        return stand_in(run.rstrip("/"))
    path = Path(run)
    if is_file(path / RUN) and not is_file(path / database.FILE):
        return stand_in(str(path.absolute()))
    return None


def open_run(folder: Path) -> RunReader | None:
    """The hook `open_run`."""
    if not is_divided(folder):
        return None
    from engine.plugins.drivers.sharded import ShardedRun

    return ShardedRun(folder)


def drive(loaded: LoadedSpec, folder: Path | None) -> Processes | None:
    """The hook `drive`."""
    from engine.plugins.drivers.processes import DriverProcesses
    from engine.plugins.drivers.rules import number_of_drivers
    from engine.plugins.drivers.spec import DriversSpec
    from engine.store.store import RunStore

    if folder is None or not is_divided(folder):
        if number_of_drivers(loaded.spec) == 1:
            return None
        if folder is not None and DriversSpec.of(loaded.spec).drivers == "auto":
            with RunStore.open(folder, readonly=True) as store, store.snapshot() as connection:
                if connection.execute("SELECT 1 FROM episodes LIMIT 1").fetchone() is not None:
                    return None  # one process began it, and continues it
    return DriverProcesses(loaded)
