"""The index of a view: summaries of episodes in an SQLite file of the cache folder, filled from the run stores.

The run stores hold a few columns per episode. Filters and lists need more (rewards by name, weight versions, facts),
which costs a read of the whole episode. The index keeps it, so each finished episode is read once.

Invariants:
- Run stores are only read. The index can be removed at any time; it is then made again.
- A summary belongs to one attempt of one episode of one run. `refresh` makes it again if the store has another one.
- Rows of another version, of a store that was replaced, or of a store that is gone are removed when the index is opened
  or refreshed.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from engine.errors import StoreError
from engine.plugins.show.listing.heads import read_head
from engine.plugins.show.listing.sources import Source
from engine.plugins.show.listing.training import sampled_tasks
from engine.store import codec
from engine.store.dropped import dropped_among
from engine.store.episode_filter import END_VALUES
from engine.store.private import private_file, private_folder
from engine.store.reader import STORE, RunReader
from engine.store.reading import reading
from engine.store.training import BATCHES
from engine.tokens.catalogue import cache_root

log = structlog.get_logger(__name__)

VERSION = 1
"""Part of the file's name; another layout of the tables has another file."""
WHOLE, DAMAGED = 1, 2
"""Values of the column `detailed` of an episode that was read; 0 before."""
CHUNK = 256
"""Episodes that are read from a store and written in one commit."""
_SETTLED = 2_000_000_000
"""Age in ns of the newest write after which equal file times mean equal content: times of files have a resolution."""
_LAST = 2**63 - 1
_PAGE = "SELECT number, status, attempt, started, ended FROM episodes WHERE number > ? ORDER BY number LIMIT 4096"
"""Episodes of a store that are compared with the index, and written, in one commit: memory does not grow with the
run."""
_STORED = (
    'id, task_id, task_index, sample_index, seed, status, attempt, state, event, "limit", failure, blame, solved, '
    "trainable, reward, turns, tokens, started, ended"
)
_DETAILS = (
    "message, failed_state, failed_turn, solved_turn, rewards, user_turns, tool_calls, tool_errors, context, trained, "
    "total, branches, images, oldest_version, version, cost"
)
VARIABLES = tuple(END_VALUES)
"""Variables of filters whose values the index has."""
_TABLES = f"""
CREATE TABLE IF NOT EXISTS sources (
    source INTEGER PRIMARY KEY, folder TEXT NOT NULL UNIQUE, run_id TEXT NOT NULL, created REAL NOT NULL, batches TEXT);
CREATE TABLE IF NOT EXISTS episodes (
    source INTEGER NOT NULL, number INTEGER NOT NULL, {_STORED}, detailed INTEGER NOT NULL DEFAULT 0, step INTEGER,
    {_DETAILS}, PRIMARY KEY (source, number)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS episodes_in_order ON episodes (source, task_index, sample_index, number);
CREATE INDEX IF NOT EXISTS episodes_of_task ON episodes (source, task_id);
CREATE INDEX IF NOT EXISTS episodes_not_read ON episodes (source, number) WHERE status = 'done' AND NOT detailed;
CREATE TABLE IF NOT EXISTS variables (
    source INTEGER NOT NULL, number INTEGER NOT NULL, {", ".join(f'"{name}" TEXT' for name in VARIABLES)},
    PRIMARY KEY (source, number));
"""


class Index:
    """Summaries of the episodes of any number of stores. One object may be used by one thread at a time.

    Args:
        file: The SQLite file; None: the index is in memory and lost when it is closed.
    """

    def __init__(self, file: Path | None) -> None:
        self.connection = _open(file)
        self._signatures: dict[int, tuple[int, ...]] = {}
        with self._writing():
            for number, folder in self.connection.execute("SELECT source, folder FROM sources").fetchall():
                if not Path(folder).is_dir():
                    self._forget(number)

    @classmethod
    def cached(cls) -> Index:
        """Open the index in the cache folder; in memory if that cannot be written."""
        file = cache_root() / "view" / f"episodes-{VERSION}.db"
        try:
            private_folder(file.parent, exist_ok=True)
            private_file(file)
            return cls(file)
        except (OSError, sqlite3.Error) as error:
            log.info("the index of episodes is kept in memory", file=str(file), reason=str(error))
            return cls(None)

    def close(self) -> None:
        """Close the file."""
        self.connection.close()

    # --- filling ---

    def add(self, source: Source, store: RunReader) -> int:
        """Return the number of a store in the index; remove what the index has of another store in the same folder."""
        identity = (store.run_id, store.header.created)
        with self._writing():
            query = "SELECT source, run_id, created FROM sources WHERE folder = ?"
            for number, *stored in self.connection.execute(query, (source.folder,)).fetchall():
                if tuple(stored) == identity:
                    return int(number)
                self._forget(number)
            query = "INSERT INTO sources (folder, run_id, created) VALUES (?, ?, ?) RETURNING source"
            return int(self.connection.execute(query, (source.folder, *identity)).fetchone()[0])

    def refresh(self, number: int, source: Source, store: RunReader) -> bool:
        """Bring the stored columns up to date with the store, without details. Returns whether anything changed.

        Raises:
            StoreError: the store cannot be read.
        """
        store.refresh()
        signature = _signature(store)
        if signature is not None and self._signatures.get(number) == signature:
            return False
        changed = running = False
        last = 0
        with store.snapshot() as connection:
            while page := connection.execute(_PAGE, (last,)).fetchall():
                changed |= self._merge(number, connection, page, last)
                running |= any(row[1] == "running" for row in page)
                last = page[-1][0]
        live = _live(store) if running else []
        with self._writing():
            changed |= self._remove(number, last, _LAST)
            self.connection.executemany(
                f"UPDATE episodes SET turns = ?, tokens = ?, state = ? WHERE source = {number} AND number = ? AND "
                "status = 'running'",
                live,
            )
            changed_steps = self._steps(number, source, all_rows=changed)
        if signature is not None:
            self._signatures[number] = signature
        return changed or bool(live) or changed_steps

    def _merge(self, number: int, connection: sqlite3.Connection, page: list[tuple[Any, ...]], after: int) -> bool:
        """Write what differs in one page of a store's episodes, those with numbers greater than `after`. Returns
        whether anything did.

        An episode that the store does not list any more is removed: of a sharded run, another driver's attempt is
        listed now.
        """
        first, last = after + 1, page[-1][0]
        query = (
            "SELECT number, status, attempt, started, ended FROM episodes WHERE source = ? AND number BETWEEN ? AND ?"
        )
        had = {row[0]: row[1:] for row in self.connection.execute(query, (number, first, last))}
        changed = {row[0] for row in page if had.get(row[0]) != row[1:]}
        gone = had.keys() - {row[0] for row in page}
        if not changed and not gone:
            return False
        rows = connection.execute(f"SELECT number, {_STORED} FROM episodes WHERE number BETWEEN ? AND ?", (first, last))
        marks = ", ".join("?" * (2 + _STORED.count(",") + 1))
        with self._writing():
            for episode in gone:
                self._remove(number, episode - 1, episode)
            self.connection.executemany(
                f"INSERT OR REPLACE INTO episodes (source, number, {_STORED}) VALUES ({marks})",
                ((number, *row) for row in rows if row[0] in changed),
            )
        return True

    def _remove(self, number: int, after: int, last: int) -> bool:
        """Remove the episodes of a source whose numbers are greater than `after`, up to `last`. Returns whether there
        were any."""
        removed = 0
        for table in ("episodes", "variables"):
            query = f"DELETE FROM {table} WHERE source = ? AND number > ? AND number <= ?"
            removed += self.connection.execute(query, (number, after, last)).rowcount
        return removed > 0

    def _steps(self, number: int, source: Source, *, all_rows: bool) -> bool:
        """Write to each episode the step of the training that used it, from `batches.jsonl`."""
        if source.training is None:
            return False
        if source.step is not None:
            self.connection.execute("UPDATE episodes SET step = ? WHERE source = ?", (source.step, number))
            return False
        file = Path(source.training) / BATCHES
        try:
            status = file.stat()
            state = f"{status.st_size} {status.st_mtime_ns}"
        except OSError:
            return False
        before = self.connection.execute("SELECT batches FROM sources WHERE source = ?", (number,)).fetchone()[0]
        if before == state and not all_rows:
            return False
        self.connection.executemany(
            f"UPDATE episodes SET step = ? WHERE source = {number} AND task_id = ?",
            [(step, task) for step, tasks in sampled_tasks(file) for task in tasks],
        )
        self.connection.execute("UPDATE sources SET batches = ? WHERE source = ?", (state, number))
        return True

    def missing(self, sources: Sequence[int], limit: int = -1) -> dict[int, list[int]]:
        """Return the numbers of the finished episodes without details, by source: at most `limit`; negative: all."""
        numbers: dict[int, list[int]] = {}
        marks = ", ".join("?" * len(sources))
        query = (
            f"SELECT source, number FROM episodes INDEXED BY episodes_not_read WHERE source IN ({marks}) AND status = "
            "'done' AND NOT detailed LIMIT ?"
        )
        for source, episode in self.connection.execute(query, (*sources, limit)):
            numbers.setdefault(source, []).append(episode)
        return numbers

    def missing_of(self, source: int, episodes: Sequence[int]) -> list[int]:
        """Return those of these episodes that are finished and without details."""
        listed = ", ".join(map(str, episodes))
        query = (
            f"SELECT number FROM episodes WHERE source = ? AND number IN ({listed}) AND status = 'done' AND NOT "
            "detailed"
        )
        return [row[0] for row in self.connection.execute(query, (source,))]

    def detail(self, number: int, store: RunReader, episodes: Sequence[int]) -> None:
        """Write the details of finished episodes, `CHUNK` at a time, each part in one commit.

        A damaged episode gets the problem as its message, and no variables.

        Raises:
            StoreError: the store cannot be read.
        """
        for start in range(0, len(episodes), CHUNK):
            part = episodes[start : start + CHUNK]
            details, variables = _read(store, part)
            names = [name.strip() for name in _DETAILS.split(",")]
            sets = ", ".join(f"{name} = ?" for name in names)
            with self._writing():
                self.connection.executemany(
                    f"UPDATE episodes SET {sets}, detailed = ? WHERE source = {number} AND number = ? AND attempt = ?",
                    details,
                )
                marks = ", ".join("?" * (2 + len(VARIABLES)))
                self.connection.executemany(
                    f"INSERT OR REPLACE INTO variables VALUES ({marks})", [(number, *row) for row in variables]
                )

    def _forget(self, number: int) -> None:
        for table in ("episodes", "variables", "sources"):
            self.connection.execute(f"DELETE FROM {table} WHERE source = ?", (number,))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")


def _open(file: Path | None) -> sqlite3.Connection:
    """Open the index and make its tables; a damaged file is removed and made again."""
    for last in (False, True):
        connection = sqlite3.connect(
            ":memory:" if file is None else file, isolation_level=None, timeout=30.0, check_same_thread=False
        )
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.executescript(_TABLES)
            return connection
        except sqlite3.DatabaseError as error:
            connection.close()
            if file is None or last or isinstance(error, sqlite3.OperationalError):
                raise
            for suffix in ("", "-wal", "-shm"):
                Path(f"{file}{suffix}").unlink(missing_ok=True)
            private_file(file)
    raise AssertionError


def _signature(store: RunReader) -> tuple[int, ...] | None:
    """Sizes and times of the files that `refresh` reads; None while they may change without a change of these."""
    sizes: list[int] = []
    times: list[int] = []
    for file in (store.path, Path(f"{store.path}-wal"), store.folder.parent / BATCHES):
        with suppress(OSError):
            status = file.stat()
            sizes.append(status.st_size)
            times.append(status.st_mtime_ns)
    return (*sizes, *times) if time.time_ns() - max(times, default=0) > _SETTLED else None


def _live(store: RunReader) -> list[tuple[Any, ...]]:
    """(turns, sampled tokens, state, number) of each episode that was begun and is not done."""
    query = (
        "SELECT coalesce(sum(j.kind = 'generation'), 0), coalesce(sum(length(j.tokens)) / 8, 0), "
        "(SELECT dest FROM journal l WHERE l.episode = e.number AND l.attempt = e.attempt ORDER BY seq DESC LIMIT 1), "
        "e.number FROM episodes e LEFT JOIN journal j ON j.episode = e.number AND j.attempt = e.attempt "
        "WHERE e.status = 'running' GROUP BY e.number"
    )
    rows: list[tuple[Any, ...]] = []
    for connection, base in store.live():
        with reading(connection):
            rows += [(*row[:3], base + row[3]) for row in connection.execute(query)]
    return rows


def _read(store: RunReader, episodes: Sequence[int]) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Read episodes: the rows of `_DETAILS` with number and attempt, and the rows of table `variables`."""
    texts: list[tuple[int, int, str]] = []
    branches: dict[int, list[tuple[int, bytes]]] = {}
    problems: dict[tuple[int, int], str] = {}
    for connection, base in store.contents(episodes):
        numbers = tuple(number - base for number in episodes if 0 < number - base < STORE)
        marks = ", ".join("?" * len(numbers))
        with reading(connection):
            query = (
                f"SELECT number, attempt FROM episodes e WHERE number IN ({marks}) AND status = 'done' "
                "AND NOT EXISTS (SELECT 1 FROM trajectories t WHERE t.episode = e.number)"
            )
            for number, attempt in connection.execute(query, numbers):
                problems[base + number, attempt] = "its trajectory is missing, so the file is damaged"
            for number, attempt in dropped_among(connection, numbers):
                problems[base + number, attempt] = "its content was dropped to save space"
            query = f"SELECT episode, attempt, trajectory FROM trajectories WHERE episode IN ({marks})"
            texts += [(base + number, *rest) for number, *rest in connection.execute(query, numbers)]
            query = f"SELECT episode, tokens, weight_versions FROM branches WHERE episode IN ({marks})"
            for number, tokens, versions in connection.execute(query, numbers):
                branches.setdefault(base + number, []).append((tokens, versions))
    details: list[tuple[Any, ...]] = []
    variables: list[tuple[Any, ...]] = []
    for episode, attempt, text in texts:
        try:
            with codec.damaged("the episode"):
                head = read_head(text)
                details.append((*_details(head, branches.get(episode, [])), WHOLE, episode, attempt))
                variables.append((episode, *(codec.json_of(of(head)) for of in END_VALUES.values())))
        except StoreError as error:
            problems[episode, attempt] = str(error)
    unknown = [None] * _DETAILS.count(",")
    details += [(problem, *unknown, DAMAGED, *key) for key, problem in problems.items()]
    return details, variables


def _details(head: Any, branches: Iterable[tuple[int, bytes]]) -> tuple[Any, ...]:
    total, count = 0, 0
    sampled = np.zeros(0, np.int32)
    for tokens, blob in branches:
        versions = np.frombuffer(blob, "<i4")
        sampled = np.concatenate([sampled, versions[versions >= 0]])
        count += 1
        total += tokens
    outcome = head.outcome
    failure = outcome.failure
    return (
        failure.message if failure else None,
        failure.state if failure else None,
        failure.turn if failure else None,
        outcome.solved_turn,
        codec.json_of(outcome.rewards),
        head.counts.get("user_turns", 0),
        head.counts.get("tool_calls", 0),
        head.counts.get("tool_errors", 0),
        head.counts.get("context_tokens", 0),
        len(sampled),
        total,
        count,
        sum(len(message.images) for message in head.messages if not isinstance(message.content, str)),
        int(sampled.min()) if len(sampled) else None,
        int(sampled.max()) if len(sampled) else None,
        sum(turn.cost for turn in head.turns),
    )
