"""One SQLite file for a run: header, tasks, journals, results and images, written by one process and read by any.

    store = RunStore.create(Path("runs"), RunHeader.of(loaded))
    journal = await store.begin(task, sample_index)       # `journal.entries`: those of an interrupted run
    await journal.append(entry, encode_record(record))    # a crash can no longer lose the entry
    await journal.finish(make_trajectory)
    store.close()

    with RunStore.open(find_run("latest"), readonly=True) as store:
        for trajectory in store.trajectories(): ...

Invariants:
- A run has one writer, and any number of readers in any process, also while it is written.
- A journal has no gaps: see `engine.store.journal`.
- A finished episode is complete: outcome, trajectory, branches and postings are written in one commit.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from operator import methodcaller
from pathlib import Path
from typing import Any, Literal, overload

import structlog
from msgspec.structs import astuple

import engine
from engine.errors import StoreError
from engine.schemas.environment import Task
from engine.schemas.message import ImagePart
from engine.schemas.trajectory import Blame
from engine.storable import stored_fields
from engine.store import codec, database, dropped, episode_rows
from engine.store.ended import EndedList, report_lost
from engine.store.episode_rows import episode_id_of
from engine.store.find import find_run, open_elsewhere
from engine.store.header import RunHeader, package_versions
from engine.store.images import measure
from engine.store.journal import Journal
from engine.store.lock import RunLock
from engine.store.private import private_folder
from engine.store.reader import RunReader
from engine.store.reading import EpisodeRow, own_header, reading
from engine.store.scores import EpisodeScore, write_score
from engine.store.writer import Writer

__all__ = ["EpisodeRow", "RunStore", "episode_id_of", "find_run"]

log = structlog.get_logger(__name__)


PLANNED = 1_000
"""Tasks that are written in one commit before a run begins."""


class RunStore(RunReader):
    """A run. Made by `create` or `open`; call `close`, or use it as a context manager."""

    journal_class: type[Journal] = Journal
    """The class of the journals that `begin` opens."""

    def __init__(self, folder: Path, header: RunHeader, lock: RunLock | None, writer: Writer | None) -> None:
        super().__init__(folder, header)
        self._lock = lock
        self._writer = writer
        self._closed = False
        self._running: set[str] = set()
        self._images: set[str] = set()

    @classmethod
    def create(
        cls, folder: Path | str, header: RunHeader, source: RunReader | None = None, *, name: str | None = None
    ) -> RunStore:
        """Create a new run in `folder / header.run_id`.

        Args:
            folder: The folder in which runs are stored.
            header: The run's header.
            source: For a fork (`header.fork`), the run from which it is forked.
            name: Name of the run's own folder, if it is not the run's id: each driver of a sharded run has a store of
                the same run.

        Raises:
            StoreError: that folder exists, or cannot be written.
        """
        run_folder = Path(folder) / (name or header.run_id)
        try:
            private_folder(run_folder)
        except FileExistsError:
            raise StoreError(f"{run_folder} exists already; resume it, or give the new run another id") from None
        except OSError as error:
            raise StoreError(f"cannot create the run's folder {run_folder}: {error}") from error
        try:
            # It gets its name when it is complete, so that a crash leaves no incomplete run.
            draft = run_folder / f"{database.FILE}.new"
            database.create_tables(draft)
            with closing(database.connect_writer(draft)) as connection, reading(draft):
                row = (1, header.run_id, header.name, header.created, header.engine_version, "running")
                connection.execute("INSERT INTO run VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, codec.json_of(header)))
                if source is not None and header.fork is not None:
                    episode_rows.copy_shared(connection, source, header.fork)
            draft.rename(run_folder / database.FILE)
            return cls.open(run_folder)
        except BaseException as error:
            shutil.rmtree(run_folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise StoreError(f"cannot create the run {run_folder}: {error}; is the disk full?") from error
            raise

    @overload
    @classmethod
    def open(cls, folder: Path | str, readonly: Literal[False] = False, *, part: bool = False) -> RunStore: ...

    @overload
    @classmethod
    def open(cls, folder: Path | str, readonly: bool) -> RunReader: ...

    @classmethod
    def open(cls, folder: Path | str, readonly: bool = False, *, part: bool = False) -> RunReader:
        """Open the run in `folder`. A run of several processes is read as one; for writing, its own store is opened.

        Args:
            folder: The run's folder.
            readonly: Open it for reading only.
            part: For writing, the store is one of several of a run.

        Raises:
            StoreError: there is no run, it has another version, or (for writing) another writer has it open.
        """
        folder = Path(folder)
        path = folder / database.FILE
        if (readonly or not path.is_file()) and (reader := open_elsewhere(folder)) is not None:
            if readonly:
                return reader
            raise StoreError(
                f"{reader.shards_only} has only the shards of a run, which can be read; to write, give the folder of "
                "the run"
            )
        header = own_header(folder)
        if readonly:
            with closing(database.connect_reader(path)) as connection, reading(path):
                report_lost([folder], path, connection)
            return cls(folder, header, None, None)
        lock = RunLock(folder)
        try:
            connection = database.connect_writer(path)
            opening = (time.time(), os.getpid(), engine.__version__, codec.json_of(package_versions()))
            with reading(path):
                if not part:  # what it lost may be elsewhere; the reader of the whole run looks
                    report_lost([folder], path, connection)
                connection.execute("INSERT INTO openings VALUES (?, ?, ?, ?)", opening)
                connection.execute("UPDATE run SET status = 'running'")
                (episode_rows.clear_running if lock.was_stopped else episode_rows.count_crashes)(connection)
            opened = cls(folder, header, lock, Writer(connection, str(path), EndedList(folder)))
        except BaseException:
            lock.restore()
            lock.release()
            raise
        return opened

    # --- writing ---

    def crashes(self) -> dict[str, int]:
        """Return how many crashes of the engine each episode was running at, by episode id, without those of none; see
        `engine.store.episode_rows`."""
        return dict(
            self._rows("SELECT id, crashes FROM crash_counts JOIN episodes ON number = episode WHERE crashes > 0")
        )

    async def plan(self, tasks: Sequence[Task], samples_per_task: int) -> None:
        """Store planned episodes as pending; episodes that exist already are unchanged.

        Tasks are read and written `PLANNED` at a time, each part in one commit.
        """
        remaining = iter(tasks)
        while part := list(islice(remaining, PLANNED)):
            await self._writing().do(partial(episode_rows.plan, tasks=part, samples_per_task=samples_per_task))

    async def begin(self, task: Task, sample_index: int, *, attempt: int = 0) -> Journal:
        """Begin an episode, or continue an interrupted one.

        Args:
            task: Its task.
            sample_index: Its number among the episodes of the task.
            attempt: Number of its first attempt in this store: greater than 0 if earlier attempts were made in stores
                of other drivers.

        Returns:
            The journal of its current attempt: without entries for a new episode.

        Raises:
            StoreError: it is done, it is running already, or its task differs from the one that the run began with.
        """
        writer = self._writing()
        episode_id = episode_id_of(task.id, sample_index)
        if episode_id in self._running:
            raise StoreError(f"{episode_id} is running already")
        self._running.add(episode_id)
        try:
            fields = codec.json_of(stored_fields(task.fields))
            job = partial(episode_rows.begin, task=task, fields=fields, sample_index=sample_index, first=attempt)
            return self.journal_class(writer, self._running, episode_id, *await writer.do(job))
        except BaseException:
            self._running.discard(episode_id)
            raise

    async def begin_again(self, blames: Sequence[Blame]) -> list[str]:
        """Give a new attempt to every finished episode whose failure has one of `blames`. Old journals are kept.

        Returns:
            The ids of those episodes.

        Raises:
            StoreError: the write failed, and no episode has changed.
        """
        job = partial(episode_rows.begin_again, blames=blames, fork=self.header.fork)
        ids: list[str] = await self._writing().do(job)
        return ids

    async def drop(self, episode_ids: Sequence[str], *, keep_failed: bool = False) -> dict[int, int] | None:
        """Delete the content of a group's episodes in one commit. The space is used for the next episodes; see
        `engine.store.dropped`.

        Args:
            episode_ids: Episodes that do not run, and that nothing reads any more.
            keep_failed: Drop nothing if one of them failed.

        Returns:
            As `engine.store.dropped.drop`.

        Raises:
            StoreError: the write failed, and nothing was dropped.
        """
        job = partial(dropped.drop, episode_ids=tuple(episode_ids), keep_failed=keep_failed)
        sizes: dict[int, int] | None = await self._writing().do(job)
        return sizes

    async def put_image(self, data: bytes, mime: str | None = None) -> ImagePart:
        """Store an encoded image; the same bytes are stored once.

        Args:
            data: The file's bytes (PNG, JPEG, …).
            mime: Its media type; the default is read from the bytes.

        Returns:
            A content part that refers to it by digest.

        Raises:
            StoreError: the bytes are not an image.
        """
        image = measure(data, mime)
        if image.digest not in self._images:
            job = methodcaller("execute", "INSERT OR IGNORE INTO images VALUES (?, ?, ?, ?, ?)", astuple(image))
            await self._writing().do(job, size=len(data))
            self._images.add(image.digest)
        return ImagePart(image=image.digest, mime=image.mime, width=image.width, height=image.height)

    async def put_score(
        self,
        label: str,
        rewards: Mapping[str, Any],
        scores: Mapping[str, EpisodeScore],
        *,
        spec_path: str = "",
        replace: bool = False,
    ) -> None:
        """Store the results of finished episodes under other reward rules.

        Args:
            label: The score's label.
            rewards: The section `rewards` of the score.
            scores: The results, by episode id.
            spec_path: The file of that section.
            replace: Replace an existing score with this label.

        Raises:
            StoreError: there is a score with this label already, or the write failed.
        """
        texts = {episode: codec.json_of(score) for episode, score in scores.items()}
        job = partial(write_score, label=label, rewards=rewards, spec_path=spec_path, scores=texts, replace=replace)
        await self._writing().do(job, size=sum(map(len, texts.values())))

    def discard(self) -> bool:
        """Remove the run's folder if no episode was planned or begun; else only close the run.

        Returns:
            Whether it was removed.
        """
        self.close()
        try:
            if self._rows("SELECT 1 FROM episodes LIMIT 1"):
                return False
        except StoreError:  # on a full disk SQLite cannot even read: the run may have episodes, so it stays
            return False
        shutil.rmtree(self.folder, ignore_errors=True)
        return True

    def close(self, status: Literal["interrupted", "done"] | None = None) -> None:
        """Complete pending writes and close the run. A second call has no effect.

        Args:
            status: The new status of the run. By default `done` if episodes were planned or
                begun and all are done, else `interrupted`.
        """
        if self._writer is None or self._lock is None or self._closed:
            return
        self._closed = True
        try:
            self._writer.close()
            with closing(database.connect_writer(self.path)) as connection, reading(self.path):
                episode_rows.clear_running(connection)
                connection.execute(
                    "UPDATE run SET status = coalesce(?, (SELECT CASE count(*) WHEN 0 THEN 'interrupted' "
                    "WHEN sum(status = 'done') THEN 'done' ELSE 'interrupted' END FROM episodes))",
                    (status,),
                )
        except StoreError as error:  # all results are written; only the status is not
            log.warning("the run's status could not be written", run=self.run_id, error=str(error))
        finally:
            self._lock.mark_stopped()
            self._lock.release()

    def _writing(self) -> Writer:
        if self._writer is None:
            raise StoreError(f"{self.folder} was opened for reading; open it without `readonly` to write")
        return self._writer
