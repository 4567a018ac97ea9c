"""What happens to an episode (planned, begun, begun again, finished, forked) -> the SQL statements of one commit.

Each function runs inside one commit of the writer (`engine.store.writer`).

A fork begins with the journals of another run up to an assistant turn. Everything that it shares (tasks, journals,
images) is copied before it exists under its name. So it no longer needs the other run, and is resumed like any run.

A new attempt at a failed episode keeps the journal of the old one, and deletes its trajectory, rows, rewards and scores
in the same commit. So a reader sees one attempt of an episode, the newest; `RunReader.journal(episode, attempt)` reads
the old one.

The table `crash_counts` says how often an episode was running when the engine died. It has a row from an episode's
beginning to its end, marked as running while a process drives the episode. A run that is closed normally clears the
marks, so a mark that is there when the run is opened means a crash: of the machine, by `kill -9`, or of the engine by
the code of this episode. A process that stops on purpose but cannot write into the store (a full disk, an immediate
exit) marks the lock file instead (`RunLock.mark_stopped`).
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from msgspec.structs import astuple

from engine.errors import StoreError
from engine.storable import stored_fields
from engine.store import codec, database, dropped, summaries
from engine.store.ended import Ended
from engine.store.reading import ENTRY, journal_rows

if TYPE_CHECKING:
    from engine.schemas.environment import Task
    from engine.schemas.journal import JournalEntry
    from engine.schemas.trajectory import Trajectory
    from engine.store.header import Fork
    from engine.store.reader import RunReader
    from engine.store.results import EncodedTrajectory


def episode_id_of(task_id: str, sample_index: int) -> str:
    """Return the episode's id in its run."""
    return f"{task_id}/{sample_index}"


def plan(connection: sqlite3.Connection, tasks: Sequence[Task], samples_per_task: int) -> None:
    """Store tasks, and their episodes as pending; those that exist are unchanged."""
    rows = [(task.id, task.index, codec.json_of(stored_fields(task.fields))) for task in tasks]
    connection.executemany("INSERT OR IGNORE INTO tasks VALUES (?, ?, ?)", rows)
    connection.executemany(
        "INSERT OR IGNORE INTO episodes (id, task_id, task_index, sample_index, status) VALUES (?, ?, ?, ?, 'pending')",
        [
            (episode_id_of(task.id, sample), task.id, task.index, sample)
            for task in tasks
            for sample in range(samples_per_task)
        ],
    )


def begin(
    connection: sqlite3.Connection, task: Task, fields: str, sample_index: int, first: int = 0
) -> tuple[int, int, list[Any]]:
    """Begin an episode, or continue an interrupted one.

    Args:
        connection: The writer's connection.
        task: Its task.
        fields: The task's fields as JSON.
        sample_index: Its number among the episodes of the task.
        first: Number of the attempt of an episode that has not begun in this store.

    Returns:
        Number and current attempt of the episode, and the journal rows of that attempt.

    Raises:
        StoreError: it is done, or its task differs from the one that the run began with.
    """
    _same_task(connection, task, fields)
    episode_id = episode_id_of(task.id, sample_index)
    row = connection.execute(
        "SELECT number, attempt, status, started FROM episodes WHERE id = ?", (episode_id,)
    ).fetchone()
    if row is None:
        number = connection.execute(
            "INSERT INTO episodes (id, task_id, task_index, sample_index, status, attempt, started) "
            "VALUES (?, ?, ?, ?, 'running', ?, ?)",
            (episode_id, task.id, task.index, sample_index, first, time.time()),
        ).lastrowid
        assert number is not None
        mark_running(connection, number)
        return number, first, []
    number, attempt, status, started = row
    if dropped.forget(connection, number):  # it is sampled again, after a training went back to an older checkpoint
        mark_pending(connection, [(number,)])
        attempt, status, started = attempt + 1, "pending", None
    if status == "pending" and first > attempt:
        connection.execute("UPDATE episodes SET attempt = ? WHERE number = ?", (first, number))
        attempt = first
    if status == "done":
        raise StoreError(f"{episode_id} is done; it is not run again")
    connection.execute(
        "UPDATE episodes SET status = 'running', started = ? WHERE number = ?",
        (started or time.time(), number),
    )
    mark_running(connection, number)
    return number, attempt, journal_rows(connection, number, attempt)


def mark_pending(connection: sqlite3.Connection, numbers: Sequence[tuple[int]]) -> None:
    """Give episodes, each (number,), a new attempt that has not begun, without the summary of the old one."""
    connection.executemany(
        "UPDATE episodes SET status = 'pending', attempt = attempt + 1, state = NULL, event = NULL, \"limit\" = NULL, "
        "failure = NULL, blame = NULL, solved = NULL, trainable = NULL, reward = NULL, turns = NULL, tokens = NULL, "
        "started = NULL, ended = NULL WHERE number = ?",
        numbers,
    )


def restart(connection: sqlite3.Connection, number: int, attempt: int, keep: int) -> list[Any]:
    """Begin the attempt after `attempt` with the first `keep` journal entries of the first attempt; return its journal
    rows."""
    connection.execute(
        f"INSERT INTO journal SELECT episode, ?, {ENTRY} FROM journal WHERE episode = ? AND attempt = 0 AND seq < ?",
        (attempt + 1, number, keep),
    )
    connection.execute(
        "UPDATE episodes SET attempt = ?, started = ? WHERE number = ?", (attempt + 1, time.time(), number)
    )
    return journal_rows(connection, number, attempt + 1)


def finish(
    connection: sqlite3.Connection,
    number: int,
    attempt: int,
    before: int,
    last: Sequence[tuple[Any, ...]],
    trajectory: Trajectory,
    encoded: EncodedTrajectory,
) -> Ended:
    """Write the result of an episode.

    Args:
        connection: The writer's connection.
        number: The episode's number.
        attempt: The attempt that ends.
        before: How many entries its journal has.
        last: The row of its last entry, if that is not written yet.
        trajectory: The result.
        encoded: The result in rows.

    Raises:
        StoreError: part of the journal is missing.
    """
    database.insert(connection, "journal", last)
    connection.execute("DELETE FROM crash_counts WHERE episode = ?", (number,))
    count = connection.execute(
        "SELECT count(*) FROM journal WHERE episode = ? AND attempt = ?", (number, attempt)
    ).fetchone()[0]
    entries = before + len(last)
    if count != entries:
        raise StoreError(
            f"{trajectory.episode_id}: {count} of {entries} journal entries are written; it cannot be done"
        )
    connection.execute("INSERT INTO trajectories VALUES (?, ?, ?)", (number, attempt, encoded.trajectory))
    database.insert(connection, "branches", [(number, *row) for row in encoded.branches])
    database.insert(connection, "postings", [(number, *row) for row in encoded.postings])
    connection.execute(summaries.INSERT, (number, attempt, *encoded.summary))
    outcome = trajectory.outcome
    failure = outcome.failure
    connection.execute(
        "UPDATE episodes SET status = 'done', seed = ?, state = ?, event = ?, \"limit\" = ?, failure = ?, blame = ?, "
        "solved = ?, trainable = ?, reward = ?, turns = ?, tokens = ?, ended = ? WHERE number = ?",
        (
            trajectory.seed,
            outcome.state,
            outcome.event,
            outcome.limit,
            failure.kind if failure else None,
            failure.blame if failure else None,
            outcome.solved,
            outcome.trainable,
            outcome.reward,
            len(trajectory.turns),
            sum([turn.end - turn.start for turn in trajectory.turns]),
            time.time(),
            number,
        ),
    )
    return Ended(trajectory.episode_id, attempt)


def _same_task(connection: sqlite3.Connection, task: Task, fields: str) -> None:
    stored = connection.execute("SELECT position, fields FROM tasks WHERE id = ?", (task.id,)).fetchone()
    if stored is None:
        connection.execute("INSERT INTO tasks VALUES (?, ?, ?)", (task.id, task.index, fields))
    elif stored != (task.index, fields):
        raise StoreError(
            f"task `{task.id}` is not what it was when this run began: its row or its position has changed. "
            "Resume with the tasks that the run began with, or begin a new run"
        )


def mark_running(connection: sqlite3.Connection, episode: int) -> None:
    """Mark an episode as running, when it begins or is resumed."""
    connection.execute(
        "INSERT INTO crash_counts VALUES (?, 0, 1) ON CONFLICT (episode) DO UPDATE SET running = 1", (episode,)
    )


def count_crashes(connection: sqlite3.Connection) -> None:
    """Count one crash for each episode that is still marked as running when the run is opened, and clear the marks.

    The count of an episode that got further in the dead process than ever before restarts at one: an episode that kills
    the engine does so at one place, and never gets beyond it. So a long episode survives any number of crashes that it
    did not cause.
    """
    connection.execute(
        "UPDATE crash_counts SET running = 0, crashes = 1 + CASE WHEN EXISTS ("
        "SELECT 1 FROM journal j JOIN episodes e ON e.number = j.episode AND e.attempt = j.attempt "
        "WHERE j.episode = crash_counts.episode "
        "AND j.at >= (SELECT at FROM openings ORDER BY rowid DESC LIMIT 1 OFFSET 1) "
        "AND j.seq > (SELECT coalesce(max(b.seq), -1) FROM journal b WHERE b.episode = j.episode AND b.attempt < "
        "j.attempt)"
        ") THEN 0 ELSE crashes END WHERE running = 1"
    )


def clear_running(connection: sqlite3.Connection) -> None:
    """Clear the running marks without counting crashes, when a run is closed normally."""
    connection.execute("UPDATE crash_counts SET running = 0 WHERE running = 1")


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
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        for digest in source.image_digests():
            connection.execute("INSERT INTO images VALUES (?, ?, ?, ?, ?)", astuple(source.image(digest)))
        for task_id, rows in groupby(source.episodes(), key=lambda row: row.task_id):
            task = source.task(task_id)
            values = (task.id, task.index, codec.json_of(task.fields))
            connection.execute("INSERT OR IGNORE INTO tasks VALUES (?, ?, ?)", values)
            for row in rows:
                connection.execute(
                    "INSERT INTO episodes (number, id, task_id, task_index, sample_index, seed, status) "
                    "VALUES (?, ?, ?, ?, ?, ?, 'pending')",
                    (row.number, row.id, row.task_id, row.task_index, row.sample_index, row.seed),
                )
                entries = shared_entries(source.journal(row.id), fork.turn)
                database.insert(connection, "journal", [(row.number, 0, *codec.entry_row(entry)) for entry in entries])


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
        dropped.forget(connection, number)
        if fork is not None:  # the next attempt begins with what the first one shares with the run that was forked
            shared = shared_entries([codec.read_entry(row) for row in journal_rows(connection, number, 0)], fork.turn)
            keep = next((at for at, entry in enumerate(shared) if entry.record.kind == "failure"), len(shared))
            connection.execute(
                f"INSERT INTO journal SELECT episode, (SELECT attempt + 1 FROM episodes WHERE number = ?), {ENTRY} "
                "FROM journal WHERE episode = ? AND attempt = 0 AND seq < ?",
                (number, number, keep),
            )
    for table in _DERIVED:
        connection.executemany(f"DELETE FROM {table} WHERE episode = ?", numbers)
    mark_pending(connection, numbers)
    return [episode for _, episode in failed]
