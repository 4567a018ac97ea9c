"""Which stored episodes a training drops, and the compaction of a run that nobody writes: drop the content of episodes
and the images that only they show, and shrink the file.

Invariants:
- Groups are kept or dropped whole, because the advantages of an episode are computed from its group.
- A group is dropped only if the batch log says that it was consumed, in a step that no resume repeats: none after the
  oldest of the newest `checkpoints.keep` checkpoints. So a resume from any of these checkpoints finds each episode that
  it needs.
- Each group of episodes is dropped in one commit, and `VACUUM` is one transaction: a process that is killed, or a full
  disk, leaves a complete file, in which each episode has all of its content or none. The next compaction continues.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from engine.store import database
from engine.store.dropped import Dropped, Space, drop, measure, mentioned_images, read_dropped, space
from engine.store.lock import RunLock
from engine.store.reading import reading
from engine.store.store import episode_id_of
from engine.store.training import ROLLOUTS
from engine.train.batch_log import BatchLog
from engine.train.checkpoint import checkpoints_of, step_of

if TYPE_CHECKING:
    from engine.plugins.retention.spec import KeepSpec
    from engine.schemas.episode import EpisodeSpec
    from engine.train.batch_log import BatchRecord

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
                sizes = drop(connection, episodes, keep_failed=keep_failed)
            _count(compacted, sizes)
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


def _count(compacted: Compacted, sizes: dict[int, int] | None) -> None:
    compacted.failed += sizes is None
    if sizes:
        compacted.groups += 1
        compacted.episodes += len(sizes)
        compacted.size += sum(sizes.values())


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


@dataclass(slots=True)
class DropPlan:
    """The groups of a training that may be dropped, and why the others stay."""

    groups: list[list[str]] = field(default_factory=list)
    """Ids of the episodes of each group, oldest first. Of these, `keep.failures` keeps groups with a failed episode."""
    until: int = 0
    """The newest step of which groups are dropped."""
    repeated: int = 0
    """The steps after this one are repeated by a resume from the oldest checkpoint that counts; 0 without a
    checkpoint."""
    stay: Counter[str] = field(default_factory=Counter)
    """Number of consumed groups that stay, by the reason."""


def plan(
    records: Sequence[BatchRecord], keep: KeepSpec, *, repeated: int, samples: int, after: int | None = None
) -> DropPlan:
    """Choose the groups to drop.

    Args:
        records: All records of the batch log.
        keep: What stays.
        repeated: The steps after this one may be repeated by a resume.
        samples: Episodes per group.
        after: Consider only the records of steps after this one; None: all.
    """
    newest = max((record.step for record in records), default=0)
    dropped = DropPlan(until=max(0, min(repeated, newest - keep.steps)), repeated=repeated)
    for record in records:
        if after is not None and record.step <= after:
            continue
        used = set(record.used)
        for number, task_id in record.tasks.items():
            if record.step > repeated:
                dropped.stay["a resume repeats their step"] += 1
            elif record.step > dropped.until:
                dropped.stay[f"they are of the last {keep.steps} steps"] += 1
            elif keep.trained and int(number) in used:
                dropped.stay["they trained"] += 1
            elif in_sample(task_id, keep.sample):
                dropped.stay["they are in the sample"] += 1
            else:
                dropped.groups.append([episode_id_of(task_id, sample) for sample in range(samples)])
    return dropped


def in_sample(task_id: str, fraction: float) -> bool:
    """Whether a group is in the sample. It depends on its task and epoch only, so each compaction keeps the same
    groups."""
    digest = hashlib.sha256(task_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def plan_of(folder: Path, spec: EpisodeSpec, keep: KeepSpec, *, after: int | None = None) -> DropPlan:
    """Choose the groups of a training to drop, from its batch log and its checkpoints. Nothing is written.

    Raises:
        StoreError: the batch log is damaged.
    """
    assert spec.train is not None
    steps = sorted(step_of(path) for path in checkpoints_of(folder))
    repeated = min(steps[-spec.train.checkpoints.keep :], default=0)
    records = BatchLog(folder).read()
    return plan(records, keep, repeated=repeated, samples=spec.rollout.samples_per_task, after=after)


def compact_training(
    folder: Path, spec: EpisodeSpec, keep: KeepSpec, *, dry_run: bool = False
) -> tuple[DropPlan, Compacted]:
    """Drop the stored episodes of a training that nobody trains, and shrink its file.

    Args:
        folder: The training's folder.
        spec: Its spec.
        keep: What stays.
        dry_run: Write nothing, and return what would be dropped.

    Raises:
        StoreError: the training is running, or its store cannot be read or written.
        StoreError: the batch log is damaged.
    """
    dropped = plan_of(folder, spec, keep)
    work = measure_groups if dry_run else compact
    return dropped, work(folder / ROLLOUTS, dropped.groups, keep_failed=keep.failures)
