"""Which driver runs which group of episodes.

    leases = Leases(Path("runs/x/leases.db"), groups=1000)
    name, held = leases.join(0, machine="host-1", existing=[])
    answer = leases.call(0, number=1, wanted=8, done=[], faulty=[])
    leases.expire(before=time.monotonic() - 60)

A group is named by its position in the run's list of tasks. A driver asks for as many groups as it has room for; it
gets no other ones, so that number is the back-pressure.

Invariants:
- A group that is leased has one holder. A group that is taken from a driver is leased again under a greater epoch.
- A lease, and the answer that names it, are written in one commit. A driver that got no answer repeats the call under
  the same number and gets the same answer, also from a coordinator that was killed in between. So no lease is lost on
  the way.
- Only ids are stored here: the cost does not depend on the length of episodes.
"""

from __future__ import annotations

import heapq
import json
import sqlite3
import string
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from engine.errors import StoreError
from engine.schemas.base import Struct
from engine.store.private import private_file

FILE = "leases.db"
"""The file's name in a run's folder."""
EPOCH_ATTEMPTS = 1000
"""The attempts of a group's episodes begin at its epoch times this number, so that later leases have greater
attempts."""

_TABLES = """
CREATE TABLE IF NOT EXISTS groups (
    position INTEGER PRIMARY KEY, slot INTEGER, epoch INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('free', 'leased', 'done', 'faulty')));
CREATE TABLE IF NOT EXISTS calls (slot INTEGER PRIMARY KEY, number INTEGER NOT NULL, answer TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS stores (
    slot INTEGER NOT NULL, machine TEXT NOT NULL, name TEXT NOT NULL UNIQUE, PRIMARY KEY (slot, machine, name));
"""

Lease = tuple[int, int]
"""Position of a group, and the epoch of its lease."""


class LeaseAnswer(Struct, frozen=True, kw_only=True):
    """The answer to a driver's call.

    `run`: the leases, if any, are to be run; `over`: no group is left that is not done; `rejoin`: the driver's leases
    were taken from it.
    """

    word: Literal["run", "over", "rejoin"]
    leases: tuple[Lease, ...] = ()


class Counts(Struct, frozen=True, kw_only=True):
    """Number of groups in each state."""

    free: int
    leased: int
    done: int
    faulty: int


class Leases:
    """The leases of one run, in a file that one process writes.

    Args:
        path: The file; it is created if it does not exist.
        groups: Number of groups of the run.
        clock: Returns seconds; only differences count.

    Raises:
        StoreError: the file cannot be read or written, or belongs to a run with fewer groups.
    """

    def __init__(self, path: Path, groups: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._groups = groups
        self._clock = clock
        with self._reading():
            self._db = sqlite3.connect(private_file(path), isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_TABLES)
            rows = self._db.execute("SELECT position, slot, epoch, state FROM groups").fetchall()
            self._calls: dict[int, int] = dict(self._db.execute("SELECT slot, number FROM calls").fetchall())
        self._next = 1 + max((row[0] for row in rows), default=-1)
        if self._next > groups:
            raise StoreError(
                f"{path}: it has {self._next} groups, and the run has {groups}; has the file of tasks changed?"
            )
        self._free = [row[0] for row in rows if row[3] == "free"]
        heapq.heapify(self._free)
        self._epochs = Counter({position: epoch for position, _, epoch, _ in rows if epoch})
        self._held: dict[int, set[int]] = {}
        for position, slot, _, state in rows:
            if state == "leased":
                self._held.setdefault(slot, set()).add(position)
        self._done = sum(row[3] == "done" for row in rows)
        self._faulty = sum(row[3] == "faulty" for row in rows)
        now = clock()
        self._seen = dict.fromkeys(self._held, now)
        self._lost: set[int] = set()

    @property
    def counts(self) -> Counts:
        """Number of groups in each state now."""
        leased = sum(map(len, self._held.values()))
        return Counts(free=self._left, leased=leased, done=self._done, faulty=self._faulty)

    @property
    def _left(self) -> int:
        return len(self._free) + self._groups - self._next

    def join(self, slot: int, machine: str, existing: Sequence[str]) -> tuple[str, list[Lease]]:
        """Take in a driver that begins, or begins again after it died.

        Args:
            slot: Its number, from 0.
            machine: What identifies the disk on which its store lies.
            existing: Names of the stores on that disk.

        Returns:
            The name of its store, and the leases that it still holds. A driver whose store is on a disk that it no
            longer reaches gets a new name and no leases: its groups begin again elsewhere.
        """
        with self._commit() as db:
            stores = db.execute(
                "SELECT machine, name FROM stores WHERE slot = ? ORDER BY rowid DESC", (slot,)
            ).fetchall()
            name = next((store for where, store in stores if where == machine and store in existing), None)
            if name is None or name != stores[0][1]:
                self._free_again(db, self._held.pop(slot, ()))
            if name is None:  # `3`, and `3b`, `3c`, … after its disk was lost; digits and lower-case letters only
                lost, letters = len(stores), string.ascii_lowercase
                ending = "" if not lost else letters[lost] if lost < len(letters) else f"z{lost}"
                name = f"{slot}{ending}"
                db.execute("INSERT INTO stores VALUES (?, ?, ?)", (slot, machine, name))
            elif name != stores[0][1]:  # it is the newest one again
                db.execute("DELETE FROM stores WHERE name = ?", (name,))
                db.execute("INSERT INTO stores VALUES (?, ?, ?)", (slot, machine, name))
            db.execute("DELETE FROM calls WHERE slot = ?", (slot,))
        self._calls.pop(slot, None)
        self._lost.discard(slot)
        self._seen[slot] = self._clock()
        return name, [(position, self._epochs[position]) for position in sorted(self._held.get(slot, ()))]

    def call(
        self, slot: int, number: int, wanted: int, done: Sequence[int] = (), faulty: Sequence[int] = ()
    ) -> LeaseAnswer:
        """Take a driver's report, and lease groups to it.

        Args:
            slot: Its number.
            number: The number of the call, one more than that of the last call that was answered.
            wanted: Number of groups that it has room for.
            done: Groups whose rows are stored for good.
            faulty: Groups with an episode that the engine could not finish; a resume runs them again.
        """
        if slot in self._lost or slot not in self._seen:
            return LeaseAnswer(word="rejoin")
        self._seen[slot] = self._clock()
        if self._calls.get(slot) == number:
            text = self._db.execute("SELECT answer FROM calls WHERE slot = ?", (slot,)).fetchone()[0]
            return LeaseAnswer(
                word=self._word(), leases=tuple((position, epoch) for position, epoch in json.loads(text))
            )
        held = self._held.setdefault(slot, set())
        done = [position for position in done if position in held]
        faulty = [position for position in faulty if position in held]
        chosen = self._choose(wanted)
        if not done and not faulty and not chosen:
            return LeaseAnswer(word=self._word())
        leases = [(position, self._epochs[position]) for position in chosen]
        with self._commit() as db:
            db.executemany("UPDATE groups SET state = 'done' WHERE position = ?", [(position,) for position in done])
            db.executemany(
                "UPDATE groups SET state = 'faulty' WHERE position = ?", [(position,) for position in faulty]
            )
            db.executemany(
                "INSERT INTO groups VALUES (?, ?, ?, 'leased') ON CONFLICT (position) DO UPDATE SET slot = "
                "excluded.slot, state = 'leased'",
                [(position, slot, epoch) for position, epoch in leases],
            )
            db.execute("INSERT OR REPLACE INTO calls VALUES (?, ?, ?)", (slot, number, json.dumps(leases)))
        self._calls[slot] = number
        for position in chosen:
            if self._free and self._free[0] == position:
                heapq.heappop(self._free)
            else:
                self._next = position + 1
        held.difference_update(done, faulty)
        held.update(chosen)
        self._done += len(done)
        self._faulty += len(faulty)
        return LeaseAnswer(word=self._word(), leases=tuple(leases))

    def expire(self, before: float) -> list[int]:
        """Take the leases of drivers that have not called since `before`, on the scale of the clock. Returns their
        numbers."""
        silent = [slot for slot, seen in self._seen.items() if seen < before and slot not in self._lost]
        for slot in silent:
            if self._held.get(slot):
                with self._commit() as db:
                    self._free_again(db, self._held.pop(slot))
            self._lost.add(slot)
        return silent

    def restart(self, slots: int, incomplete: Iterable[int]) -> None:
        """Prepare the resume of a run.

        Args:
            slots: Number of drivers from now on: the leases of the others are free.
            incomplete: Groups that are not complete in the stores; those that are done here are free again.
        """
        with self._commit() as db:
            for slot in [slot for slot in self._held if slot >= slots]:
                self._free_again(db, self._held.pop(slot))
                self._seen.pop(slot, None)
            states = dict(db.execute("SELECT position, state FROM groups WHERE state IN ('done', 'faulty')").fetchall())
            again = [position for position in incomplete if position in states]
            self._free_again(db, again)
        self._done -= sum(states[position] == "done" for position in again)
        self._faulty -= sum(states[position] == "faulty" for position in again)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _word(self) -> Literal["run", "over"]:
        return "run" if self._left or any(self._held.values()) else "over"

    def _choose(self, wanted: int) -> list[int]:
        """The next groups: those that were taken from a driver first. Near the end a driver gets only a part of what it
        has room for."""
        if wanted <= 0 or not self._left:
            return []
        drivers = max(1, len(self._seen) - len(self._lost))
        count = min(wanted, max(1, -(-self._left // (2 * drivers))), self._left)
        again = heapq.nsmallest(count, self._free)
        return [*again, *range(self._next, self._next + count - len(again))]

    def _free_again(self, db: sqlite3.Connection, positions: Iterable[int]) -> None:
        """Let groups be leased again, under their next epochs."""
        for position in sorted(positions):
            db.execute("UPDATE groups SET state = 'free', epoch = epoch + 1 WHERE position = ?", (position,))
            self._epochs[position] += 1
            heapq.heappush(self._free, position)

    @contextmanager
    def _commit(self) -> Iterator[sqlite3.Connection]:
        with self._reading(), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            yield self._db

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(f"{self._path}: {error}; is the disk full, or the file damaged?") from error
