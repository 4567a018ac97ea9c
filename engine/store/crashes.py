"""Which episodes were under way when the engine died, and how often.

A row stands for an episode from its beginning to its end. It is marked in flight while a process drives the episode; a run
that is closed in order takes the marks away, so a mark that is found at the next opening is a crash: of the machine, of
somebody's `kill -9`, or of the engine by the code of this very episode. A process that stops on purpose and cannot write into
the store (a full disk, an exit at once) marks the lock's file instead (`RunLock.mark_stopped`).
"""

from __future__ import annotations

import sqlite3

TABLE = """
CREATE TABLE flights (
    episode INTEGER PRIMARY KEY REFERENCES episodes (number), crashes INTEGER NOT NULL, flying INTEGER NOT NULL);
"""


def take_off(connection: sqlite3.Connection, episode: int) -> None:
    """An episode begins, or is taken up again."""
    connection.execute(
        "INSERT INTO flights VALUES (?, 0, 1) ON CONFLICT (episode) DO UPDATE SET flying = 1", (episode,)
    )


def land(connection: sqlite3.Connection, episode: int) -> None:
    """An episode is done."""
    connection.execute("DELETE FROM flights WHERE episode = ?", (episode,))


def count_crashes(connection: sqlite3.Connection) -> None:
    """A run is opened: whatever is in flight now was so when the process before this one died.

    An episode that got further in that process than ever before starts again at one crash: an episode that kills the engine
    does so at one place, and never gets beyond it. So a long episode survives any number of deaths that it has not caused.
    """
    connection.execute(
        "UPDATE flights SET flying = 0, crashes = 1 + CASE WHEN EXISTS ("
        "SELECT 1 FROM journal j JOIN episodes e ON e.number = j.episode AND e.attempt = j.attempt "
        "WHERE j.episode = flights.episode "
        "AND j.at >= (SELECT at FROM openings ORDER BY rowid DESC LIMIT 1 OFFSET 1) "
        "AND j.seq > (SELECT coalesce(max(b.seq), -1) FROM journal b WHERE b.episode = j.episode AND b.attempt < j.attempt)"
        ") THEN 0 ELSE crashes END WHERE flying = 1"
    )


def leave_in_order(connection: sqlite3.Connection) -> None:
    """A run is closed: episodes that are not done are no longer in flight."""
    connection.execute("UPDATE flights SET flying = 0 WHERE flying = 1")


def crashes(connection: sqlite3.Connection) -> dict[str, int]:
    """By episode id: at how many deaths of the engine it was in flight; episodes that were at none are left out."""
    rows = connection.execute(
        "SELECT episodes.id, flights.crashes FROM flights JOIN episodes ON episodes.number = flights.episode "
        "WHERE flights.crashes > 0"
    )
    return dict(rows.fetchall())
