"""Forks: a new run whose episodes begin with the journals of another run, up to an assistant turn.

Invariant: everything that is shared (tasks, journals, images) is copied before the new run exists under its
name. So a fork no longer needs the other run, and is resumed like any run.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import astuple

from engine.schemas.journal import JournalEntry
from engine.store import codec
from engine.store.database import insert
from engine.store.reader import RunReader

if TYPE_CHECKING:
    from engine.store.header import Fork


def shared_entries(journal: Sequence[JournalEntry], turn: int) -> Sequence[JournalEntry]:
    """Return the journal entries that a fork at assistant turn `turn` shares: those before the turn, or all if there is no such turn."""
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
