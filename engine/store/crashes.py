"""An episode -> how often it was running when the engine died.

A row exists from an episode's beginning to its end. It is marked as running while a process drives the episode. A run that is
closed normally clears the marks, so a mark that is found when the run is opened means a crash: of the machine, by `kill -9`,
or of the engine by the code of this episode. A process that stops on purpose but cannot write into the store (a full disk, an
immediate exit) marks the lock file instead (`RunLock.mark_stopped`).
"""

from __future__ import annotations

import sqlite3

TABLE = """
CREATE TABLE crash_counts (
    episode INTEGER PRIMARY KEY REFERENCES episodes (number), crashes INTEGER NOT NULL, running INTEGER NOT NULL);
"""


def mark_running(connection: sqlite3.Connection, episode: int) -> None:
    """Mark an episode as running, when it begins or is resumed."""
    connection.execute(
        "INSERT INTO crash_counts VALUES (?, 0, 1) ON CONFLICT (episode) DO UPDATE SET running = 1", (episode,)
    )


def mark_done(connection: sqlite3.Connection, episode: int) -> None:
    """Remove the row of an episode that is done."""
    connection.execute("DELETE FROM crash_counts WHERE episode = ?", (episode,))


def count_crashes(connection: sqlite3.Connection) -> None:
    """Count one crash for each episode that is still marked as running when the run is opened, and clear the marks.

    The count of an episode that got further in the dead process than ever before restarts at one: an episode that kills the
    engine does so at one place, and never gets beyond it. So a long episode survives any number of crashes that it did not cause.
    """
    connection.execute(
        "UPDATE crash_counts SET running = 0, crashes = 1 + CASE WHEN EXISTS ("
        "SELECT 1 FROM journal j JOIN episodes e ON e.number = j.episode AND e.attempt = j.attempt "
        "WHERE j.episode = crash_counts.episode "
        "AND j.at >= (SELECT at FROM openings ORDER BY rowid DESC LIMIT 1 OFFSET 1) "
        "AND j.seq > (SELECT coalesce(max(b.seq), -1) FROM journal b WHERE b.episode = j.episode AND b.attempt < j.attempt)"
        ") THEN 0 ELSE crashes END WHERE running = 1"
    )


def clear_running(connection: sqlite3.Connection) -> None:
    """Clear the running marks without counting crashes, when a run is closed normally."""
    connection.execute("UPDATE crash_counts SET running = 0 WHERE running = 1")


def crashes(connection: sqlite3.Connection) -> dict[str, int]:
    """Return how many crashes of the engine each episode was running at, by episode id; episodes without a crash are left out."""
    rows = connection.execute(
        "SELECT episodes.id, crash_counts.crashes FROM crash_counts "
        "JOIN episodes ON episodes.number = crash_counts.episode WHERE crash_counts.crashes > 0"
    )
    return dict(rows.fetchall())
