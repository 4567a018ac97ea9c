"""Shards: the finished groups of one driver of a run, published to a folder or an object store.

    place = create_shards(run_folder, header, "s3://bucket/runs/r1")      # once per run
    publisher = Publisher(run_folder / "drivers" / "0", place, "0")       # one per driver
    publisher.publish(publisher.ready())

A part has three files. `part-<driver>-<n>.db` is a run store with the journals, trajectories and images of the part's episodes,
`part-<driver>-<n>.parquet` has their training rows, and `episodes-<driver>-<n>.parquet` a summary of each. `run.json` is the run's header, and
`status.json` its status when its own store was last opened or closed.

Invariants:
- A part exists when its file `episodes-…` exists: it is written last. No file of a part changes after that.
- The parts of a driver are numbered from 0 without gaps, and one process at a time writes under a driver's name.
- What a crash leaves unpublished or unnoted is published again. Readers count (episode, attempt) once (`engine.store.catalogue`).
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_args
from urllib.parse import quote

from pydantic import ValidationError

from engine.errors import StoreError
from engine.store import codec, database
from engine.store.compact import mentioned_images
from engine.store.dropped import has_table
from engine.store.export import Row, export_rows, group_rows, plan_of, whole_file
from engine.store.header import RunHeader
from engine.store.places import Place, is_url
from engine.store.private import private_file
from engine.store.reader import RunReader, RunStatus, own_header, reading
from engine.store.tool_schemas import ToolSchemas

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 1
"""Version of the layout; others are refused."""
SHARDED = "sharded.json"
"""In a run's folder: where the shards of the run are."""
RUN = "run.json"
"""Beside the shards: the run's header."""
STATUS = "status.json"
"""Beside the shards: the status of the run."""
TOOLS = "tool_schemas"
"""Table of a part's store: the lines that `engine.store.tool_schemas` has of its episodes."""
FOLDER = "shards"
DRIVERS = "drivers"
"""The folder of the drivers' own stores, in the run's folder."""
_PUBLISHED = "published.jsonl"
_MARK = re.compile(r"^episodes-([a-z0-9]+)-(\d{6,})\.parquet$")
_PART = re.compile(r"^part-([a-z0-9]+)-\d{6,}$")
_META = b"episode-engine"
SUMMARY = (
    'number, id, task_id, task_index, sample_index, seed, attempt, state, event, "limit", failure, blame, solved, trainable, '
    "reward, turns, tokens, started, ended"
)
"""Columns of a summary, as in the table `episodes` of a store; then follows `task_fields`."""
_COPIED = ("journal", "trajectories", "branches", "postings")


class Part(NamedTuple):
    """The name of a part."""

    driver: str
    number: int

    @property
    def name(self) -> str:
        """`part-<driver>-<n>`, to which `.db` and `.parquet` are added."""
        return f"part-{self.driver}-{self.number:06d}"

    @property
    def mark(self) -> str:
        """The file that says that the part exists."""
        return f"episodes-{self.driver}-{self.number:06d}.parquet"


def driver_of(part: str) -> str | None:
    """Return the driver that wrote a part, by the part's name; None: it is no name of a part."""
    found = _PART.match(part)
    return found[1] if found else None


def create_shards(run: Path, header: RunHeader, url: str | None = None) -> str:
    """Make a run a sharded one, and return the place of its shards.

    Args:
        run: The run's folder.
        header: Its header.
        url: A folder or a URL; by default the folder `shards` of the run.

    Raises:
        StoreError: the place has the shards of another run, or cannot be written.
    """
    given = url or FOLDER
    place = Place(given if is_url(given) or url else run / given)
    if RUN in place.names():
        known = read_header(place)
        if known.run_id != header.run_id:
            raise StoreError(
                f"{place.name} has the shards of run {known.run_id}; give run {header.run_id} a place of its own"
            )
    put_json(place, RUN, {"header": header.model_dump(mode="json")})
    put_json(place, STATUS, {"status": "running"})
    with whole_file(run / SHARDED) as marked:
        written = FOLDER if url is None else place.name
        marked.write_text(json.dumps({"version": VERSION, "shards": written}), encoding="utf-8")
    return place.name


def shards_of(run: Path) -> str | None:
    """Return the place of a run's shards; None for a run that has none.

    Raises:
        StoreError: the file that says so is damaged, or of another version.
    """
    file = run / SHARDED
    try:
        text = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"cannot read {file}: {error}") from error
    place = _checked(text, str(file)).get("shards")
    if not isinstance(place, str) or not place:
        raise StoreError(f"{file} is damaged: it has no `shards`; restore it from a copy")
    return place if is_url(place) else str(run / place)


def put_json(place: Place, name: str, content: dict[str, Any]) -> None:
    """Write a JSON file with the layout's version beside the shards."""
    with tempfile.TemporaryDirectory() as draft:
        file = Path(draft) / name
        file.write_text(json.dumps({"version": VERSION, **content}), encoding="utf-8")
        place.put(file, name)


def noted_status(place: Place) -> RunStatus:
    """Return what `note_status` wrote last; `interrupted` if that is missing.

    Raises:
        StoreError: it cannot be read, or is of another version.
    """
    if STATUS not in place.names():
        return "interrupted"
    (text,) = place.read([STATUS])
    status = _checked(text, place.path(STATUS)).get("status")
    if status not in get_args(RunStatus):
        raise StoreError(f"{place.path(STATUS)} is damaged: status {status!r}; remove it")
    return cast("RunStatus", status)


def read_header(place: Place) -> RunHeader:
    """Return the header beside shards.

    Raises:
        StoreError: there is none, or it is of another version.
    """
    where = place.path(RUN)
    try:
        (text,) = place.read([RUN])
    except StoreError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise StoreError(f"{place.name} is not a folder of shards: {error}; give the folder that has {RUN}") from error
    try:
        return RunHeader.model_validate(_checked(text, where).get("header"))
    except ValidationError as error:
        raise StoreError(f"{where} is damaged: {error}; restore it from a copy") from error


def _checked(text: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
        version = found["version"]
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{where} is damaged: {error!r}; restore it from a copy") from error
    _check_version(version, where)
    return dict(found)


def _check_version(version: object, where: str) -> None:
    if version != VERSION:
        newer = isinstance(version, int) and version > VERSION
        fix = "upgrade episode-engine" if newer else "use the engine that wrote it"
        raise StoreError(
            f"{where} has layout version {version} of shards, and this engine reads version {VERSION}: {fix}"
        )


def list_parts(place: Place) -> list[Part]:
    """Return the parts of a place, by driver and number.

    Raises:
        StoreError: a part is missing, or the place cannot be listed.
    """
    for last in (False, True):  # a list of several pages can miss a part that was written while it was read: list again
        found = sorted(Part(name[1], int(name[2])) for name in map(_MARK.match, place.names()) if name is not None)
        numbers: dict[str, int] = {}
        missing = None
        for part in found:
            expected = numbers.get(part.driver, 0)
            if part.number != expected and missing is None:
                missing = Part(part.driver, expected)
            numbers[part.driver] = part.number + 1
        if missing is None:
            break
        if last:
            raise StoreError(
                f"shard {missing.name} is missing in {place.name}: there is no {missing.mark}, and later parts of driver {missing.driver} "
                "are there. Copy it from where the shards were written"
            )
    return found


class Summaries(NamedTuple):
    """What the file `episodes-…` of a part has."""

    table: pa.Table
    images: list[str]
    """Digests of the images in the part's store."""


def read_summaries(place: Place, part: Part, data: bytes, run_id: str) -> Summaries:
    """Read the summaries of a part.

    Raises:
        StoreError: they are damaged, of another version, or of another run.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    where = place.path(part.mark)
    try:
        table = pq.read_table(pa.BufferReader(data))
        told = json.loads((table.schema.metadata or {})[_META])
        version, run, spec, images = told["version"], told["run_id"], told["spec"], told.get("images", [])
    except (pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{where} is damaged: {error!r}; copy it again from where it was written") from error
    _check_version(version, where)
    if run != run_id:
        raise StoreError(
            f"{where} is a shard of run {run} (spec `{spec}`), and the other shards in this folder are of run {run_id}; "
            "move the files of one of the runs to a folder of their own"
        )
    return Summaries(table, images)


class Publisher:
    """Publishes the finished groups of one driver's store. One thread at a time; the driver may write its store meanwhile.

    Args:
        store: The folder of the driver's store.
        place: From `create_shards` or `shards_of`.
        driver: Its name: small letters and digits. A driver that begins with an empty store takes a name that no other has had.

    Raises:
        StoreError: the store or the place cannot be read.
    """

    def __init__(self, store: Path, place: str, driver: str) -> None:
        if not re.fullmatch("[a-z0-9]+", driver):
            raise StoreError(f"driver name `{driver}`: use small letters and digits")
        self._store = RunReader(store, own_header(store))
        self._place = Place(place)
        self._driver = driver
        self._log = store / _PUBLISHED
        self._done = set(_noted(self._log))
        self._next = sum(part.driver == driver for part in list_parts(self._place))

    def ready(self) -> list[str]:
        """Return the tasks of which every episode in the store is done and one is not published, in order."""
        found: dict[str, bool] = {}
        blocked: set[str] = set()
        with self._store.snapshot() as connection:
            dropped = "AND number NOT IN (SELECT episode FROM dropped)" if has_table(connection) else ""
            query = f"SELECT task_id, id, attempt, status FROM episodes WHERE TRUE {dropped} ORDER BY task_index, sample_index"
            for task, episode, attempt, status in connection.execute(query):
                if status != "done":
                    blocked.add(task)
                elif (episode, attempt) not in self._done:
                    found[task] = True
        return [task for task in found if task not in blocked]

    def publish(self, tasks: Sequence[str]) -> str | None:
        """Publish the finished episodes of tasks as one part, and return its name; None if there is nothing new.

        Raises:
            StoreError: it cannot be written; nothing or all of it is visible, and the next call continues.
        """
        with tempfile.TemporaryDirectory(prefix="episode-engine-") as draft:
            folder = Path(draft)
            copied = _copy(self._store, folder, tasks, self._done)
            if not copied:
                return None
            part = Part(self._driver, self._next)
            own = RunReader(folder, self._store.header)
            rows = folder / "rows.parquet"
            _write_rows(own, rows)
            marks = folder / "episodes.parquet"
            _write_summaries(own, marks, part)
            self._place.put(folder / database.FILE, f"{part.name}.db")
            self._place.put(rows, f"{part.name}.parquet")
            self._place.put(marks, part.mark)
        self._next += 1
        self._done.update(copied)
        _note(self._log, part, copied)
        return part.name


def _noted(log: Path) -> Iterator[tuple[str, int]]:
    """What earlier processes published: (episode, attempt). A line that a crash cut is left out."""
    try:
        lines = log.read_bytes().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            told = json.loads(line)
        except ValueError:
            continue
        yield from ((episode, attempt) for episode, attempt in told["episodes"])


def _note(log: Path, part: Part, episodes: Sequence[tuple[str, int]]) -> None:
    try:
        with private_file(log).open("ab") as file:
            file.write(b"\n" + json.dumps({"part": part.name, "episodes": episodes}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(f"cannot write {log}: {error}; free space on the disk") from error


def _copy(store: RunReader, folder: Path, tasks: Sequence[str], without: set[tuple[str, int]]) -> list[tuple[str, int]]:
    """Copy the finished episodes of tasks into a new store, with what they need; return (id, attempt) of each.

    A task that has anything new is copied as a whole, so that the advantages of its rows are those of the group.
    """
    file = folder / database.FILE
    database.create_tables(file)
    with closing(database.connect_writer(file)) as connection, reading(file):
        connection.execute("PRAGMA synchronous = OFF")  # a draft: `Place.put` makes it durable
        connection.execute("ATTACH ? AS driver", (f"file:{quote(str(store.path.absolute()))}?mode=ro",))
        connection.execute("BEGIN")
        dropped = ""
        if connection.execute("PRAGMA driver.user_version").fetchone()[0] == database.COMPACTED_VERSION:
            dropped = "AND number NOT IN (SELECT episode FROM driver.dropped)"
        query = f"SELECT id, attempt FROM driver.episodes WHERE task_id = ? AND status = 'done' {dropped}"
        found: list[tuple[str, int]] = []
        for task in dict.fromkeys(tasks):
            group = connection.execute(query, (task,)).fetchall()
            if any(each not in without for each in group):
                found += group
                connection.execute("INSERT INTO main.tasks SELECT * FROM driver.tasks WHERE id = ?", (task,))
                connection.execute(
                    f"INSERT INTO main.episodes SELECT * FROM driver.episodes WHERE task_id = ? AND status = 'done' {dropped}",
                    (task,),
                )
        for table in _COPIED:
            connection.execute(
                f"INSERT INTO main.{table} SELECT c.* FROM main.episodes e CROSS JOIN driver.{table} c ON c.episode = e.number"
            )
        row = connection.execute("SELECT * FROM driver.run").fetchone()
        connection.execute("INSERT INTO main.run VALUES (?, ?, ?, ?, ?, 'done', ?)", (*row[:5], row[6]))
        connection.execute("INSERT INTO main.openings SELECT * FROM driver.openings")
        digests = [(each,) for each in sorted(mentioned_images(connection))]
        connection.executemany("INSERT INTO main.images SELECT * FROM driver.images WHERE digest = ?", digests)
        connection.execute(f"CREATE TABLE main.{TOOLS} (line BLOB NOT NULL)")
        lines = ToolSchemas(store.folder).lines(episode for episode, _ in found)
        connection.executemany(f"INSERT INTO main.{TOOLS} VALUES (?)", [(line,) for line in lines])
        connection.execute("COMMIT")
        connection.execute("DETACH driver")
        connection.execute("PRAGMA journal_mode = DELETE")
    return found


def _write_rows(store: RunReader, file: Path) -> None:
    from engine.store.parquet import write_parquet

    write_parquet(_rows(store), file, {"run_id": store.run_id})


def _rows(store: RunReader) -> Iterator[Row]:
    """The training rows. A credit method that needs a critic's values gives no advantages here."""
    plan = plan_of(store)
    if not plan.credit.needs_values:
        yield from export_rows(store)
        return
    from dataclasses import replace
    from itertools import groupby

    plan = replace(plan, values=None)
    for task, group in groupby(store.trajectories(), key=lambda each: each.task_id):
        for row in group_rows(list(group), plan, task=store.task(task)):
            yield {name: value for name, value in row.items() if name != "ledger"} | {"advantages": None}


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
            f"SELECT {SUMMARY}, (SELECT fields FROM tasks t WHERE t.id = task_id) FROM episodes ORDER BY task_index, sample_index, number"
        ).fetchall()
    columns = []
    for field, values in zip(schema, zip(*rows, strict=True), strict=True):
        boolean = pa.types.is_boolean(field.type)
        columns.append(
            pa.array([None if each is None else bool(each) for each in values] if boolean else values, field.type)
        )
    told = {
        "version": VERSION,
        "run_id": store.run_id,
        "spec": store.header.name,
        "part": part.name,
        "images": store.image_digests(),
    }
    table = pa.Table.from_arrays(columns, schema=schema.with_metadata({_META: codec.json_of(told)}))
    pq.write_table(table, file, compression="zstd")
