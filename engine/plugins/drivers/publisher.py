"""Publishes the finished groups of one driver as parts, whose layout `engine.plugins.drivers.shards` has."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from engine.errors import StoreError
from engine.plugins.drivers.places import ShardPlace
from engine.plugins.drivers.shards import META, SUMMARY, TOOLS, VERSION, Part, list_parts
from engine.store import codec, database
from engine.store.dropped import has_table, mentioned_images
from engine.store.json_lines import JsonLines
from engine.store.reader import RunReader
from engine.store.reading import own_header, reading
from engine.store.rows.build import RowBuilder
from engine.store.rows.export import export_rows
from engine.store.rows.row import columns_of
from engine.store.tool_schemas import ToolSchemas

if TYPE_CHECKING:
    from typing import Any

    from engine.store.rows.columns import Columns

_PUBLISHED = "published.jsonl"
_COPIED = ("journal", "trajectories", "branches", "postings", "summaries")


class Publisher:
    """Publishes the finished groups of one driver's store. One thread at a time; the driver may write its store
    meanwhile.

    Args:
        store: The folder of the driver's store.
        place: From `create_shards` or `shards_of`.
        driver: Its name: small letters and digits. A driver that begins with an empty store takes a name that no other
            has had.

    Raises:
        StoreError: the store or the place cannot be read.
    """

    def __init__(self, store: Path, place: str, driver: str) -> None:
        if not re.fullmatch("[a-z0-9]+", driver):
            raise StoreError(f"driver name `{driver}`: use small letters and digits")
        self._store = RunReader(store, own_header(store))
        self._place = ShardPlace(place)
        self._driver = driver
        self._log = JsonLines(store / _PUBLISHED, _noted)
        self._done = set(chain.from_iterable(self._log.read()))
        self._next = sum(part.driver == driver for part in list_parts(self._place))

    def ready(self) -> list[str]:
        """Return the tasks of which every episode in the store is done and one is not published, in order."""
        finished: dict[str, bool] = {}
        blocked: set[str] = set()
        with self._store.snapshot() as connection:
            dropped = "AND number NOT IN (SELECT episode FROM dropped)" if has_table(connection) else ""
            query = (
                f"SELECT task_id, id, attempt, status FROM episodes WHERE TRUE {dropped} ORDER BY task_index, "
                "sample_index"
            )
            for task, episode, attempt, status in connection.execute(query):
                if status != "done":
                    blocked.add(task)
                elif (episode, attempt) not in self._done:
                    finished[task] = True
        return [task for task in finished if task not in blocked]

    def publish(self, tasks: Sequence[str]) -> str | None:
        """Publish the finished episodes of tasks as one part, and return its name; None if there is nothing new.

        Raises:
            StoreError: it cannot be written; nothing or all of it is visible, and the next call continues.
        """
        from engine.store.rows.export import write_parquet

        with tempfile.TemporaryDirectory(prefix="episode-engine-") as draft:
            folder = Path(draft)
            copied = _copy(self._store, folder, tasks, self._done)
            if not copied:
                return None
            part = Part(driver=self._driver, number=self._next)
            copy = RunReader(folder, self._store.header)
            rows = folder / "rows.parquet"
            write_parquet(_rows(copy), rows, {"run_id": copy.run_id})
            marks = folder / "episodes.parquet"
            _write_summaries(copy, marks, part)
            self._place.put(folder / database.FILE, f"{part.name}.db")
            self._place.put(rows, f"{part.name}.parquet")
            self._place.put(marks, part.mark)
        self._next += 1
        self._done.update(copied)
        self._log.append({"part": part.name, "episodes": copied})
        return part.name


def _noted(line: dict[str, Any]) -> list[tuple[str, int]]:
    """What an earlier process published: (episode, attempt)."""
    return [(episode, attempt) for episode, attempt in line["episodes"]]


def _copy(store: RunReader, folder: Path, tasks: Sequence[str], without: set[tuple[str, int]]) -> list[tuple[str, int]]:
    """Copy the finished episodes of tasks into a new store, with what they need; return (id, attempt) of each.

    A task that has anything new is copied as a whole, so that the advantages of its rows are those of the group.
    """
    file = folder / database.FILE
    database.create_tables(file)
    with closing(database.connect_writer(file)) as connection, reading(file):
        connection.execute("PRAGMA synchronous = OFF")  # a draft: `ShardPlace.put` makes it durable
        connection.execute("ATTACH ? AS driver", (f"file:{quote(str(store.path.absolute()))}?mode=ro",))
        connection.execute("BEGIN")
        dropped = ""
        if connection.execute("PRAGMA driver.user_version").fetchone()[0] == database.COMPACTED_VERSION:
            dropped = "AND number NOT IN (SELECT episode FROM driver.dropped)"
        query = f"SELECT id, attempt FROM driver.episodes WHERE task_id = ? AND status = 'done' {dropped}"
        episodes: list[tuple[str, int]] = []
        for task in dict.fromkeys(tasks):
            group = connection.execute(query, (task,)).fetchall()
            if any(episode not in without for episode in group):
                episodes += group
                connection.execute("INSERT INTO main.tasks SELECT * FROM driver.tasks WHERE id = ?", (task,))
                connection.execute(
                    "INSERT INTO main.episodes SELECT * FROM driver.episodes WHERE task_id = ? AND status = 'done' "
                    f"{dropped}",
                    (task,),
                )
        for table in _COPIED:
            connection.execute(
                f"INSERT INTO main.{table} SELECT c.* FROM main.episodes e CROSS JOIN driver.{table} c ON c.episode = "
                "e.number"
            )
        row = connection.execute("SELECT * FROM driver.run").fetchone()
        connection.execute("INSERT INTO main.run VALUES (?, ?, ?, ?, ?, 'done', ?)", (*row[:5], row[6]))
        connection.execute("INSERT INTO main.openings SELECT * FROM driver.openings")
        digests = [(digest,) for digest in sorted(mentioned_images(connection))]
        connection.executemany("INSERT INTO main.images SELECT * FROM driver.images WHERE digest = ?", digests)
        connection.execute(f"CREATE TABLE main.{TOOLS} (line BLOB NOT NULL)")
        lines = ToolSchemas(store.folder).lines(episode for episode, _ in episodes)
        connection.executemany(f"INSERT INTO main.{TOOLS} VALUES (?)", [(line,) for line in lines])
        connection.execute("COMMIT")
        connection.execute("DETACH driver")
        connection.execute("PRAGMA journal_mode = DELETE")
    return episodes


def _rows(store: RunReader) -> Iterator[Columns]:
    """The training rows. A credit method that needs a critic's values gives no advantages here."""
    builder = RowBuilder.of_run(store)
    if not builder.credit.needs_values:
        yield from export_rows(store)
        return
    builder = replace(builder, values=None)
    for task, group in groupby(store.trajectories(), key=lambda trajectory: trajectory.task_id):
        rows = builder.rows(list(group), store.task(task))
        yield from columns_of(replace(row, advantages=row.advantages[:0]) for row in rows)


def _write_summaries(store: RunReader, file: Path, part: Part) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {
        **dict.fromkeys(("number", "task_index", "sample_index", "seed", "attempt", "turns", "tokens"), pa.int64()),
        **dict.fromkeys(("reward", "started", "ended"), pa.float64()),
        **dict.fromkeys(("solved", "trainable"), pa.bool_()),
    }
    names = [name.strip(' "') for name in SUMMARY.split(",")]
    schema = pa.schema([(name, types.get(name, pa.string())) for name in (*names, "task_fields")])
    with store.snapshot() as connection:
        rows = connection.execute(
            f"SELECT {SUMMARY}, (SELECT fields FROM tasks t WHERE t.id = task_id) FROM episodes ORDER BY task_index, "
            "sample_index, number"
        ).fetchall()
    columns = []
    for field, values in zip(schema, zip(*rows, strict=True), strict=True):
        boolean = pa.types.is_boolean(field.type)
        columns.append(
            pa.array([None if value is None else bool(value) for value in values] if boolean else values, field.type)
        )
    about = {
        "version": VERSION,
        "run_id": store.run_id,
        "spec": store.header.name,
        "part": part.name,
        "images": store.image_digests(),
    }
    table = pa.Table.from_arrays(columns, schema=schema.with_metadata({META: codec.json_of(about)}))
    pq.write_table(table, file, compression="zstd")
