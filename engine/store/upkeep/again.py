"""Retries of failed episodes: each begins a new attempt, and the journal of the old attempt is kept.

The trajectory, rows, rewards and scores of the old attempt are deleted in the same commit, so a reader of the run sees one
attempt of an episode, the newest. `RunReader.journal(episode, attempt)` reads the old one. In a
fork the new attempt begins with the entries that the episode shares with the other run, up to the failure if that is shared too.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.store import codec
from engine.store.episode_rows import mark_pending
from engine.store.reading import ENTRY
from engine.store.upkeep.dropped import forget
from engine.store.upkeep.fork import shared_entries

if TYPE_CHECKING:
    from engine.store.header import Fork

_DERIVED = ("trajectories", "branches", "postings", "scored")


def begin_again(connection: sqlite3.Connection, blames: Sequence[str], fork: Fork | None) -> list[str]:
    """Give each finished episode whose failure is blamed on one of `blames` a new attempt; their ids."""
    marks = ", ".join("?" * len(blames))
    found = connection.execute(
        f"SELECT number, id FROM episodes WHERE status = 'done' AND failure IS NOT NULL AND blame IN ({marks}) "
        "ORDER BY task_index, sample_index, number",
        tuple(blames),
    ).fetchall()
    numbers = [(number,) for number, _ in found]
    for number, _ in found:
        forget(connection, number)
    if fork is not None:
        for number, _ in found:
            _keep_shared(connection, number, fork.turn)
    for table in _DERIVED:
        connection.executemany(f"DELETE FROM {table} WHERE episode = ?", numbers)
    mark_pending(connection, numbers)
    return [episode for _, episode in found]


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
