"""Finds the run that a command-line argument names, and opens one whose episodes are not in one store.

Plugins find and read such runs (the hooks `find_run` and `open_run`). Invariant: one is read completely or refused,
never as the empty store in its folder.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import StoreError
from engine.plugin import Hook, missing
from engine.store import database

if TYPE_CHECKING:
    from engine.store.reader import RunReader

MAX_CHARACTERS = 255
"""Maximum length of a folder's name on common file systems."""
DIVIDED = "sharded.json"
"""In the folder of a run whose episodes are in the stores of several processes."""

FIND_RUN: Hook[Callable[[str], Path | None]] = Hook("find_run")
"""Returns the folder of the run that a command-line argument names; None: the plugin does not know this name."""
OPEN_RUN: Hook[Callable[[Path], RunReader | None]] = Hook("open_run")
"""Opens the run in a folder for reading; None: its episodes are in the folder's own store."""


def list_runs(out: Path | str = "runs") -> list[Path]:
    """Return the folders of the runs under `out`, sorted by name."""
    return folders_with(database.FILE, out)


def folders_with(file: str, out: Path | str) -> list[Path]:
    """Return the folders under `out` that have a file with this name, sorted by name."""
    try:
        return sorted(entry for entry in Path(out).iterdir() if (entry / file).is_file())
    except OSError:
        return []


def named_so(word: str, folders: Sequence[Path]) -> list[Path]:
    """Return the folder with this name; if there is none, those whose names begin so."""
    beginning = [folder for folder in folders if word and folder.name.startswith(word)]
    return [folder for folder in beginning if folder.name == word] or beginning


def find_run(run: Path | str, out: Path | str = "runs") -> Path:
    """Return the folder of a run.

    Args:
        run: A run's folder or its run.db, a folder or URL of shards, a run id, the beginning of exactly one, or
            `latest`.
        out: The folder in which runs are stored.

    Raises:
        StoreError: no run matches, or several do; as the plugin does that finds it, or the one that reads URLs is not
            installed.
    """
    if (folder := next(filter(None, (find(str(run)) for find in FIND_RUN.all())), None)) is not None:
        return folder
    if "://" in str(run) and (reason := missing("sections", "rollout.shards")) is not None:
        raise StoreError(f"no run `{run}`: URLs of runs are those of shards; {reason}")
    path = Path(run)
    if path.name == database.FILE and is_file(path):
        return path.parent
    if is_file(path / database.FILE):
        return path
    runs = list_runs(out)
    if not runs:
        raise StoreError(
            f"no run `{str(run)[:MAX_CHARACTERS]}`: there are no runs in {out}; `engine run SPEC` makes one"
        )
    if str(run) == "latest":
        return max(runs, key=_created)
    meant = named_so(str(run), runs)
    if len(meant) == 1:
        return meant[0]
    if meant:
        shown = ", ".join(folder.name for folder in meant[:5]) + (", …" if len(meant) > 5 else "")
        raise StoreError(f"`{run}` is the beginning of {len(meant)} runs in {out}: {shown}; give more of it")
    if len(str(run)) > MAX_CHARACTERS:
        raise StoreError(
            f"no run `{str(run)[:40]}…` in {out}: the name has {len(str(run))} characters; give a run's folder or id"
        )
    near = get_close_matches(str(run), [*(folder.name for folder in runs), "latest"], 1, 0.4)
    hint = f"; did you mean `{near[0]}`?" if near else "; give a run's folder, its id, or `latest`"
    raise StoreError(f"no run `{run}` in {out}{hint}")


def is_file(path: Path) -> bool:
    """Return whether the path is an existing file; False for a path that the system refuses, for example one that is
    too long."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _created(folder: Path) -> tuple[bool, float]:
    """Return (whether episodes were planned, when the run was created). A run without planned episodes is not the
    latest."""
    try:
        with closing(database.connect_reader(folder / database.FILE)) as connection:
            created = float(connection.execute("SELECT created FROM run").fetchone()[0])
            return connection.execute("SELECT 1 FROM episodes LIMIT 1").fetchone() is not None, created
    except (StoreError, sqlite3.Error):  # of another version, or damaged: not usable as the latest run
        return False, float("-inf")


def is_divided(folder: Path) -> bool:
    """Whether the episodes of a run are in the stores of several processes."""
    return (folder / DIVIDED).is_file()


def open_elsewhere(folder: Path) -> RunReader | None:
    """Open a run that a plugin reads; None: its episodes are in the folder's own store.

    Raises:
        StoreError: it cannot be read, or the plugin that reads it is not installed.
    """
    reader = next(filter(None, (open_run(folder) for open_run in OPEN_RUN.all())), None)
    if reader is None and is_divided(folder):
        reason = missing("sections", "rollout.drivers") or "no plugin reads it"
        raise StoreError(f"{folder} is a run of several drivers: {reason}")
    return reader
