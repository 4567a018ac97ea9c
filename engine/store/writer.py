"""The thread that writes: it commits writes in groups and wakes all their waiters together.

Invariants:
- A future resolves only after the commit that holds its write, and every future resolves: with the result, or
  with a StoreError.
- All writes that are submitted during a commit form the next commit. An event loop submits once per
  iteration and is woken once per commit, however many of its tasks wait.
- A write that fails (for example a duplicate) fails alone: its commit is rolled back and each write is tried separately.
  After a failed write nothing else of that episode is written, so a journal never has a gap.
- The amount of unwritten data is bounded: if a loop has more than `BOUND` unwritten bytes, its writers wait.
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
from engine.store.database import insert, problem
from engine.store.ended import Ended, EndedList

log = structlog.get_logger(__name__)

BOUND = 64 * 2**20
"""Maximum number of unwritten bytes per event loop."""
_BATCH = 1024
"""Maximum number of writes in one commit."""
_OVERHEAD = 512
"""Bytes that a write counts in addition to its payload."""


class Track:
    """The write position in one episode's journal."""

    __slots__ = ("attempt", "broken", "closing", "next", "number")

    def __init__(self, number: int, attempt: int, next_seq: int) -> None:
        self.number = number
        self.attempt = attempt
        self.next = next_seq
        self.broken: StoreError | None = None
        """The error of the first failed write of this episode, set by the writer."""
        self.closing = False
        """Whether its last write is running."""


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
    """The queue of one event loop. Used only from that loop's thread, except where noted."""

    __slots__ = ("_queue", "fresh", "loop", "parked", "weight")

    def __init__(self, loop: asyncio.AbstractEventLoop, queue: SimpleQueue[tuple[_Lane, list[Write]] | None]) -> None:
        self.loop = loop
        self.fresh: list[Write] = []
        self.parked: deque[tuple[asyncio.Future[None], int]] = deque()
        self._queue = queue
        self.weight = 0

    def try_reserve(self, weight: int) -> bool:
        """Reserve `weight` bytes if the bound allows it, and return whether it did."""
        if self.parked or self.weight > BOUND:
            return False
        self.weight += weight
        return True

    async def reserve(self, weight: int) -> None:
        """Wait until `weight` bytes can be reserved, in the order of the calls."""
        turn: asyncio.Future[None] = self.loop.create_future()
        self.parked.append((turn, weight))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the bytes are reserved already
                self.weight -= weight
                self._grant_waiters()
            raise

    def put(self, write: Write) -> None:
        """Submit a write whose bytes are reserved."""
        if not self.fresh:
            self.loop.call_soon(self.submit)
        self.fresh.append(write)

    def submit(self) -> None:
        """Give the writes of this iteration of the loop to the writer. `close` calls it too."""
        if self.fresh:
            fresh, self.fresh = self.fresh, []
            self._queue.put((self, fresh))

    def resolve(self, writes: list[Write]) -> None:
        """Wake all tasks that waited for a commit."""
        for write in writes:
            self.weight -= write.weight
            future = write.future
            if future.done():
                continue  # the caller was cancelled; the write is still valid
            if write.error is None:
                future.set_result(write.result)
            else:
                future.set_exception(write.error)
                future.exception()  # nobody may await the future of a post; do not report its exception as never retrieved
        self._grant_waiters()

    def _grant_waiters(self) -> None:
        while self.parked and self.weight <= BOUND:
            turn, weight = self.parked.popleft()
            if not turn.done():
                self.weight += weight
                turn.set_result(None)


class Writer:
    """The owner of the writing connection. `close` completes the submitted writes.

    Args:
        connection: A connection that is open for writing, in autocommit mode.
        name: The file's name, for messages.
        ended: The list to which ended episodes are added; closed with the writer.
    """

    def __init__(self, connection: sqlite3.Connection, name: str, ended: EndedList | None = None) -> None:
        self._connection = connection
        self._ended = ended
        self._name = name
        self._queue: SimpleQueue[tuple[_Lane, list[Write]] | None] = SimpleQueue()
        self._lanes: dict[asyncio.AbstractEventLoop, _Lane] = {}
        self._closed = False
        self._dead: StoreError | None = None
        self._thread = threading.Thread(target=self._work, name="run-store", daemon=True)
        self._thread.start()

    def append(self, track: Track, row: tuple[Any, ...], size: int) -> Awaitable[None]:
        """Write a journal row; the returned awaitable is done when the row is committed. `size` is the payload's size in bytes."""
        lane = self._lane()
        weight = size + _OVERHEAD
        if not lane.try_reserve(weight):
            return self._append_late(lane, track, row, weight)
        future: asyncio.Future[Any] = lane.loop.create_future()
        lane.put(Write(future, weight, row, None, track))
        return future

    async def _append_late(self, lane: _Lane, track: Track, row: tuple[Any, ...], weight: int) -> None:
        try:
            await lane.reserve(weight)
        except asyncio.CancelledError:
            track.next -= 1  # nothing was submitted
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
        """Call a function with the connection inside a commit, and return its result when that is committed.

        With `at_once` the call ignores the bound, so cancelling the caller does not cancel the write. The caller bounds the number of those
        calls. A commit that fails is rolled back and tried again write by write, so the function may be called twice.
        """
        lane = self._lane()
        weight = size + _OVERHEAD
        if at_once:
            lane.weight += weight
        elif not lane.try_reserve(weight):
            await lane.reserve(weight)
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
        """Complete the submitted writes, then close the connection. A second call has no effect."""
        if self._closed:
            return
        self._closed = True
        for lane in list(self._lanes.values()):
            lane.submit()
        self._queue.put(None)
        self._thread.join()
        # Waiting writers would wait for a commit that never happens.
        for lane in list(self._lanes.values()):
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there
                lane.loop.call_soon_threadsafe(_reject_waiters, lane, StoreError(f"{self._name} is closed"))
        self._connection.close()
        if self._ended is not None:
            self._ended.close()

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
        except BaseException as error:  # noqa: BLE001  (no task may wait forever, whatever the error)
            dead = self._failure(error)
            for write in writes:
                write.error = write.error or dead
            if self._dead is None:
                self._dead = dead
                log.error("the run store's writer failed", store=self._name, error=repr(error))
        for lane, group in by_lane.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there
                lane.loop.call_soon_threadsafe(lane.resolve, group)

    def _commit_all(self, writes: list[Write]) -> None:
        try:
            self._commit(writes)
        except Exception as error:  # noqa: BLE001  (reported to the waiting tasks)
            self._rollback()
            if len(writes) == 1:
                self._fail(writes[0], error)
                return
            for write in writes:
                try:
                    self._commit([write])
                except Exception as own:  # noqa: BLE001  (as above)
                    self._rollback()
                    self._fail(write, own)

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
        # Rows first: a function that depends on a row (`finish`) was submitted after it.
        if rows:
            insert(connection, "journal", rows)
        for write in jobs:
            assert write.job is not None
            write.result = write.job(connection)
        connection.execute("COMMIT")
        if self._ended is not None and (ended := [each.result for each in jobs if isinstance(each.result, Ended)]):
            self._ended.add(ended)

    def _rollback(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def _fail(self, write: Write, error: BaseException) -> None:
        failure = error if isinstance(error, EngineError) else self._failure(error)
        write.error = failure
        if write.track is not None and isinstance(failure, StoreError):
            write.track.broken = failure

    def _failure(self, error: BaseException) -> StoreError:
        if isinstance(error, StoreError):
            return error
        told = problem(self._name, error, "write")
        told.__cause__ = error
        return told


def _reject_waiters(lane: _Lane, error: StoreError) -> None:
    while lane.parked:
        turn, _ = lane.parked.popleft()
        if not turn.done():
            turn.set_exception(error)
