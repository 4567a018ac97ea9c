"""A run's file -> a summary, single episodes, or a stream of episodes, each from one snapshot, also while the run is
being written.

Invariant: each method reads one snapshot and keeps no connection open, so a reader never sees
an incomplete episode and never prevents the writer from resetting its WAL.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from msgspec.structs import replace
from pydantic_core import from_json

from engine.errors import StoreError
from engine.schemas.environment import Task
from engine.schemas.journal import JournalEntry
from engine.schemas.trajectory import Trajectory
from engine.store import codec, database
from engine.store.dropped import Dropped, Space, dropped_among, read_dropped, read_dropped_ids, refuse_dropped, space
from engine.store.header import RunHeader
from engine.store.images import StoredImage
from engine.store.lock import is_held
from engine.store.reading import EPISODE, EpisodeRow, decoding, episode_row, journal_rows, reading
from engine.store.results import read_trajectory
from engine.store.scores import ScoreHead, read_heads, read_score, require
from engine.store.tool_schemas import ToolSchemas
from engine.tokens.images import digest_of

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec

RunStatus = Literal["running", "stopped", "interrupted", "done"]
"""`running`: a writer has it open; `stopped`: its writer died; `interrupted` and `done` are written when it is
closed."""

_SCORED = "SELECT e.id, s.score FROM scored s JOIN episodes e ON e.number = s.episode WHERE s.label = ?"
_PAGE = 64
"""Number of trajectories that are read at a time: a long read would prevent the writer from resetting its WAL."""
_SUMMARIES = 512
"""Number of summaries that are read at a time."""
STORE = 2**32
"""Numbers of episodes from one of several stores of a run: those of the next begin `STORE` later."""


class RunReader:
    """Read access to a run. `RunStore` and the readers of plugins are subclasses."""

    def __init__(self, folder: Path, header: RunHeader, file: str = database.FILE) -> None:
        self.folder = folder
        self.header = header
        self.run_id = header.run_id
        self.path = folder / file
        """The SQLite file."""

    def close(self, status: Literal["interrupted", "done"] | None = None) -> None:
        """Nothing is held open for reading; `RunStore` ends its writing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    divided: ClassVar[bool] = False
    """Whether the episodes are in several stores; `contents` then gives one after the other."""

    @property
    def shards_only(self) -> str | None:
        """The folder or URL of shards that were opened without the run's folder; None for a run that has its folder."""
        return None

    def default_file(self, name: str) -> Path:
        """Return the path of a file in the run's folder, which a command writes if it is given no other.

        Raises:
            StoreError: only the shards of the run are here.
        """
        if self.shards_only is not None:
            raise StoreError(
                f"{self.shards_only} has only the shards of a run, so there is no folder for {name}; say where to "
                "write it: --out FILE"
            )
        return self.folder / name

    def loaded_spec(self) -> LoadedSpec:
        """Return the run's spec as it was loaded when the run was created."""
        return self.header.loaded_spec()

    @property
    def status(self) -> RunStatus:
        """The status of the run."""
        status: RunStatus = self._rows("SELECT status FROM run")[0][0]
        return "stopped" if status == "running" and not is_held(self.folder) else status

    def finished(self) -> set[str]:
        """Return the ids of the episodes that are done."""
        return {episode for (episode,) in self._rows("SELECT id FROM episodes WHERE status = 'done'")}

    def openings(self) -> list[float]:
        """Unix times at which the run was opened for writing, oldest first."""
        return [at for (at,) in self._rows("SELECT at FROM openings ORDER BY rowid")]

    def statuses(self) -> dict[str, str]:
        """Return `pending`, `running` (begun and not done) or `done` for each episode, by its id."""
        return dict(self._rows("SELECT id, status FROM episodes"))

    def dropped(self) -> Dropped:
        """Return how many episodes have only their summary left, because their content was dropped to save space."""
        with self.snapshot() as connection:
            return read_dropped(connection)

    def dropped_ids(self) -> set[str]:
        """Return the ids of the episodes whose content was dropped."""
        with self.snapshot() as connection:
            return read_dropped_ids(connection)

    def space(self) -> Space:
        """Return the size of the run's file."""
        with self.snapshot() as connection:
            return space(connection)

    def episodes(self, score: str | None = None) -> Iterator[EpisodeRow]:
        """Yield a summary of every episode, in the order of tasks and samples, with some hundreds in memory at a time;
        with `score`, the results of that score, of the episodes that it has.

        Raises:
            StoreError: the run has no such score.
        """
        if score is not None:
            self.score(score)
        query = (
            f"SELECT {EPISODE}, (SELECT score FROM scored WHERE label = ? AND episode = number) FROM episodes "
            "WHERE (task_index, sample_index, number) > (?, ?, ?) ORDER BY task_index, sample_index, number "
            f"LIMIT {_SUMMARIES}"
        )
        last = (-1, -1, -1)
        while True:
            rows = self._rows(query, score, *last)
            for *values, text in rows:
                row = episode_row(tuple(values))
                if score is None:
                    yield row
                elif text is not None:
                    yield self._rescored(row, text)
            if len(rows) < _SUMMARIES:
                return
            last = (row.task_index, row.sample_index, row.number)

    def episode(self, episode_id: str) -> EpisodeRow:
        """Return the summary of one episode.

        Raises:
            StoreError: the run has no such id.
        """
        with self.snapshot() as connection:
            return self._row(connection, episode_id)

    def samples(self, task_id: str) -> list[EpisodeRow]:
        """Return a summary of every episode of one task, in the order of samples."""
        query = (
            f"SELECT {EPISODE} FROM episodes WHERE task_id = ? AND "
            "task_index = (SELECT position FROM tasks WHERE id = ?) ORDER BY sample_index, number"
        )
        return [episode_row(row) for row in self._rows(query, task_id, task_id)]

    def task(self, task_id: str) -> Task:
        """Return a task for which an episode was begun or planned.

        Raises:
            StoreError: the run has no such id.
        """
        for position, fields in self._rows("SELECT position, fields FROM tasks WHERE id = ?", task_id):
            with decoding(self.path, task_id), codec.damaged("the task"):
                return Task(id=task_id, index=position, fields=from_json(fields))
        raise StoreError(f"{self.run_id} has no task `{task_id}`")

    def journal(self, episode_id: str, attempt: int | None = None) -> list[JournalEntry]:
        """Return an episode's journal: of its newest attempt, or of the given one.

        Raises:
            StoreError: the run has no such episode.
            StoreError: its content was dropped.
        """
        with self.snapshot() as connection:
            row = self._row(connection, episode_id)
            rows = journal_rows(connection, row.number, row.attempt if attempt is None else attempt)
            if not rows:
                refuse_dropped(connection, row.number, row.id)
        with decoding(self.path, episode_id):
            return [codec.read_entry(entry) for entry in rows]

    def scores(self) -> list[ScoreHead]:
        """Return the heads of the run's scores by other rules, oldest first."""
        with self.snapshot() as connection:
            return read_heads(connection)

    def score(self, label: str) -> ScoreHead:
        """Return the head of one score.

        Raises:
            StoreError: the run has none of that name.
        """
        with self.snapshot() as connection:
            return require(connection, label, self.run_id)

    def trajectory(self, episode_id: str, score: str | None = None) -> Trajectory:
        """Return a finished episode; with `score`, with the results of that score.

        Raises:
            StoreError: the run has no such episode or score, or the episode is not done.
            StoreError: its content was dropped.
        """
        with self.snapshot() as connection:
            row = self._row(connection, episode_id)
            if row.status != "done":
                raise StoreError(f"{episode_id} is {row.status}: it has no trajectory yet")
            refuse_dropped(connection, row.number, row.id)
            text = connection.execute("SELECT trajectory FROM trajectories WHERE episode = ?", (row.number,)).fetchone()
            trajectory = self._decoded(connection, row.id, row.number, text[0] if text is not None else None)
            if score is None:
                return trajectory
            require(connection, score, self.run_id)
            scored = connection.execute(_SCORED + " AND s.episode = ?", (score, row.number)).fetchone()
            if scored is None:
                raise StoreError(f"{episode_id} was not done when the run was scored as `{score}`")
            with decoding(self.path, episode_id):
                return read_score(scored[1]).over(trajectory)

    def trajectories(self, score: str | None = None) -> Iterator[Trajectory]:
        """Yield every finished episode with content, in the order of tasks and samples, with a few in memory at a time.

        Episodes that were dropped are left out: say so with `dropped`.

        With `score`: the episodes that were done when the run was scored, with the results of that score.

        Raises:
            StoreError: the run has no such score.
        """
        if score is None:
            yield from self._trajectories()
            return
        with self.snapshot() as connection:
            require(connection, score, self.run_id)
            texts = dict(connection.execute(_SCORED, (score,)))
        for trajectory in self._trajectories():
            if trajectory.episode_id in texts:
                with decoding(self.path, trajectory.episode_id):
                    rescored = read_score(texts[trajectory.episode_id]).over(trajectory)
                yield rescored

    def _trajectories(self) -> Iterator[Trajectory]:
        query = (
            "SELECT e.task_index, e.task_id, e.sample_index, e.number, t.trajectory, e.id "
            "FROM episodes e LEFT JOIN trajectories t ON t.episode = e.number "
            "WHERE e.status = 'done' AND (e.task_index, e.task_id, e.sample_index, e.number) > (?, ?, ?, ?) "
            f"ORDER BY e.task_index, e.task_id, e.sample_index, e.number LIMIT {_PAGE}"
        )  # the uses `t` and `t~1` of a task in a training have one position, and are two groups
        last: tuple[int, str, int, int] = (-1, "", -1, -1)
        while True:
            with self.snapshot() as connection:
                rows = connection.execute(query, last).fetchall()
                gone = read_dropped_ids(connection) if any(row[4] is None for row in rows) else ()
                page = [
                    self._decoded(connection, name, number, text)
                    for _, _, _, number, text, name in rows
                    if text is not None or name not in gone
                ]
            yield from page
            if len(rows) < _PAGE:
                return
            last = rows[-1][:4]

    def _decoded(self, connection: sqlite3.Connection, episode_id: str, number: int, text: str | None) -> Trajectory:
        with decoding(self.path, episode_id):
            if text is None:
                raise StoreError("its trajectory is missing, so the file is damaged")
            return read_trajectory(connection, number, text)

    def _rescored(self, row: EpisodeRow, text: str) -> EpisodeRow:
        with decoding(self.path, row.id):
            outcome = read_score(text).outcome
        failure = outcome.failure
        return replace(
            row,
            failure=failure.kind if failure else None,
            blame=failure.blame if failure else None,
            solved=outcome.solved,
            trainable=outcome.trainable,
            reward=outcome.reward,
        )

    def tool_schemas(self) -> Callable[[str], str]:
        """Return a function that gives the tools of an episode by its id, as `ToolSchemas.of`.

        Raises:
            OSError: they cannot be read.
        """
        return ToolSchemas(self.folder).of

    def image_digests(self) -> list[str]:
        """Return the digests of the run's images, in the order in which they were stored."""
        return [digest for (digest,) in self._rows("SELECT digest FROM images ORDER BY rowid")]

    def image(self, digest: str) -> StoredImage:
        """Return a stored image by its digest, `sha256:<hex>`.

        Raises:
            StoreError: the run has no such image, or its bytes are damaged.
        """
        rows = self._rows("SELECT digest, mime, width, height, bytes FROM images WHERE digest = ?", digest)
        if not rows:
            raise StoreError(f"{self.run_id} has no image {digest}")
        image = StoredImage(**dict(zip(StoredImage.__struct_fields__, rows[0], strict=True)))
        if digest_of(image.data) != digest:
            raise StoreError(f"{self.path}: the image {digest} is damaged")
        return image

    def _row(self, connection: sqlite3.Connection, episode_id: str) -> EpisodeRow:
        row = connection.execute(f"SELECT {EPISODE} FROM episodes WHERE id = ?", (episode_id,)).fetchone()
        if row is None:
            raise StoreError(
                f"{self.run_id} has no episode `{episode_id}`; `engine show {self.shards_only or self.run_id}` lists "
                "them"
            )
        return episode_row(row)

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """A read-only connection on one snapshot of the run's file, for queries over its tables
        (`engine.store.database`).

        Close it soon: a long read prevents the writer from resetting its WAL.

        Raises:
            StoreError: the file cannot be read.
        """
        with closing(database.connect_reader(self.path)) as connection, reading(self.path):
            connection.execute("BEGIN")  # one snapshot for everything that is read with this connection
            yield connection

    def _rows(self, query: str, *values: object) -> list[Any]:
        """The rows of one query, in a snapshot of its own."""
        with self.snapshot() as connection:
            return connection.execute(query, values).fetchall()

    def refresh(self) -> None:
        """Read what other stores of the run have since; nothing for a run of one store, of which each method reads the
        newest state."""

    def contents(self, numbers: Collection[int] | None = None) -> Iterator[tuple[sqlite3.Connection, int]]:
        """Yield snapshots as `snapshot` gives, of every store that has content of the episodes `numbers` (all by
        default).

        With each comes what is to be added to the episode numbers of its tables: a sharded run has many stores.
        """
        with self.snapshot() as connection:
            yield connection, 0

    def by_number(self, numbers: Sequence[int]) -> Iterator[tuple[int, Trajectory]]:
        """Yield the finished episodes with these numbers that have content."""
        query = (
            "SELECT t.trajectory, e.id FROM episodes e LEFT JOIN trajectories t ON t.episode = e.number "
            "WHERE e.number = ? AND e.status = 'done'"
        )
        with self.snapshot() as connection:
            gone = {number for number, _ in dropped_among(connection, numbers)}
            for number in numbers:
                for text, name in connection.execute(query, (number,)).fetchall():
                    if text is not None or number not in gone:
                        yield number, self._decoded(connection, name, number, text)

    def has_image(self, digest: str) -> bool:
        """Return whether the run has an image."""
        return bool(self._rows("SELECT 1 FROM images WHERE digest = ?", digest))
