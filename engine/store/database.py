"""The run's SQLite file: its tables, its version, and how it is opened.

Invariant: one schema version, checked before anything is read. A file of another version is refused with the
version that can read it; it is never guessed at.

WAL with `synchronous=NORMAL`: a commit survives the death of the process at any instant (`kill -9` included),
because it is in the operating system's hands by then. A power loss or a crash of the operating system may take
back the newest commits, those since the last checkpoint reached the disk; it never leaves half of one, and what
was taken back is run again by a resume.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

from engine.errors import StoreError
from engine.store import crashes
from engine.store.private import private_file

FILE = "run.db"
"""The file's name in a run's folder."""
SCHEMA_VERSION = 4
"""Written to `PRAGMA user_version`. 1 had no scores. 2 had no forks, and no word on whether an action that gave up had begun. 3 did not
count crashes. All are read as they are, and become 4 when they are opened for writing."""
OLDEST_VERSION = 1
"""The oldest version that is read."""
APPLICATION_ID = 0x45504953
"""Written to `PRAGMA application_id`: "EPIS"."""

_SCORES_SINCE = 2
_CRASHES_SINCE = 4
_PAGE = 8192
_CHECKPOINT_PAGES = 2000
_WAL_BYTES = 64 * 2**20
_CHUNKS = (64, 8, 1)

# The journal grows at its end whichever episode an entry is of: keyed by episode, every entry would dirty a page
# of its own (measured: 3 to 4 times the CPU). The unique index is narrow, and the episodes alive are neighbours.
# `delta` and `after` have no type, because SQLite takes the sign off a REAL column's -0.0.
_TABLES = """
CREATE TABLE run (
    one INTEGER PRIMARY KEY CHECK (one = 1), run_id TEXT NOT NULL, name TEXT NOT NULL, created REAL NOT NULL,
    engine_version TEXT NOT NULL, status TEXT NOT NULL, header TEXT NOT NULL);
CREATE TABLE openings (at REAL NOT NULL, pid INTEGER NOT NULL, engine_version TEXT NOT NULL, packages TEXT NOT NULL);
CREATE TABLE tasks (id TEXT PRIMARY KEY, position INTEGER NOT NULL, fields TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE episodes (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, task_id TEXT NOT NULL REFERENCES tasks (id),
    task_index INTEGER NOT NULL, sample_index INTEGER NOT NULL, seed INTEGER,
    status TEXT NOT NULL CHECK (status IN ('pending', 'running', 'done')), attempt INTEGER NOT NULL DEFAULT 0,
    state TEXT, event TEXT, "limit" TEXT, failure TEXT, blame TEXT, solved INTEGER, trainable INTEGER, reward REAL,
    turns INTEGER, tokens INTEGER, started REAL, ended REAL);
CREATE INDEX episodes_in_order ON episodes (task_index, sample_index, number);
CREATE TABLE journal (
    episode INTEGER NOT NULL REFERENCES episodes (number), attempt INTEGER NOT NULL, seq INTEGER NOT NULL,
    state TEXT NOT NULL, event TEXT NOT NULL, dest TEXT NOT NULL, kind TEXT NOT NULL, payload TEXT NOT NULL,
    tokens BLOB, at REAL NOT NULL, seconds REAL NOT NULL);
CREATE UNIQUE INDEX journal_in_order ON journal (episode, attempt, seq);
CREATE TABLE trajectories (
    episode INTEGER PRIMARY KEY REFERENCES episodes (number), attempt INTEGER NOT NULL, trajectory TEXT NOT NULL);
CREATE TABLE branches (
    episode INTEGER NOT NULL REFERENCES episodes (number), branch INTEGER NOT NULL, reason TEXT NOT NULL,
    tokens INTEGER NOT NULL, spans TEXT NOT NULL, input_ids BLOB NOT NULL, logprobs BLOB NOT NULL,
    weight_versions BLOB NOT NULL);
CREATE UNIQUE INDEX branches_in_order ON branches (episode, branch);
CREATE TABLE postings (
    episode INTEGER NOT NULL REFERENCES episodes (number), seq INTEGER NOT NULL, turn INTEGER NOT NULL,
    name TEXT NOT NULL, delta NOT NULL, after NOT NULL, at_turn INTEGER NOT NULL, op TEXT NOT NULL,
    cause TEXT NOT NULL, source TEXT NOT NULL);
CREATE UNIQUE INDEX postings_in_order ON postings (episode, seq);
CREATE TABLE images (
    digest TEXT PRIMARY KEY, mime TEXT NOT NULL, width INTEGER NOT NULL, height INTEGER NOT NULL, bytes BLOB NOT NULL);
"""

_SCORES = """
CREATE TABLE scores (
    label TEXT PRIMARY KEY, created REAL NOT NULL, engine_version TEXT NOT NULL, rewards TEXT NOT NULL,
    spec_path TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE scored (
    label TEXT NOT NULL REFERENCES scores (label), episode INTEGER NOT NULL REFERENCES episodes (number),
    score TEXT NOT NULL, PRIMARY KEY (label, episode)) WITHOUT ROWID;
"""
"""What version 2 added."""

COLUMNS = {"journal": 11, "branches": 8, "postings": 10}
"""Tables that `insert` writes to, and how many values a row has."""


def create_tables(path: Path) -> None:
    """Make an empty run file at `path`, which must not exist.

    Raises:
        StoreError: it exists, or cannot be made.
    """
    if path.exists():
        raise StoreError(f"{path} exists already; open it instead of creating it")
    try:
        connection = sqlite3.connect(private_file(path), isolation_level=None)  # its WAL gets the same mode
        try:
            connection.execute(f"PRAGMA page_size = {_PAGE}")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(
                f"BEGIN;{_TABLES}{_SCORES}{crashes.TABLE}PRAGMA application_id = {APPLICATION_ID};PRAGMA user_version = {SCHEMA_VERSION};COMMIT;"
            )
        finally:
            connection.close()
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"cannot make {path}: {error}; is its folder writable, and the disk not full?") from error


def advice(error: BaseException) -> str:
    """What to do about an error of SQLite's; empty where nothing more can be said."""
    text = str(error)
    if "full" in text or "disk I/O" in text:
        return "; make room on the disk and resume the run"
    if "malformed" in text or "no such table" in text or "no such column" in text or "not a database" in text:
        return "; the file is damaged: restore it from a copy, or begin another run"
    if "UNIQUE" in text:
        return "; the same step was written twice"
    return ""


def connect_writer(path: Path) -> sqlite3.Connection:
    """Open for writing, from any one thread. The caller holds the run's lock.

    Raises:
        StoreError: there is no run, it is of another version, or it cannot be opened.
    """
    _must_exist(path)
    try:
        connection = sqlite3.connect(path, isolation_level=None, timeout=30.0, check_same_thread=False)
        if (version := check_version(connection, path)) < SCHEMA_VERSION:
            added = (_SCORES if version < _SCORES_SINCE else "") + (crashes.TABLE if version < _CRASHES_SINCE else "")
            connection.executescript(f"BEGIN IMMEDIATE;{added}PRAGMA user_version = {SCHEMA_VERSION};COMMIT;")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
    except sqlite3.Error as error:
        raise StoreError(f"cannot open {path} for writing: {error}") from error
    return connection


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open read-only; a writer in another process is neither held up nor seen half-way.

    Raises:
        StoreError: there is no run, it is of another version, or it cannot be opened.
    """
    _must_exist(path)
    uri = f"file:{quote(str(path.absolute()))}?mode=ro"
    try:
        return _checked(uri, path)
    except sqlite3.OperationalError as error:
        # A closed run on a read-only medium has no WAL and lets none be made: nobody can write it, so it is immutable.
        barred = error.sqlite_errorname == "SQLITE_CANTOPEN" or error.sqlite_errorname.startswith("SQLITE_READONLY")
        if not barred or Path(f"{path}-wal").exists():
            raise StoreError(f"cannot read {path}: {error}") from error
    try:
        return _checked(f"{uri}&immutable=1", path)
    except sqlite3.OperationalError as error:
        raise StoreError(f"cannot read {path}: {error}") from error


def _checked(uri: str, path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30.0, check_same_thread=False)
    try:
        check_version(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _must_exist(path: Path) -> None:
    try:
        there = path.is_file()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error}") from error
    if not there:
        raise StoreError(f"{path} does not exist; give the folder of a run, or its id")


def has_scores(connection: sqlite3.Connection) -> bool:
    """Whether the file is of a version that has scores."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0]) >= _SCORES_SINCE


def check_version(connection: sqlite3.Connection, path: Path) -> int:
    """The file's version; refuse what this engine cannot read.

    Raises:
        StoreError: not a run file, or of an older or newer version.
    """
    try:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{path} is not a run: {error}") from error
    if application != APPLICATION_ID:
        raise StoreError(f"{path} is not a run: it is some other SQLite file")
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} is of store version {version}, and this engine reads versions up to {SCHEMA_VERSION}: "
            "upgrade episode-engine"
        )
    if version < OLDEST_VERSION:
        raise StoreError(
            f"{path} is of store version {version}, and this engine reads versions from {OLDEST_VERSION}: "
            "export it with the engine that wrote it"
        )
    return int(version)


@cache
def _insert(table: str, rows: int) -> str:
    one = f"({', '.join('?' * COLUMNS[table])})"
    return f"INSERT INTO {table} VALUES {', '.join([one] * rows)}"


def insert(connection: sqlite3.Connection, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows, many to a statement.

    `executemany` lets go of the interpreter lock once a row, and each time waits its turn behind a busy event
    loop, up to 5 ms; a statement of many rows does so once. Its sizes are few, so that all stay prepared.
    """
    start = 0
    while start < len(rows):
        left = len(rows) - start
        size = next(chunk for chunk in _CHUNKS if chunk <= left)
        connection.execute(_insert(table, size), _flat(rows[start : start + size]))
        start += size


def _flat(rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    return list(chain.from_iterable(rows))
