"""Writes of many episodes -> commits of one thread: what is acknowledged survives, in order and without a gap.

Invariants:
- A write is durable only after the commit that holds it, and every write ends: durable with its result, or with a
  StoreError.
- All writes that are submitted during a commit form the next commit. An event loop submits what a few of its rounds
  have gathered, and is woken once per commit, however many of its tasks wait.
- A write that fails (for example a duplicate) fails alone: its commit is rolled back and each write is tried
  separately. After a failed write nothing else of that episode is written, so a journal never has a gap.
- The amount of unwritten data is bounded: if a loop has more than `BOUND` unwritten bytes, its further writes are
  parked, and who makes them waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Generator
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from engine.clocks import after_rounds
from engine.errors import EngineError, StoreError
from engine.store.database import MAX_ROWS, insert, problem
from engine.store.ended import Ended, EndedList

if TYPE_CHECKING:
    from engine.store.journal import Journal

log = structlog.get_logger(__name__)

BOUND = 64 * 2**20
"""Maximum number of unwritten bytes per event loop."""
_BATCH = 1024
"""Maximum number of writes in one commit."""
MANY = 256
"""Number of writes that are submitted without waiting for more."""
OVERHEAD = 512
"""Bytes that a write counts in addition to its payload."""
FINISHING = 64
"""Maximum number of results of one event loop that wait in memory to be written; each is several times as large as its
episode."""


class Write(msgspec.Struct, eq=False, kw_only=True):
    """One write: a journal row, or a function of the connection. Awaiting it waits for its commit, and raises its
    error.

    It is made whether somebody waits or not; cancelling who waits does not take it back.
    """

    row: tuple[Any, ...] | None = None
    job: Callable[[sqlite3.Connection], Any] | None = None
    journal: Journal | None = None
    """After one of its writes that failed, none is made."""
    weight: int = 0
    durable: bool = False
    """Whether it is committed. Set by the loop's thread, as what follows."""
    parked: bool = False
    """Whether it waits until the loop has fewer unwritten bytes. Its episode must await it, so that no more are
    parked."""
    waiter: asyncio.Future[None] | None = None
    """Made when somebody waits."""
    result: Any = None
    """What the function returned. Set by the writer, as the error."""
    error: BaseException | None = None

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.durable and self.error is None:
            if self.waiter is None or self.waiter.done():  # the task that waited was cancelled
                self.waiter = asyncio.get_running_loop().create_future()
            yield from self.waiter
        if self.error is not None:
            raise self.error
        return self.result


class Lane:
    """The queue of one event loop. Used only from that loop's thread."""

    __slots__ = ("_queue", "fresh", "loop", "parked", "places", "weight")

    def __init__(self, loop: asyncio.AbstractEventLoop, queue: SimpleQueue[tuple[Lane, list[Write]] | None]) -> None:
        self.loop = loop
        self.fresh: list[Write] = []
        self.parked: deque[Write] = deque()
        self.places = asyncio.Semaphore(FINISHING)
        """For results that wait to be written."""
        self.weight = 0
        self._queue = queue

    def put(self, write: Write, *, at_once: bool = False) -> Write:
        """Submit a write, in the order of the calls; it is parked while the bound is exceeded, unless it is put at
        once."""
        if (self.parked or self.weight > BOUND) and not at_once:
            write.parked = True
            self.parked.append(write)
            return write
        self.weight += write.weight
        self.fresh.append(write)
        if len(self.fresh) == 1:
            after_rounds(self.loop, self.submit)
        elif len(self.fresh) == MANY:
            self.submit()
        return write

    def submit(self) -> None:
        """Give the gathered writes to the writer."""
        if self.fresh:
            fresh, self.fresh = self.fresh, []
            self._queue.put((self, fresh))

    def submit_all(self) -> None:
        """Give all writes to the writer, parked ones too. Called by `close`."""
        self.fresh.extend(self.parked)
        self.weight += sum(write.weight for write in self.parked)
        self.parked.clear()
        self.submit()

    def resolve(self, writes: list[Write]) -> None:
        """End the writes of a commit, and wake all tasks that wait for them."""
        for write in writes:
            self.weight -= write.weight
            write.durable = write.error is None
            if write.waiter is not None and not write.waiter.done():
                write.waiter.set_result(None)
        while self.parked and self.weight <= BOUND:
            write = self.parked.popleft()
            write.parked = False
            self.put(write, at_once=True)


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
        self.name = name
        self._queue: SimpleQueue[tuple[Lane, list[Write]] | None] = SimpleQueue()
        self._lanes: dict[asyncio.AbstractEventLoop, Lane] = {}
        self.closed: StoreError | None = None
        """Why it takes no more writes."""
        self._dead: StoreError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="run-store", daemon=True)
        self._thread.start()

    def do(
        self,
        job: Callable[[sqlite3.Connection], Any],
        journal: Journal | None = None,
        size: int = 0,
        *,
        at_once: bool = False,
    ) -> Write:
        """Call a function with the connection inside a commit; awaiting the write returns its result.

        With `at_once` the bound is ignored; the caller bounds the number of those calls. A commit that fails is rolled
        back and tried again write by write, so the function may be called twice.

        Raises:
            StoreError: the writer is closed, or has failed.
        """
        if self.closed is not None:
            raise self.closed
        write = Write(journal=journal, job=job, weight=size + OVERHEAD)
        return self.lane().put(write, at_once=at_once)

    def lane(self) -> Lane:
        """The queue of the running event loop. Look at `closed` before anything is put there."""
        loop = asyncio.get_running_loop()
        lane = self._lanes.get(loop)
        if lane is None:
            lane = self._lanes[loop] = Lane(loop, self._queue)
        return lane

    def close(self) -> None:
        """Complete the submitted writes, then close the connection. A second call has no effect."""
        if self._closing:
            return
        self._closing = True
        self.closed = self.closed or StoreError(f"{self.name} is closed")
        for lane in list(self._lanes.values()):
            lane.submit_all()
        self._queue.put(None)
        self._thread.join()
        self._connection.close()
        if self._ended is not None:
            self._ended.close()

    # --- the thread ---

    def _work(self) -> None:
        stopping = False
        while not stopping:
            by_lane: dict[Lane, list[Write]] = {}
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

    def _serve(self, by_lane: dict[Lane, list[Write]]) -> None:
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
                self._dead = self.closed = dead
                log.error("the run store's writer failed", store=self.name, error=repr(error))
        for lane, group in by_lane.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there
                lane.loop.call_soon_threadsafe(lane.resolve, group)

    def _commit_all(self, writes: list[Write]) -> None:
        try:
            self._commit(writes)
        except Exception as error:  # noqa: BLE001  (reported to the waiting tasks)
            if len(writes) == 1:
                self._fail(writes[0], error)
                return
            for write in writes:
                self._commit_all([write])

    def _commit(self, writes: list[Write]) -> None:
        rows = []
        jobs = []
        for write in writes:
            if write.journal is not None and write.journal.failure is not None:
                raise write.journal.failure
            if write.row is not None:
                rows.append(write.row)
            else:
                jobs.append(write)
        connection = self._connection
        if not jobs and len(rows) <= MAX_ROWS:  # one statement, which is a commit by itself
            insert(connection, "journal", rows)
            return
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            # Rows first: a function that depends on a row (`finish`) was submitted after it.
            insert(connection, "journal", rows)
            for write in jobs:
                assert write.job is not None
                write.result = write.job(connection)
        if self._ended is not None and (ended := [write.result for write in jobs if isinstance(write.result, Ended)]):
            self._ended.add(ended)

    def _fail(self, write: Write, error: BaseException) -> None:
        failure = error if isinstance(error, EngineError) else self._failure(error)
        write.error = failure
        if write.journal is not None and isinstance(failure, StoreError):
            write.journal.failure = write.journal.failure or failure

    def _failure(self, error: BaseException) -> StoreError:
        if isinstance(error, StoreError):
            return error
        failure = problem(self.name, error, "write")
        failure.__cause__ = error
        return failure
