"""One thread that writes: group commits, and everybody who waited is woken at once.

Invariants:
- A future resolves only after the commit that holds its write, and every future resolves: with the result, or
  with a StoreError.
- Everything handed over while a commit was under way is the next commit. An event loop hands over once an
  iteration and is woken once a commit, however many of its tasks wait.
- One write that fails (a duplicate, say) fails alone: its batch is taken back and each write tried by itself.
  After a failed write nothing more of that episode is written, so a journal never has a gap.
- What waits to be written is bounded: a loop with more than `BOUND` bytes under way makes its writers wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import structlog

from engine.errors import EngineError, StoreError
from engine.store.database import advice, insert

log = structlog.get_logger(__name__)

BOUND = 64 * 2**20
"""Bytes that one event loop may have under way."""
_BATCH = 1024
"""Most writes in one commit."""
_OVERHEAD = 512
"""What a write weighs beside its payload."""


class Track:
    """Where one episode's journal stands."""

    __slots__ = ("attempt", "broken", "closing", "next", "number")

    def __init__(self, number: int, attempt: int, next_seq: int) -> None:
        self.number = number
        self.attempt = attempt
        self.next = next_seq
        self.broken: StoreError | None = None
        """Set by the writer once a write of this episode failed."""
        self.closing = False
        """Its last write is under way."""


class Write(msgspec.Struct, eq=False):
    """One write: a journal row, or a function of the connection."""

    future: asyncio.Future[Any]
    weight: int
    row: tuple[Any, ...] | None
    job: Callable[[sqlite3.Connection], Any] | None
    track: Track | None
    result: Any = None
    error: BaseException | None = None


class _Lane:
    """One event loop's side. Touched from that loop's thread alone, except where noted."""

    __slots__ = ("_queue", "fresh", "loop", "parked", "weight")

    def __init__(self, loop: asyncio.AbstractEventLoop, queue: SimpleQueue[tuple[_Lane, list[Write]] | None]) -> None:
        self.loop = loop
        self.fresh: list[Write] = []
        self.parked: deque[tuple[asyncio.Future[None], int]] = deque()
        self._queue = queue
        self.weight = 0

    def take_room(self, weight: int) -> bool:
        """Whether there was room for a write of this weight; it is taken then."""
        if self.parked or self.weight > BOUND:
            return False
        self.weight += weight
        return True

    async def wait_for_room(self, weight: int) -> None:
        """Wait until there is room and take it, first come first served."""
        turn: asyncio.Future[None] = self.loop.create_future()
        self.parked.append((turn, weight))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # room was taken already
                self.weight -= weight
                self._admit()
            raise

    def put(self, write: Write) -> None:
        """Hand over a write for which room was taken."""
        if not self.fresh:
            self.loop.call_soon(self.hand_over)
        self.fresh.append(write)

    def hand_over(self) -> None:
        """Give the writer what this iteration of the loop brought. (`close` calls it too.)"""
        if self.fresh:
            fresh, self.fresh = self.fresh, []
            self._queue.put((self, fresh))

    def settle(self, writes: list[Write]) -> None:
        """Wake everybody who waited for a commit."""
        for write in writes:
            self.weight -= write.weight
            future = write.future
            if future.done():
                continue  # cancelled: the write stands all the same
            if write.error is None:
                future.set_result(write.result)
            else:
                future.set_exception(write.error)
                future.exception()  # whoever posted it may be gone: that is no error of its own
        self._admit()

    def _admit(self) -> None:
        while self.parked and self.weight <= BOUND:
            turn, weight = self.parked.popleft()
            if not turn.done():
                self.weight += weight
                turn.set_result(None)


class Writer:
    """Owns the writing connection. `close` drains what was handed over.

    Args:
        connection: Open for writing, in autocommit mode.
        name: Of the file, for messages.
    """

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        self._connection = connection
        self._name = name
        self._queue: SimpleQueue[tuple[_Lane, list[Write]] | None] = SimpleQueue()
        self._lanes: dict[asyncio.AbstractEventLoop, _Lane] = {}
        self._closed = False
        self._dead: StoreError | None = None
        self._thread = threading.Thread(target=self._work, name="run-store", daemon=True)
        self._thread.start()

    def append(self, track: Track, row: tuple[Any, ...], size: int) -> Awaitable[None]:
        """Write a journal row; what is returned is done when it is committed. `size` is its payload's, in bytes."""
        lane = self._lane()
        weight = size + _OVERHEAD
        if not lane.take_room(weight):
            return self._append_late(lane, track, row, weight)
        future: asyncio.Future[Any] = lane.loop.create_future()
        lane.put(Write(future, weight, row, None, track))
        return future

    async def _append_late(self, lane: _Lane, track: Track, row: tuple[Any, ...], weight: int) -> None:
        try:
            await lane.wait_for_room(weight)
        except asyncio.CancelledError:
            track.next -= 1  # nothing was handed over
            raise
        future: asyncio.Future[Any] = lane.loop.create_future()
        lane.put(Write(future, weight, row, None, track))
        await future

    async def do(
        self,
        job: Callable[[sqlite3.Connection], Any],
        track: Track | None = None,
        size: int = 0,
        *,
        at_once: bool = False,
    ) -> Any:
        """Run a function of the connection inside a commit; returns its result when it is committed.

        With `at_once` it never waits for room, so cancelling the caller does not cancel the write. The caller bounds how many of those
        there are. A commit that fails is taken back and tried again write by write, so the function may run twice.
        """
        lane = self._lane()
        weight = size + _OVERHEAD
        if at_once:
            lane.weight += weight
        elif not lane.take_room(weight):
            await lane.wait_for_room(weight)
        future: asyncio.Future[Any] = lane.loop.create_future()
        lane.put(Write(future, weight, None, job, track))
        return await future

    def _lane(self) -> _Lane:
        if self._closed or self._dead is not None:
            raise self._dead or StoreError(f"{self._name} is closed")
        loop = asyncio.get_running_loop()
        lane = self._lanes.get(loop)
        if lane is None:
            lane = self._lanes[loop] = _Lane(loop, self._queue)
        return lane

    def close(self) -> None:
        """Write what was handed over, then close the connection. Doing it twice is harmless."""
        if self._closed:
            return
        self._closed = True
        for lane in list(self._lanes.values()):
            lane.hand_over()
        self._queue.put(None)
        self._thread.join()
        # Parked writers would wait for a commit that never comes.
        for lane in list(self._lanes.values()):
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there
                lane.loop.call_soon_threadsafe(_turn_away, lane, StoreError(f"{self._name} is closed"))
        self._connection.close()

    # --- the thread ---

    def _work(self) -> None:
        stopping = False
        while not stopping:
            by_lane: dict[_Lane, list[Write]] = {}
            count = 0
            handed = self._queue.get()
            with contextlib.suppress(Empty):
                while handed is not None:
                    lane, writes = handed
                    by_lane.setdefault(lane, []).extend(writes)
                    count += len(writes)
                    if count >= _BATCH:
                        break
                    handed = self._queue.get_nowait()
            stopping = handed is None
            if by_lane:
                self._serve(by_lane)

    def _serve(self, by_lane: dict[_Lane, list[Write]]) -> None:
        writes = [write for group in by_lane.values() for write in group]
        try:
            if self._dead is not None:
                raise self._dead
            self._commit_all(writes)
        except BaseException as error:  # noqa: BLE001  (nobody may wait for ever, whatever broke here)
            dead = self._failure(error)
            for write in writes:
                write.error = write.error or dead
            if self._dead is None:
                self._dead = dead
                log.error("the run store's writer failed", store=self._name, error=repr(error))
        for lane, group in by_lane.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there
                lane.loop.call_soon_threadsafe(lane.settle, group)

    def _commit_all(self, writes: list[Write]) -> None:
        try:
            self._commit(writes)
        except Exception as error:  # noqa: BLE001  (told to whoever waits)
            self._take_back()
            if len(writes) == 1:
                self._refuse(writes[0], error)
                return
            for write in writes:
                try:
                    self._commit([write])
                except Exception as own:  # noqa: BLE001  (as above)
                    self._take_back()
                    self._refuse(write, own)

    def _commit(self, writes: list[Write]) -> None:
        rows = []
        jobs = []
        for write in writes:
            if write.track is not None and write.track.broken is not None:
                raise write.track.broken
            if write.row is not None:
                rows.append(write.row)
            else:
                jobs.append(write)
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        # Rows first: a function that depends on a row (`finish`) was handed over after it.
        if rows:
            insert(connection, "journal", rows)
        for write in jobs:
            assert write.job is not None
            write.result = write.job(connection)
        connection.execute("COMMIT")

    def _take_back(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def _refuse(self, write: Write, error: BaseException) -> None:
        failure = error if isinstance(error, EngineError) else self._failure(error)
        write.error = failure
        if write.track is not None and isinstance(failure, StoreError):
            write.track.broken = failure

    def _failure(self, error: BaseException) -> StoreError:
        if isinstance(error, StoreError):
            return error
        told = StoreError(f"cannot write {self._name}: {error or type(error).__name__}{advice(error)}")
        told.__cause__ = error
        return told


def _turn_away(lane: _Lane, error: StoreError) -> None:
    while lane.parked:
        turn, _ = lane.parked.popleft()
        if not turn.done():
            turn.set_exception(error)
