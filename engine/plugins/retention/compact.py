"""Compaction of a run that nobody writes: drop the content of episodes and the images that only they show, and shrink
the file.

Invariants:
- Each group of episodes is dropped in one commit, and `VACUUM` is one transaction: a process that is killed, or a full
  disk, leaves a complete file, in which each episode has all of its content or none. The next compaction continues.
- The caller names the episodes: this module does not know which of them a resume needs.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from engine.store import database
from engine.store.dropped import Content, Dropped, Space, drop, measure, mentioned_images, read_dropped, space
from engine.store.lock import RunLock
from engine.store.reading import reading

_IMAGES_PER_COMMIT = 64


@dataclass(slots=True)
class Compacted:
    """What a compaction did, or would do."""

    before: Space
    after: Space
    """The same as `before` if nothing was written."""
    groups: int = 0
    failed: int = 0
    """Groups that stay because an episode of them failed."""
    episodes: int = 0
    size: int = 0
    """Bytes of the content of these episodes."""
    images: int = 0
    image_size: int = 0
    """Bytes of the images that no other episode shows; 0 if nothing was written."""
    total: Dropped = field(default_factory=Dropped)
    """What was dropped from the run so far, this compaction included."""
    problem: str | None = None
    """Why the file could not be shrunk; what was dropped is free space inside it."""


def measure_groups(folder: Path, groups: Iterable[Sequence[str]], *, keep_failed: bool) -> Compacted:
    """Return what `compact` would drop, without writing anything. Arguments as there.

    Raises:
        StoreError: the run cannot be read.
    """
    path = folder / database.FILE
    with closing(database.connect_reader(path)) as connection, reading(path):
        connection.execute("BEGIN")
        size = space(connection)
        compacted = Compacted(size, size)
        for episodes in groups:
            _count(compacted, measure(connection, episodes, keep_failed=keep_failed))
        compacted.total = read_dropped(connection)
        return compacted


def compact(folder: Path, groups: Iterable[Sequence[str]], *, keep_failed: bool) -> Compacted:
    """Drop the content of groups of episodes from a run that nobody writes, and give the space back to the file system.

    Args:
        folder: The run's folder.
        groups: The ids of the episodes of each group.
        keep_failed: Keep groups with a failed episode.

    Raises:
        StoreError: another process writes the run, or it cannot be written. What was dropped until then stays dropped.
    """
    path = folder / database.FILE
    with _locked(folder), closing(database.connect_writer(path)) as connection, reading(path):
        before = space(connection)
        compacted = Compacted(before, before)
        for episodes in groups:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                content = drop(connection, episodes, keep_failed=keep_failed)
            _count(compacted, content)
        _drop_images(connection, compacted)
        try:
            if space(connection).free:
                connection.execute("VACUUM")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            compacted.problem = (
                f"{path} could not be shrunk: {error}. It needs as much free space as the content that is left, in the "
                "folder of the run and in that of temporary files (SQLITE_TMPDIR). Nothing is lost; free space and run "
                "`engine compact` again"
            )
        compacted.after, compacted.total = space(connection), read_dropped(connection)
        return compacted


def _count(compacted: Compacted, content: Content) -> None:
    compacted.groups += bool(content.sizes)
    compacted.failed += content.failed
    compacted.episodes += len(content.sizes)
    compacted.size += content.size


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the run's lock. Its file gets its content back, which says how the last writer of the run ended."""
    lock = RunLock(folder)
    try:
        yield
    finally:
        lock.restore()
        lock.release()


def _drop_images(connection: sqlite3.Connection, compacted: Compacted) -> None:
    """Delete the images that no journal, trajectory or task of the run names. Only while no episode runs: it stores
    images first."""
    sizes: dict[str, int] = dict(connection.execute("SELECT digest, length(bytes) FROM images"))
    if not sizes:
        return
    named = mentioned_images(connection)
    gone = [digest for digest in sizes if digest not in named]
    for start in range(0, len(gone), _IMAGES_PER_COMMIT):
        part = gone[start : start + _IMAGES_PER_COMMIT]
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("DELETE FROM images WHERE digest = ?", [(digest,) for digest in part])
        compacted.images += len(part)
        compacted.image_size += sum(sizes[digest] for digest in part)
