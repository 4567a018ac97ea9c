"""The run's SQLite file: its tables and its one version, checked before anything is read.

Invariant: there is one schema version, checked before anything is read. A file of another version is refused with a
message that names its version.

WAL with `synchronous=NORMAL`: a commit survives the death of the process at any instant (`kill -9` included), because
the operating system has the data by then. A power loss or a crash of the operating system may undo the newest commits
(those after the last checkpoint that reached the disk), but never half of a commit. A resume runs again what was
undone.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

from engine.errors import StoreError
from engine.store import summaries
from engine.store.ended import FILE as ENDED
from engine.store.ended import noted
from engine.store.private import private_file

FILE = "run.db"
"""The file's name in a run's folder."""
SCHEMA_VERSION = 6
"""Written to `PRAGMA user_version`. Files of other versions are refused. Version 5 renamed `Turn.anchor` to
`state_key`, `EpisodeScore.anchors` to `state_keys`, and the table `flights` to `crash_counts`. Version 6 added the
tokens of a posting's part."""
COMPACTED_VERSION = 7
"""Version of a file from which episodes were dropped: it has one more table, see `engine.store.dropped`."""
APPLICATION_ID = 0x45504953
"""Written to `PRAGMA application_id`: "EPIS"."""

_PAGE = 8192
_CHECKPOINT_PAGES = 2000
_WAL_BYTES = 64 * 2**20
MAX_ROWS = 64
"""Maximum number of rows of one statement."""

# A journal entry is always added at the end of the table. If the table were keyed by episode, each entry would dirty a
# page of
# its own (measured: 3 to 4 times the CPU). The unique index is narrow, and running episodes are next to each other in
# it.
# `delta` and `after` have no type, because SQLite stores -0.0 in a REAL column as 0.0.
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
    cause TEXT NOT NULL, source TEXT NOT NULL, start INTEGER, "end" INTEGER, "call" INTEGER);
CREATE UNIQUE INDEX postings_in_order ON postings (episode, seq);
CREATE TABLE images (
    digest TEXT PRIMARY KEY, mime TEXT NOT NULL, width INTEGER NOT NULL, height INTEGER NOT NULL, bytes BLOB NOT NULL);
CREATE TABLE scores (
    label TEXT PRIMARY KEY, created REAL NOT NULL, engine_version TEXT NOT NULL, rewards TEXT NOT NULL,
    spec_path TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE scored (
    label TEXT NOT NULL REFERENCES scores (label), episode INTEGER NOT NULL REFERENCES episodes (number),
    score TEXT NOT NULL, PRIMARY KEY (label, episode)) WITHOUT ROWID;
CREATE TABLE crash_counts (
    episode INTEGER PRIMARY KEY REFERENCES episodes (number), crashes INTEGER NOT NULL, running INTEGER NOT NULL);
"""

COLUMNS = {"journal": 11, "branches": 8, "postings": 13}
"""The tables that `insert` writes to, each with its number of values per row."""


def create_tables(path: Path) -> None:
    """Create an empty run file at `path`.

    Raises:
        StoreError: the file exists, or cannot be created.
    """
    if path.exists():
        raise StoreError(f"{path} exists already; open it instead of creating it")
    try:
        connection = sqlite3.connect(private_file(path), isolation_level=None)  # the WAL file gets the same mode
        try:
            connection.execute(f"PRAGMA page_size = {_PAGE}")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(
                f"BEGIN;{_TABLES}{summaries.TABLE};PRAGMA application_id = {APPLICATION_ID};PRAGMA user_version = "
                f"{SCHEMA_VERSION};COMMIT;"
            )
        finally:
            connection.close()
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"cannot create {path}: {error}; is its folder writable, and is the disk full?") from error


_WORDS = {
    "SQLITE_FULL": "the disk is full; free space on the disk and resume the run",
    "SQLITE_IOERR": "the disk reports an error; free space on the disk and resume the run",
    "SQLITE_CANTOPEN": "it cannot be opened; are its folder and its files readable, and is the disk full?",
    "SQLITE_READONLY": "it is read-only; make it and its folder writable",
    "SQLITE_BUSY": "another process keeps it locked; wait for that process, or stop it",
    "SQLITE_CONSTRAINT": "the same step was written twice",
}
_DAMAGED_WORDS = ("malformed", "no such table", "no such column", "not a database", "Could not decode")
_BARRED = ("SQLITE_CANTOPEN", "SQLITE_READONLY")
_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_IOERR_SHORT_READ", "SQLITE_IOERR_CORRUPTFS", "SQLITE_FORMAT")


def problem(path: Path | str, error: BaseException, doing: str = "read") -> StoreError:
    """Return an error of SQLite as one that says what is wrong with a run's file and what to do, without SQLite's
    words.

    Args:
        path: The file.
        error: The error.
        doing: What could not be done: `read` or `write`.
    """
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith(_DAMAGED) or any(words in str(error) for words in _DAMAGED_WORDS):
        count = len(noted(Path(path).parent))
        had = f", which had {count} ended episodes" if count else ""
        return StoreError(
            f"{path} is damaged: a part of the file{had} cannot be read; restore it and {Path(path).name}-wal from one "
            "copy. Without a copy `sqlite3 run.db .recover` may save a part; begin a new run"
        )
    words = next((text for prefix, text in _WORDS.items() if name.startswith(prefix)), None)
    return StoreError(f"cannot {doing} {path}: {words or error or type(error).__name__}")


def connect_writer(path: Path) -> sqlite3.Connection:
    """Open a run file for writing, from one thread at a time. The caller holds the run's lock.

    Raises:
        StoreError: there is no run, it has another version, or it cannot be opened.
    """
    _must_exist(path)
    try:
        connection = sqlite3.connect(
            path, isolation_level=None, timeout=30.0, check_same_thread=False, cached_statements=256
        )
        check_version(connection, path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
        connection.execute(summaries.TABLE)  # a run of an older engine has none
    except sqlite3.Error as error:
        raise problem(path, error, "write") from error
    return connection


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open a run file read-only. A writer in another process is not blocked, and its unfinished commits are not
    visible.

    Raises:
        StoreError: there is no run, it has another version, or it cannot be opened.
    """
    _must_exist(path)
    uri = f"file:{quote(str(path.absolute()))}?mode=ro"
    try:
        try:
            return _checked(uri, path)
        except sqlite3.OperationalError as error:
            # A closed run on a read-only file system has no WAL, and none can be created: nobody can write to it, so it
            # is immutable.
            if not error.sqlite_errorname.startswith(_BARRED) or Path(f"{path}-wal").exists():
                raise
            return _checked(f"{uri}&immutable=1", path)
    except sqlite3.Error as error:
        raise problem(path, error) from error


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


def check_version(connection: sqlite3.Connection, path: Path) -> None:
    """Check that the file is a run of this engine's store version.

    Raises:
        StoreError: it is not a run file, or it has an older or a newer version.
    """
    try:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as error:
        if (path.parent / ENDED).exists():
            raise problem(path, error) from error
        raise StoreError(
            f"{path} is not a run, or its first page is damaged: restore it from a copy, or begin a new run"
        ) from error
    if application != APPLICATION_ID:
        raise StoreError(f"{path} is not a run: it is another SQLite file")
    if version not in (SCHEMA_VERSION, COMPACTED_VERSION):
        fix = "upgrade episode-engine" if version > COMPACTED_VERSION else "use the engine that wrote it"
        raise StoreError(
            f"{path} has store version {version}, and this engine reads versions {SCHEMA_VERSION} and "
            f"{COMPACTED_VERSION}: {fix}"
        )


@cache
def _insert(table: str, rows: int) -> str:
    one = f"({', '.join('?' * COLUMNS[table])})"
    return f"INSERT INTO {table} VALUES {', '.join([one] * rows)}"


def insert(connection: sqlite3.Connection, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows, many with one statement.

    `executemany` releases the interpreter lock once per row, and each time waits up to 5 ms for a busy event loop; a
    statement with many rows does so once. The connection keeps the statements of all sizes prepared.
    """
    for start in range(0, len(rows), MAX_ROWS):
        part = rows[start : start + MAX_ROWS]
        connection.execute(_insert(table, len(part)), list(chain.from_iterable(part)))
