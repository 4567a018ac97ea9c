"""Shards: the finished groups of one driver of a run, published to a folder or an object store.

    place = create_shards(run_folder, header, "s3://bucket/runs/r1")      # once per run
    publisher = Publisher(run_folder / "drivers" / "0", place, "0")       # one per driver
    publisher.publish(publisher.ready())                              # `engine.plugins.drivers.publisher`

A part has three files. `part-<driver>-<n>.db` is a run store with the journals, trajectories and images of the part's
episodes, `part-<driver>-<n>.parquet` has their training rows, and `episodes-<driver>-<n>.parquet` a summary of each.
`run.json`
is the run's header, and
`status.json` its status when `engine run` last began or ended.

Invariants:
- A part exists when its file `episodes-…` exists: it is written last. No file of a part changes after that.
- The parts of a driver are numbered from 0 without gaps, and one process at a time writes under a driver's name.
- What a crash leaves unpublished or unnoted is published again. Readers count (episode, attempt) once
  (`engine.plugins.drivers.catalogue`).
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from pydantic import ValidationError

from engine.errors import StoreError
from engine.plugins.drivers.places import ShardPlace, is_url
from engine.schemas.base import Struct
from engine.store.find import DIVIDED
from engine.store.header import RunHeader
from engine.store.private import whole_file
from engine.store.reader import RunStatus

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 1
"""Version of the layout; others are refused."""
SHARDED = DIVIDED
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
_MARK = re.compile(r"^episodes-([a-z0-9]+)-(\d{6,})\.parquet$")
_PART = re.compile(r"^part-([a-z0-9]+)-\d{6,}$")
META = b"episode-engine"
"""Key of what a summary says of its part, in the metadata of its Parquet file."""
SUMMARY = (
    'number, id, task_id, task_index, sample_index, seed, attempt, state, event, "limit", failure, blame, solved, '
    "trainable, "
    "reward, turns, tokens, started, ended"
)
"""Columns of a summary, as in the table `episodes` of a store; then follows `task_fields`."""


class Part(Struct, frozen=True, kw_only=True):
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
    match = _PART.match(part)
    return match[1] if match else None


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
    place = ShardPlace(given if is_url(given) or url else run / given)
    if RUN in place.names():
        existing = read_header(place)
        if existing.run_id != header.run_id:
            raise StoreError(
                f"{place.name} has the shards of run {existing.run_id}; give run {header.run_id} a place of its own"
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


def put_json(place: ShardPlace, name: str, content: dict[str, Any]) -> None:
    """Write a JSON file with the layout's version beside the shards."""
    with tempfile.TemporaryDirectory() as draft:
        file = Path(draft) / name
        file.write_text(json.dumps({"version": VERSION, **content}), encoding="utf-8")
        place.put(file, name)


def noted_status(place: ShardPlace) -> RunStatus:
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


def read_header(place: ShardPlace) -> RunHeader:
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
        content = json.loads(text)
        version = content["version"]
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{where} is damaged: {error!r}; restore it from a copy") from error
    _check_version(version, where)
    return dict(content)


def _check_version(version: object, where: str) -> None:
    if version != VERSION:
        newer = isinstance(version, int) and version > VERSION
        fix = "upgrade episode-engine" if newer else "use the engine that wrote it"
        raise StoreError(
            f"{where} has layout version {version} of shards, and this engine reads version {VERSION}: {fix}"
        )


def list_parts(place: ShardPlace) -> list[Part]:
    """Return the parts of a place, by driver and number.

    Raises:
        StoreError: a part is missing, or the place cannot be listed.
    """
    for last in (False, True):  # a list of several pages can miss a part that was written while it was read: list again
        marks = [mark for mark in map(_MARK.match, place.names()) if mark is not None]
        parts = [
            Part(driver=driver, number=number) for driver, number in sorted((mark[1], int(mark[2])) for mark in marks)
        ]
        numbers: dict[str, int] = {}
        missing = None
        for part in parts:
            expected = numbers.get(part.driver, 0)
            if part.number != expected and missing is None:
                missing = Part(driver=part.driver, number=expected)
            numbers[part.driver] = part.number + 1
        if missing is None:
            break
        if last:
            raise StoreError(
                f"shard {missing.name} is missing in {place.name}: there is no {missing.mark}, and later parts of "
                f"driver {missing.driver} are there. Copy it from where the shards were written"
            )
    return parts


def read_summaries(place: ShardPlace, part: Part, data: bytes, run_id: str) -> tuple[pa.Table, list[str]]:
    """Read what the file `episodes-…` of a part has: its summaries, and the digests of the images in its store.

    Raises:
        StoreError: they are damaged, of another version, or of another run.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    where = place.path(part.mark)
    try:
        table = pq.read_table(pa.BufferReader(data))
        about = json.loads((table.schema.metadata or {})[META])
        version, run, spec, images = about["version"], about["run_id"], about["spec"], about.get("images", [])
        if missing := {name.strip(' "') for name in SUMMARY.split(",")} - set(table.column_names):
            raise ValueError(f"it has no column {', '.join(sorted(missing))}")
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{where} is damaged; copy it again from where it was written") from error
    _check_version(version, where)
    if run != run_id:
        raise StoreError(
            f"{where} is a shard of run {run} (spec `{spec}`), and the other shards in this folder are of run "
            f"{run_id}; move the files of one of the runs to a folder of their own"
        )
    return table, images
