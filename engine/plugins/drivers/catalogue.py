"""The catalogue of a sharded run: one SQLite file in the cache folder that lists the episodes of all of its stores and
parts.

It has the tables of a run store, of which `tasks` and `episodes` are filled. An episode's content stays where it was
written: its number says where, `store * STORE + number there`.

Invariants:
- Stores and parts are only read. The catalogue can be removed at any time; it is then made again.
- Each episode is listed once. One that is done comes before one that is not, then the greater attempt, then a part
  before a driver's own store, then the smaller name. So the list does not depend on the order in which parts arrive.
- A part is merged in one commit, once: it never changes. A driver's own store is merged again whenever it has changed.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

import filelock

from engine.errors import StoreError
from engine.plugins.drivers.places import ShardPlace
from engine.plugins.drivers.shards import SUMMARY, Part, list_parts, read_summaries
from engine.store import codec, database
from engine.store.header import RunHeader
from engine.store.private import private_folder
from engine.store.reader import STORE
from engine.store.reading import reading
from engine.tokens.catalogue import cache_root

_TABLES = """
CREATE TABLE sources (
    source INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, part INTEGER NOT NULL, signature TEXT);
CREATE TABLE image_parts (digest TEXT PRIMARY KEY, source INTEGER NOT NULL) WITHOUT ROWID;
ALTER TABLE episodes ADD COLUMN rank INTEGER;
ALTER TABLE episodes ADD COLUMN source TEXT;
"""
_INCOMING = f"CREATE TEMP TABLE incoming AS SELECT {SUMMARY}, status, rank, source FROM main.episodes WHERE FALSE"
_RANK = "(CASE status WHEN 'done' THEN 2 WHEN 'running' THEN 1 ELSE 0 END) * 1099511627776 + attempt * 2 + {part}"
_NAMES = [name.strip() for name in SUMMARY.split(",")]
_SETS = ", ".join(f"{name} = excluded.{name}" for name in (*_NAMES, "status", "rank", "source") if name != "id")
_MERGE = (
    f"INSERT INTO main.episodes ({SUMMARY}, status, rank, source) SELECT {SUMMARY}, status, rank, source FROM "
    f"temp.incoming WHERE TRUE ON CONFLICT (id) DO UPDATE SET {_SETS} WHERE excluded.source = episodes.source OR "
    "excluded.rank > episodes.rank "
    "OR (excluded.rank = episodes.rank AND excluded.source < episodes.source)"
)
_LESS = (
    "SELECT 1 FROM main.episodes e WHERE e.source = ? AND NOT EXISTS "
    "(SELECT 1 FROM temp.incoming i WHERE i.id = e.id AND i.rank >= e.rank) LIMIT 1"
)
"""Whether a store has no longer, or not as far, an episode that is listed as its own: then another store's may be the
one to list."""
_AT_ONCE = 64
"""Parts whose summaries are in memory at a time."""


def catalogue_folder(place: str) -> Path:
    """Return the folder in the cache for what is kept of a run's folder or of a URL."""
    return cache_root() / "shards" / sha256(place.encode()).hexdigest()[:24]


class Catalogue:
    """The catalogue of one run.

    Args:
        folder: From `catalogue_folder`.
        header: The run's header.
        place: The run's shards.

    Raises:
        StoreError: it cannot be written.
    """

    def __init__(self, folder: Path, header: RunHeader, place: ShardPlace) -> None:
        self.path = folder / database.FILE
        self._header = header
        self._place = place
        self._lock = filelock.FileLock(folder / "catalogue.lock")
        try:
            private_folder(folder, exist_ok=True)
            with self._lock:
                if not self._usable():
                    self._create()
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"cannot write the list of a sharded run in {folder}: {error}; set EPISODE_ENGINE_CACHE to a folder "
                "that you can write"
            ) from error

    def _usable(self) -> bool:
        """Whether the file is the catalogue of this run."""
        try:
            with closing(database.connect_reader(self.path)) as connection:
                run = connection.execute("SELECT run_id, created FROM run").fetchone()
                connection.execute("SELECT 1 FROM sources LIMIT 1")
                return bool(run == (self._header.run_id, self._header.created))
        except (StoreError, sqlite3.Error):
            return False

    def _create(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        database.create_tables(self.path)
        header = self._header
        with closing(database.connect_writer(self.path)) as connection:
            connection.executescript(_TABLES)
            row = (1, header.run_id, header.name, header.created, header.engine_version, "done", codec.json_of(header))
            connection.execute("INSERT INTO run VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def refresh(self, own: Sequence[tuple[str, Path]]) -> None:
        """Merge what is new in the parts and in the stores that may still be written.

        Args:
            own: The stores that may still be written, by name: that of the run itself and those of its drivers.

        Raises:
            StoreError: a part or a store cannot be read, is of another run or version, or is missing.
        """
        parts = list_parts(self._place)
        with closing(database.connect_reader(self.path)) as connection, reading(self.path):
            marks = {
                name: (part, mark)
                for name, part, mark in connection.execute("SELECT name, part, signature FROM sources")
            }
        there = {part.name for part in parts}
        for name, (is_part, mark) in marks.items():
            if is_part and mark and name not in there:
                raise StoreError(
                    f"shard {name} is missing in {self._place.name}: it was there when the run was last read. Copy it "
                    f"back, or remove {self.path.parent} to read the run without it"
                )
        new = [part for part in parts if not marks.get(part.name, (True, None))[1]]
        changed = [source for source in own if marks.get(source[0], (False, None))[1] != _signature(source[1])]
        if not new and not changed:
            return
        with self._lock, closing(database.connect_writer(self.path)) as connection, reading(self.path):
            connection.execute("PRAGMA synchronous = OFF")  # it can be made again
            self._merge_parts(connection, new)
            again = False
            for name, folder in changed:
                again |= self._merge_store(connection, name, folder)
            if again:
                with _commit(connection):
                    for table in ("episodes", "image_parts"):
                        connection.execute(f"DELETE FROM {table}")
                    connection.execute("UPDATE sources SET signature = NULL")
                self._merge_parts(connection, parts)
                for name, folder in own:
                    self._merge_store(connection, name, folder)

    def _merge_parts(self, connection: sqlite3.Connection, parts: Sequence[Part]) -> None:
        merged = {
            name for (name,) in connection.execute("SELECT name FROM sources WHERE part AND signature IS NOT NULL")
        }
        left = [part for part in parts if part.name not in merged]  # another process may have merged some
        for start in range(0, len(left), _AT_ONCE):
            some = left[start : start + _AT_ONCE]
            for part, data in zip(some, self._place.read([part.mark for part in some]), strict=True):
                with _commit(connection):
                    self._merge_part(connection, part, data)

    def _merge_part(self, connection: sqlite3.Connection, part: Part, data: bytes) -> None:
        table, images = read_summaries(self._place, part, data, self._header.run_id)
        number = _number(connection, part.name, is_part=True)
        marks = ", ".join("?" * len(_NAMES))
        rank = 2 * 2**40 + 1
        for batch in table.to_batches(8192):
            columns = [batch.column(name.strip('"')).to_pylist() for name in _NAMES]
            tasks = zip(
                *(batch.column(name).to_pylist() for name in ("task_id", "task_index", "task_fields")), strict=True
            )
            connection.executemany("INSERT OR IGNORE INTO tasks VALUES (?, ?, ?)", dict.fromkeys(tasks))
            connection.executemany(
                f"INSERT INTO temp.incoming SELECT {marks}, 'done', {rank} + 2 * ?, '{part.name}'",
                zip(*columns, columns[_NAMES.index("attempt")], strict=True),
            )
        connection.execute("UPDATE temp.incoming SET number = number + ?", (number * STORE,))
        connection.execute(_MERGE)
        connection.executemany(
            "INSERT OR IGNORE INTO image_parts VALUES (?, ?)", [(digest, number) for digest in images]
        )
        connection.execute("UPDATE sources SET signature = 'merged' WHERE source = ?", (number,))

    def _merge_store(self, connection: sqlite3.Connection, name: str, folder: Path) -> bool:
        """Merge a store that may still be written; True if it has given up an episode, so that everything is merged
        again."""
        path = folder / database.FILE
        signature = _signature(folder)  # before it is read: what changes meanwhile is seen the next time
        with closing(database.connect_reader(path)) as other, reading(path):
            run = other.execute("SELECT run_id, name FROM run").fetchone()
        if run[0] != self._header.run_id:
            raise StoreError(
                f"{path} is a store of run {run[0]} (spec `{run[1]}`), in the folder of run {self._header.run_id}; "
                "move it elsewhere"
            )
        connection.execute("ATTACH ? AS own", (f"file:{quote(str(path.absolute()))}?mode=ro",))
        try:
            with _commit(connection):
                number = _number(connection, name, is_part=False)
                connection.execute("INSERT OR IGNORE INTO main.tasks SELECT * FROM own.tasks")
                connection.execute(
                    f"INSERT INTO temp.incoming SELECT {SUMMARY}, status, {_RANK.format(part=0)}, ? FROM own.episodes",
                    (name,),
                )
                connection.execute("UPDATE temp.incoming SET number = number + ?", (number * STORE,))
                connection.execute("CREATE INDEX temp.incoming_ids ON incoming (id)")
                if connection.execute(_LESS, (name,)).fetchone() is not None:
                    return True
                connection.execute(_MERGE)
                connection.execute("UPDATE sources SET signature = ? WHERE source = ?", (signature, number))
                return False
        finally:
            connection.execute("DETACH own")

    def sources(self) -> dict[int, tuple[str, bool]]:
        """Return (name, whether it is a part) of each store, by its number."""
        with closing(database.connect_reader(self.path)) as connection, reading(self.path):
            rows = connection.execute("SELECT source, name, part FROM sources").fetchall()
        return {source: (name, bool(part)) for source, name, part in rows}


def _number(connection: sqlite3.Connection, name: str, *, is_part: bool) -> int:
    connection.execute("INSERT OR IGNORE INTO sources (name, part) VALUES (?, ?)", (name, is_part))
    return int(connection.execute("SELECT source FROM sources WHERE name = ?", (name,)).fetchone()[0])


@contextmanager
def _commit(connection: sqlite3.Connection) -> Iterator[None]:
    """One transaction, with an empty table `incoming`."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("DROP TABLE IF EXISTS temp.incoming")
        connection.execute(_INCOMING)
        yield


def _signature(folder: Path) -> str:
    """Sizes and times of a store's files, and while these are too new to tell a change, nothing that could be equal."""
    sizes = []
    for name in (database.FILE, f"{database.FILE}-wal"):
        try:
            stat = (folder / name).stat()
            sizes += [stat.st_size, stat.st_mtime_ns]
        except OSError:
            sizes += [0, 0]
    now = time.time_ns()
    new = now - max(sizes[1::2]) < 2_000_000_000
    return f"{sizes}{now if new else ''}"
