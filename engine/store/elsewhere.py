"""Runs whose episodes are not in one store: plugins find and read them (the hooks `find_run` and `open_run`).

Invariant: such a run is read completely or refused, never as the empty store in its folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import StoreError
from engine.plugin import Hook, missing

if TYPE_CHECKING:
    from engine.store.reader import RunReader

DIVIDED = "sharded.json"
"""In the folder of a run whose episodes are in the stores of several processes."""

FIND_RUN: Hook[Callable[[str], Path | None]] = Hook("find_run")
"""Returns the folder of the run that a command-line argument names; None: the plugin does not know this name."""
OPEN_RUN: Hook[Callable[[Path], RunReader | None]] = Hook("open_run")
"""Opens the run in a folder for reading; None: its episodes are in the folder's own store."""


def is_divided(folder: Path) -> bool:
    """Whether the episodes of a run are in the stores of several processes."""
    return (folder / DIVIDED).is_file()


def find_elsewhere(run: str) -> Path | None:
    """The folder of a run that a plugin finds.

    Raises:
        StoreError: as the plugin does, or the plugin that reads URLs is not installed.
    """
    folders = (find(run) for find in FIND_RUN.all())
    folder = next((folder for folder in folders if folder is not None), None)
    if folder is None and "://" in run and (reason := missing("sections", "rollout.shards")) is not None:
        raise StoreError(f"no run `{run}`: URLs of runs are those of shards; {reason}")
    return folder


def open_elsewhere(folder: Path) -> RunReader | None:
    """Open a run that a plugin reads; None: its episodes are in the folder's own store.

    Raises:
        StoreError: it cannot be read, or the plugin that reads it is not installed.
    """
    opened = (open_run(folder) for open_run in OPEN_RUN.all())
    reader = next((reader for reader in opened if reader is not None), None)
    if reader is None and is_divided(folder):
        reason = missing("sections", "rollout.drivers") or "no plugin reads it"
        raise StoreError(f"{folder} is a run of several drivers: {reason}")
    return reader
