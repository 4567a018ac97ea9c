"""Forks, whose episodes begin with the journals of another run up to an assistant turn; and new attempts at failed
episodes.

Invariants:
- Everything that a fork shares (tasks, journals, images) is copied before it exists under its name. So it no longer
  needs the other run, and is resumed like any run.
- A new attempt keeps the journal of the old one, and deletes its trajectory, rows, rewards and scores in the same
  commit. So a reader sees one attempt of an episode, the newest; `RunReader.journal(episode, attempt)` reads the old
  one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import astuple

from engine.schemas.journal import JournalEntry
from engine.store import codec
from engine.store.database import insert
from engine.store.dropped import forget
from engine.store.episode_rows import mark_pending
from engine.store.reader import RunReader
from engine.store.reading import ENTRY

if TYPE_CHECKING:
    from engine.store.header import Fork


_DERIVED = ("trajectories", "branches", "postings", "scored")


def shared_entries(journal: Sequence[JournalEntry], turn: int) -> Sequence[JournalEntry]:
    """Return the journal entries that a fork at assistant turn `turn` shares: those before the turn, or all if there is
    no such turn."""
    replies = [at for at, entry in enumerate(journal) if entry.record.kind == "generation"]
    return journal[: replies[turn]] if turn < len(replies) else journal


def copy_shared(connection: sqlite3.Connection, source: RunReader, fork: Fork) -> None:
    """Copy the data that a fork shares into the new run's file, in one transaction.

    Raises:
        StoreError: the other run cannot be read, or an image of it is damaged.
    """
    connection.execute("BEGIN IMMEDIATE")
    for digest in source.image_digests():
        connection.execute("INSERT INTO images VALUES (?, ?, ?, ?, ?)", astuple(source.image(digest)))
    tasks: set[str] = set()
    for row in source.episodes():
        if row.task_id not in tasks:
            tasks.add(row.task_id)
            task = source.task(row.task_id)
            connection.execute("INSERT INTO tasks VALUES (?, ?, ?)", (task.id, task.index, codec.json_of(task.fields)))
        connection.execute(
            "INSERT INTO episodes (number, id, task_id, task_index, sample_index, seed, status) "
            "VALUES (?, ?, ?, ?, ?, ?, 'pending')",
            (row.number, row.id, row.task_id, row.task_index, row.sample_index, row.seed),
        )
        entries = shared_entries(source.journal(row.id), fork.turn)
        insert(connection, "journal", [(row.number, 0, *codec.entry_row(entry)) for entry in entries])
    connection.execute("COMMIT")


def begin_again(connection: sqlite3.Connection, blames: Sequence[str], fork: Fork | None) -> list[str]:
    """Give each finished episode whose failure is blamed on one of `blames` a new attempt; their ids."""
    marks = ", ".join("?" * len(blames))
    failed = connection.execute(
        f"SELECT number, id FROM episodes WHERE status = 'done' AND failure IS NOT NULL AND blame IN ({marks}) "
        "ORDER BY task_index, sample_index, number",
        tuple(blames),
    ).fetchall()
    numbers = [(number,) for number, _ in failed]
    for number, _ in failed:
        forget(connection, number)
    if fork is not None:
        for number, _ in failed:
            _keep_shared(connection, number, fork.turn)
    for table in _DERIVED:
        connection.executemany(f"DELETE FROM {table} WHERE episode = ?", numbers)
    mark_pending(connection, numbers)
    return [episode for _, episode in failed]


def _keep_shared(connection: sqlite3.Connection, number: int, turn: int) -> None:
    """Begin the next attempt's journal with what the first attempt shares with the run that was forked."""
    rows = connection.execute(
        f"SELECT {ENTRY} FROM journal WHERE episode = ? AND attempt = 0 ORDER BY seq", (number,)
    ).fetchall()
    shared = shared_entries([codec.read_entry(row) for row in rows], turn)
    keep = next((at for at, entry in enumerate(shared) if entry.record.kind == "failure"), len(shared))
    connection.execute(
        f"INSERT INTO journal SELECT episode, (SELECT attempt + 1 FROM episodes WHERE number = ?), {ENTRY} "
        "FROM journal WHERE episode = ? AND attempt = 0 AND seq < ?",
        (number, number, keep),
    )
