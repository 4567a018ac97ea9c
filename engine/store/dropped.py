"""An ended episode -> its summary alone: its content is deleted in one commit with the row that says so.

The content of an episode is its journals, trajectory, branches and postings. It is deleted in one commit together with
the row that says so, so an episode has all of its content or none. Scores of `engine rescore` stay.

A file gets the table `dropped`, and with it `database.COMPACTED_VERSION`, when the first episode is dropped. Engines
that do not know the table then refuse the file, instead of reading an episode without content.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.errors import StoreError
from engine.schemas.base import Struct
from engine.store import database

if TYPE_CHECKING:
    from engine.store.reader import RunReader

_TABLE = (
    "CREATE TABLE IF NOT EXISTS dropped ("
    "episode INTEGER PRIMARY KEY REFERENCES episodes (number), at REAL NOT NULL, bytes INTEGER NOT NULL)"
)
_CONTENT = {
    "journal": "coalesce(length(tokens), 0) + length(CAST(payload AS BLOB))",
    "trajectories": "length(CAST(trajectory AS BLOB))",
    "branches": "length(input_ids) + length(logprobs) + length(weight_versions) + length(CAST(spans AS BLOB))",
    "postings": "length(name) + length(cause) + length(source) + 40",
}
"""The tables with the content of episodes, each with the bytes of a row."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MENTIONS = (
    "SELECT payload FROM journal WHERE payload LIKE '%sha256:%'",
    "SELECT trajectory FROM trajectories WHERE trajectory LIKE '%sha256:%'",
    "SELECT spans FROM branches WHERE spans LIKE '%sha256:%'",
    "SELECT fields FROM tasks WHERE fields LIKE '%sha256:%'",
)


class Dropped(Struct, frozen=True, kw_only=True):
    """What was dropped from a run."""

    episodes: int = 0
    size: int = 0
    """Bytes of their content."""
    at: float = 0.0
    """Unix time of the newest drop."""


def dropped_words(store: RunReader) -> str:
    """How many episodes of a run have no content left; empty if none was dropped."""
    dropped = store.dropped()
    if not dropped.episodes:
        return ""
    return (
        f"{dropped.episodes} of {len(store.statuses())} episodes were dropped to save space (`rollout.keep`, `engine "
        "compact`): only their summaries are left, and what is shown here is of the others"
    )


class Space(Struct, frozen=True, kw_only=True):
    """The size of a run's file, in bytes."""

    file: int
    free: int
    """Pages inside the file that the next episodes use."""

    @property
    def used(self) -> int:
        """Bytes with content."""
        return self.file - self.free


def space(connection: sqlite3.Connection) -> Space:
    """Return the size of the file, with what is in the WAL."""
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return Space(file=pages * size, free=free * size)


def has_table(connection: sqlite3.Connection) -> bool:
    """Return whether an episode of this run was ever dropped."""
    return bool(connection.execute("PRAGMA user_version").fetchone()[0] == database.COMPACTED_VERSION)


def read_dropped(connection: sqlite3.Connection) -> Dropped:
    """Return what was dropped from the run."""
    if not has_table(connection):
        return Dropped()
    query = "SELECT count(*), coalesce(sum(bytes), 0), coalesce(max(at), 0.0) FROM dropped"
    counts = connection.execute(query).fetchone()
    return Dropped(**dict(zip(Dropped.__struct_fields__, counts, strict=True)))


def read_dropped_ids(connection: sqlite3.Connection) -> set[str]:
    """Return the ids of the dropped episodes."""
    if not has_table(connection):
        return set()
    return {row[0] for row in connection.execute("SELECT id FROM episodes JOIN dropped ON episode = number")}


def dropped_among(connection: sqlite3.Connection, numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return (number, attempt) of those of the episodes that were dropped."""
    if not has_table(connection):
        return []
    marks = ", ".join("?" * len(numbers))
    query = f"SELECT number, attempt FROM episodes JOIN dropped ON episode = number WHERE number IN ({marks})"
    return connection.execute(query, tuple(numbers)).fetchall()


def refuse_dropped(connection: sqlite3.Connection, number: int, episode_id: str) -> None:
    """Check that an episode has its content.

    Raises:
        StoreError: it was dropped.
    """
    if has_table(connection):
        dropped = connection.execute("SELECT at FROM dropped WHERE episode = ?", (number,)).fetchone()
        if dropped is not None:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(dropped[0]))
            raise StoreError(
                f"the content of {episode_id} was dropped on {when} to save space (`rollout.keep`, `engine compact`). "
                "Its outcome, reward, turns and tokens are in the list of `engine show`",
                kind="dropped",
            )


def measure(connection: sqlite3.Connection, episode_ids: Sequence[str], *, keep_failed: bool) -> dict[int, int] | None:
    """Return what `drop` would; arguments as there."""
    marks = ", ".join("?" * len(episode_ids))
    query = f"SELECT number, failure FROM episodes WHERE id IN ({marks}) AND status <> 'pending'"
    if has_table(connection):
        query += " AND NOT EXISTS (SELECT 1 FROM dropped WHERE episode = number)"
    rows = connection.execute(query, tuple(episode_ids)).fetchall()
    if keep_failed and any(failure is not None for _, failure in rows):
        return None
    sums = [f"(SELECT coalesce(sum({size}), 0) FROM {table} WHERE episode = :n)" for table, size in _CONTENT.items()]
    total = f"SELECT {' + '.join(sums)}"
    return {number: int(connection.execute(total, {"n": number}).fetchone()[0]) for number, _ in rows}


def drop(
    connection: sqlite3.Connection, episode_ids: Sequence[str], *, keep_failed: bool = False
) -> dict[int, int] | None:
    """Delete the content of a group's episodes, inside the caller's transaction. The caller knows that nothing reads it
    any more.

    Args:
        connection: A connection that is open for writing.
        episode_ids: The episodes of the group. Those that do not exist, are pending or were dropped are passed over.
        keep_failed: Drop nothing if one of them failed.

    Returns:
        Bytes of the content of each episode that was dropped, by its number. None: the group stays because an episode
        of it failed.
    """
    sizes = measure(connection, episode_ids, keep_failed=keep_failed)
    if not sizes:
        return sizes
    if not has_table(connection):
        connection.execute(_TABLE)
        connection.execute(f"PRAGMA user_version = {database.COMPACTED_VERSION}")
    now = time.time()
    for number, size in sizes.items():
        for table in _CONTENT:
            connection.execute(f"DELETE FROM {table} WHERE episode = ?", (number,))
        connection.execute("DELETE FROM crash_counts WHERE episode = ?", (number,))
        connection.execute("INSERT INTO dropped VALUES (?, ?, ?)", (number, now, size))
    return sizes


def forget(connection: sqlite3.Connection, number: int) -> bool:
    """Remove the mark of a dropped episode that begins again, and its scores. Returns whether it was dropped."""
    if not has_table(connection):
        return False
    marked = connection.execute("DELETE FROM dropped WHERE episode = ?", (number,)).rowcount > 0
    if marked:
        connection.execute("DELETE FROM scored WHERE episode = ?", (number,))
    return marked


def mentioned_images(connection: sqlite3.Connection) -> set[str]:
    """Return the digests of the images that a journal, trajectory or task of the run names."""
    return {digest for query in _MENTIONS for (text,) in connection.execute(query) for digest in _DIGEST.findall(text)}
