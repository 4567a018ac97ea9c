"""The list of ended episodes beside a run's file, by which a file that has lost some of them is noticed.

SQLite reads a write-ahead log up to its first damaged frame, and a missing one as an empty one: a run whose WAL was
cut, damaged or not copied opens without an error, with fewer episodes. So the end of an episode is noted here too,
after its commit.

Invariant: what is noted was committed. A process that is killed between the commit and the note leaves out the last
ones.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path

import msgspec
import orjson
import structlog

from engine.errors import StoreError
from engine.store.private import private_file

log = structlog.get_logger(__name__)

FILE = "run.ended"
"""In a run's folder: one line of JSON, `[id, attempt]`, for each attempt of an episode that ended."""
_SHOWN = 5
"""Number of lost episodes that a message names."""
_ID = 80
"""Number of characters of an id that it shows."""
_reported: set[tuple[Path, int]] = set()
"""The losses that this process has logged."""


class Ended(msgspec.Struct, frozen=True):
    """The end of one attempt of an episode."""

    episode: str
    attempt: int


class EndedList:
    """Writes the list. The caller holds the run's lock.

    Raises:
        StoreError: the file cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._file = private_file(folder / FILE).open("r+b", buffering=0)
            if self._file.seek(0, os.SEEK_END):
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":  # a disk that was full
                    self._file.write(b"\n")
        except OSError as error:
            raise StoreError(f"cannot write {folder / FILE}: {error}; free space on the disk") from error
        self._failed = False

    def add(self, ended: Iterable[Ended]) -> None:
        """Note episodes whose end is committed. A failed write is logged, once."""
        try:
            self._file.write(b"".join(orjson.dumps([end.episode, end.attempt]) + b"\n" for end in ended))
        except OSError as error:
            if not self._failed:
                log.warning("ended episodes are not noted, so a loss of them would not be seen", reason=str(error))
            self._failed = True

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def noted(folder: Path) -> dict[str, int]:
    """Return the newest attempt that ended of each noted episode, by its id."""
    return _parsed(_read(folder).splitlines())


def _read(folder: Path) -> bytes:
    try:
        return (folder / FILE).read_bytes()
    except OSError:  # a run of an older engine, or a copy without it: nothing is known
        return b""


def _parsed(lines: Sequence[bytes]) -> dict[str, int]:
    """As `noted`. Lines that are damaged are left out."""
    try:  # in one call
        ends = [(str(episode), int(attempt)) for episode, attempt in orjson.loads(b"[" + b",".join(lines) + b"]")]
    except (ValueError, TypeError):
        if len(lines) <= 1:
            return {}
        half = len(lines) // 2
        first, second = _parsed(lines[:half]), _parsed(lines[half:])
        return first | {episode: max(attempt, first.get(episode, 0)) for episode, attempt in second.items()}
    return dict(sorted(ends, key=itemgetter(1)))


def report_lost(folders: Sequence[Path], path: Path, connection: sqlite3.Connection) -> None:
    """Log the episodes that ended and are not among those of a run's file; each loss once in a process.

    Args:
        folders: The folders whose lists belong to the run: its own, and of a sharded run those of its drivers.
        path: The run's file, for the message.
        connection: A connection to a table `episodes` with all episodes of the run.
    """
    lists = [_read(folder) for folder in folders]
    # the usual case, without reading each line: the last ones are stored, and as many are done
    done = connection.execute("SELECT count(*) FROM episodes WHERE status = 'done'").fetchone()[0]
    last = [_parsed([text[text.rfind(b"\n", 0, -1) + 1 :]]) for text in lists]
    if sum(text.count(b"\n") for text in lists) <= done and not any(_lost(ends, connection) for ends in last):
        return
    ended = _parsed([line for text in lists for line in text.splitlines()])
    lost = _lost(ended, connection)
    if lost and (path, len(lost)) not in _reported:
        _reported.add((path, len(lost)))
        ids = ", ".join(episode if len(episode) <= _ID else f"{episode[:_ID]}…" for episode in lost[:_SHOWN])
        more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        log.warning(
            f"{path} is damaged: {len(lost)} of {len(ended)} ended episodes are lost ({ids}{more}), because a file or "
            "its write-ahead log (run.db, run.db-wal) is missing, cut or damaged; restore both from one copy, or "
            "resume: those that are still needed "
            "run again"
        )


def _lost(ended: Mapping[str, int], connection: sqlite3.Connection) -> list[str]:
    """Return the ids of the ended episodes whose end, or a later attempt, is not stored."""
    query = "SELECT 1 FROM episodes WHERE id = ? AND (attempt > ? OR (attempt = ? AND status = 'done'))"
    return [
        episode
        for episode, attempt in ended.items()
        if connection.execute(query, (episode, attempt, attempt)).fetchone() is None
    ]
