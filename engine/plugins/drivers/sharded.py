"""Reads a sharded run as one: the stores of its drivers that are in the run's folder, and its shards.

`RunStore.open(folder, readonly=True)` opens one. Lists come from the catalogue; the content of an episode is read where
it was written. The store of a part in an object store is copied into the cache folder when the content of one of its
episodes is read.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

import structlog

from engine.errors import StoreError
from engine.plugins.drivers.catalogue import Catalogue, catalogue_folder
from engine.plugins.drivers.places import ShardPlace
from engine.plugins.drivers.shards import (
    DRIVERS,
    SHARDED,
    STATUS,
    TOOLS,
    VERSION,
    driver_of,
    noted_status,
    put_json,
    read_header,
    shards_of,
)
from engine.schemas.journal import JournalEntry
from engine.schemas.trajectory import Trajectory
from engine.store import database
from engine.store.dropped import Dropped
from engine.store.ended import report_lost
from engine.store.images import StoredImage
from engine.store.lock import is_held
from engine.store.private import private_folder, whole_file
from engine.store.reader import STORE, RunReader, RunStatus
from engine.store.reading import EpisodeRow, own_header
from engine.store.scores import ScoreHead
from engine.store.tool_schemas import ToolSchemas

log = structlog.get_logger(__name__)

_PAUSE = 5.0
"""Seconds before an object store is listed again by one reader."""
_PAGE = 256


class ShardedRun(RunReader):
    """A sharded run, open for reading.

    Args:
        folder: The run's folder, or one that stands for shards alone (`engine.store.find`).

    Raises:
        StoreError: the folder is not of a sharded run, or a store or a shard of it cannot be read.
    """

    divided = True

    def __init__(self, folder: Path) -> None:
        place = shards_of(folder)
        if place is None:
            raise StoreError(f"{folder} has no {SHARDED}: it is not a sharded run")
        self._place = ShardPlace(place)
        self._is_run = (folder / database.FILE).is_file()
        header = own_header(folder) if self._is_run else read_header(self._place)
        super().__init__(folder, header)
        self._cache = catalogue_folder(str(folder.absolute()))
        self._catalogue = Catalogue(self._cache, header, self._place)
        self.path = self._catalogue.path
        self._readers: dict[int, RunReader] = {}
        self._noted: RunStatus = "running"
        self._listed = float("-inf")
        self.refresh()
        with self.snapshot() as connection:
            report_lost(list(self._own().values()), folder, connection)

    def refresh(self) -> None:
        """Read what the drivers have written and published since."""
        now = time.monotonic()
        if self._place.folder is None and now - self._listed < _PAUSE:
            return
        self._catalogue.refresh(list(self._own().items()))
        self._listed = now
        self._sources = self._catalogue.sources()
        if not self._is_run:
            self._noted = noted_status(self._place)

    def _own(self) -> dict[str, Path]:
        """The folders of the run's own store and of its drivers, by their name in the catalogue."""
        folders = {"": self.folder} if self._is_run else {}
        drivers = sorted((self.folder / DRIVERS).glob(f"*/{database.FILE}"))
        return folders | {f"{DRIVERS}/{file.parent.name}": file.parent for file in drivers}

    def _reader_of(self, source: int) -> RunReader:
        """The store with a number of the catalogue."""
        if source in self._readers:
            return self._readers[source]
        name, is_part = self._sources[source]
        path = (self._cache / "parts" / name if is_part else self.folder / name) / database.FILE
        if is_part and not path.is_file():
            if self._place.folder is not None:
                path = self._place.folder / f"{name}.db"
            else:
                try:
                    self._place.get(f"{name}.db", path)
                except StoreError as error:
                    raise StoreError(
                        f"shard {name} is not complete: {error}. Copy the file from where it was written"
                    ) from error
        if not path.is_file():
            raise StoreError(f"shard {name} is not complete: {path} does not exist. Copy it from where it was written")
        self._readers[source] = RunReader(path.parent, self.header, path.name)
        return self._readers[source]

    def _live(self) -> dict[int, RunReader]:
        """The stores that may still be written, by their number."""
        return {source: self._reader_of(source) for source, (_, part) in self._sources.items() if not part}

    # --- what differs from a run of one store ---

    @property
    def shards_only(self) -> str | None:
        """As in `RunReader`."""
        return None if self._is_run else self._place.name

    @property
    def status(self) -> RunStatus:
        """The status of the run: that of its own store, `running` while a driver in its folder runs.

        Of shards alone, what the run wrote beside them when it began or ended: `running` also if it was killed.
        """
        if not self._is_run:
            return self._noted
        if any(is_held(folder) for folder in self._own().values()):
            return "running"
        left = self._rows("SELECT 1 FROM episodes WHERE status <> 'done' LIMIT 1")  # ends at the first one
        if not left and self._rows("SELECT 1 FROM episodes LIMIT 1"):
            return "done"
        said = RunReader(self.folder, self.header).status
        return "interrupted" if said == "done" else said

    def openings(self) -> list[float]:
        """Unix times at which the stores of the run were opened for writing, oldest first."""
        return sorted(at for reader in self._live().values() for at in reader.openings())

    def contents(self, numbers: Collection[int] | None = None) -> Iterator[tuple[sqlite3.Connection, int]]:
        """As in `RunReader`: one store or part after the other."""
        chosen = set(self._sources) if numbers is None else {number // STORE for number in numbers}
        for source in sorted(chosen):
            for connection, _ in self._reader_of(source).contents():
                yield connection, source * STORE

    def journal(self, episode_id: str, attempt: int | None = None) -> list[JournalEntry]:
        """As in `RunReader`; an earlier attempt may be in the store of another driver."""
        row = self.episode(episode_id)
        home = row.number // STORE
        if attempt is None or attempt == row.attempt:
            return self._reader_of(home).journal(episode_id, row.attempt)
        for source in [home, *(source for source in self._sources if source != home)]:
            with suppress(StoreError):
                entries = self._reader_of(source).journal(episode_id, attempt)
                if entries:
                    return entries
        return []

    def begun(self) -> dict[str, tuple[str, int]]:
        """Return the episodes that were begun and not finished: the name of the driver's store (as `finished_by_store`)
        and the attempt of each."""
        return {
            row.id: (self._sources[row.number // STORE][0].removeprefix(f"{DRIVERS}/"), row.attempt)
            for row in self.episodes()
            if row.status == "running"
        }

    def finished_by_store(self) -> Counter[str]:
        """Return the number of finished episodes by the name of the driver's store in which they were run; "" is the
        run's own store."""
        counts: Counter[str] = Counter()
        for source, count in self._rows("SELECT source, count(*) FROM episodes WHERE status = 'done' GROUP BY source"):
            counts[driver_of(source) or source.removeprefix(f"{DRIVERS}/")] += count
        return counts

    def trajectory(self, episode_id: str, score: str | None = None) -> Trajectory:
        """As in `RunReader`.

        Raises:
            StoreError: the episode is unknown, not done, or damaged, or a score is asked for.
        """
        self._refuse(score)
        row = self.episode(episode_id)
        if row.status != "done":
            raise StoreError(f"{episode_id} is {row.status}: it has no trajectory yet")
        return self._reader_of(row.number // STORE).trajectory(episode_id)

    def trajectories(self, score: str | None = None) -> Iterator[Trajectory]:
        """As in `RunReader`."""
        self._refuse(score)
        query = (
            "SELECT task_index, task_id, sample_index, number FROM episodes WHERE status = 'done' "
            "AND (task_index, task_id, sample_index, number) > (?, ?, ?, ?) "
            f"ORDER BY task_index, task_id, sample_index, number LIMIT {_PAGE}"
        )
        last: tuple[int, str, int, int] = (-1, "", -1, -1)
        while True:
            rows = self._rows(query, *last)
            numbers = [row[3] for row in rows]
            by_number: dict[int, Trajectory] = {}
            for source in dict.fromkeys(number // STORE for number in numbers):  # one connection for each store
                there = [number % STORE for number in numbers if number // STORE == source]
                by_number |= {source * STORE + at: read for at, read in self._reader_of(source).by_number(there)}
            yield from (by_number[number] for number in numbers if number in by_number)  # without dropped ones
            if len(rows) < _PAGE:
                return
            last = rows[-1]

    def scores(self) -> list[ScoreHead]:
        """None: `engine rescore` writes into the store of a run, and a sharded run has many."""
        return []

    def score(self, label: str) -> ScoreHead:
        """Refuse every label: a sharded run has no scores.

        Raises:
            StoreError: always.
        """
        self._refuse(label)
        raise AssertionError

    def _refuse(self, score: str | None) -> None:
        if score is not None:
            raise StoreError(f"{self.run_id} has no score `{score}`: a sharded run has no scores; leave out --score")

    def episodes(self, score: str | None = None) -> Iterator[EpisodeRow]:
        """As in `RunReader`."""
        self._refuse(score)
        return super().episodes()

    def dropped_ids(self) -> set[str]:
        """As in `RunReader`: of the drivers' stores; what was published before is not dropped."""
        ids = {id for reader in self._live().values() for id in reader.dropped_ids()}
        return {id for id in ids if not self._sources[self.episode(id).number // STORE][1]}

    def dropped(self) -> Dropped:
        """As in `RunReader`."""
        ids = self.dropped_ids()
        if not ids:
            return Dropped()
        parts = [reader.dropped() for reader in self._live().values()]
        return Dropped(
            episodes=len(ids),
            size=sum(part.size for part in parts),
            at=max((part.at for part in parts), default=0.0),
        )

    def tool_schemas(self) -> Callable[[str], str]:
        """As in `RunReader`: each episode has those of the store or part that it is read from."""
        schemas: dict[int, Callable[[str], str]] = {}

        def tools(episode_id: str) -> str:
            source = self.episode(episode_id).number // STORE
            if source not in schemas:
                reader = self._reader_of(source)
                if self._sources[source][1]:
                    rows = reader._rows(f"SELECT line FROM {TOOLS} ORDER BY rowid")
                    schemas[source] = ToolSchemas(reader.folder, (line for (line,) in rows)).of
                else:
                    schemas[source] = reader.tool_schemas()
            return schemas[source](episode_id)

        return tools

    def image_digests(self) -> list[str]:
        """As in `RunReader`; in the order of digests."""
        digests = {digest for (digest,) in self._rows("SELECT digest FROM image_parts")}
        return sorted(digests.union(*(reader.image_digests() for reader in self._live().values())))

    def image(self, digest: str) -> StoredImage:
        """As in `RunReader`.

        Raises:
            StoreError: no store of the run has the image.
        """
        for (source,) in self._rows("SELECT source FROM image_parts WHERE digest = ?", digest):
            return self._reader_of(source).image(digest)
        for reader in self._live().values():
            if reader.has_image(digest):
                return reader.image(digest)
        raise StoreError(f"{self.run_id} has no image {digest}")


def stand_in(place: str) -> Path:
    """Return a folder in the cache that stands for a run of which only the shards are here.

    Raises:
        StoreError: The folder cannot be written.
    """
    folder = catalogue_folder(place) / "run"
    try:
        private_folder(folder, exist_ok=True)
        with whole_file(folder / SHARDED) as draft:
            draft.write_text(json.dumps({"version": VERSION, "shards": place}), encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"cannot write {folder}: {error}; set EPISODE_ENGINE_CACHE to a folder that you can write"
        ) from error
    return folder


def note_status(run: Path, status: RunStatus | None = None) -> None:
    """Write the status of a sharded run beside its shards, for readers that have no more than these. Of other runs:
    nothing.

    A place that cannot be written is logged: the results do not depend on it.

    Args:
        run: The run's folder.
        status: The status; by default that of the run with its drivers.
    """
    try:
        place = shards_of(run)
        if place is None:
            return
        if status is None:
            status = ShardedRun(run).status
        put_json(ShardPlace(place), STATUS, {"status": status})
    except StoreError as error:
        log.warning("the run's status could not be written beside its shards", run=str(run), error=str(error))
