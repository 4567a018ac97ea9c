"""Calls of plain code -> their results, from threads of which a hung one is replaced and holds no slot.

A thread that hangs cannot be stopped from outside. When its call is given up, another thread may take its place, so
that a hung call holds no slot; if it is busy, it is interrupted (`interrupt.py`). Threads are daemons: they do not keep
the process alive.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque

import structlog

from engine.actions.calling.code_call import CodeCall
from engine.actions.calling.interrupt import CodeThread, Interrupted, Interrupter
from engine.errors import SpecCodeError

log = structlog.get_logger(__name__)


class Threads:
    """Daemon threads, started when there are more calls than threads, up to `most` that are not given up.

    A call beyond that waits for a thread, and its deadline has not begun. All counters belong to the main loop's
    thread; the threads touch queues alone.
    """

    def __init__(self, most: int, interrupter: Interrupter) -> None:
        self._most = most
        self._interrupter = interrupter
        self._waiting: queue.SimpleQueue[CodeCall | None] = queue.SimpleQueue()
        self._finished: deque[CodeCall] = deque()
        self._waking = False
        self._open = 0
        """Number of calls that run or wait for a thread."""
        self._count = 0
        """Number of threads that are not abandoned."""

    def start(self, call: CodeCall) -> None:
        """Run a call when a thread is free.

        Raises:
            SpecCodeError: the system cannot start a thread.
        """
        self._open += 1
        self._grow()
        if self._count == 0:
            self._open -= 1
            raise SpecCodeError(
                "the system refuses to start a thread; raise its limit of processes and threads",
                blame="engine",
                kind="no_thread",
            )
        self._waiting.put(call)

    def _grow(self) -> None:
        """Start a thread if there are more calls than threads."""
        if self._open <= self._count or self._count >= self._most:
            return
        try:
            threading.Thread(target=self._work, name="episode-worker", daemon=True).start()
        except RuntimeError as error:  # the system allows no more: so many are the most
            log.warning("no more threads can be started", threads=self._count, error=str(error))
        else:
            self._count += 1

    def remaining(self, call: CodeCall, seconds: float) -> float:
        """Return the rest of a call's deadline."""
        return call.remaining(seconds)

    def abandon(self, call: CodeCall) -> bool:
        """Abandon a call; False if it has finished already and its result will arrive."""
        if not call.take():
            return False
        self._open -= 1
        if call.began is not None:
            self._count -= 1
            assert call.thread is not None
            self._interrupter.add(call.thread, call)
            self._grow()  # a call may wait for the thread that hangs
        return True

    def close(self) -> None:
        """End idle threads. Busy threads end after their call; hung threads end with the process."""
        for _ in range(self._count):
            self._waiting.put(None)
        self._count = 0

    def _work(self) -> None:
        thread = CodeThread()
        while (call := self._waiting.get()) is not None:
            call.thread = thread
            call.began = time.monotonic()
            if call.over:  # its caller gave up while it waited for a thread
                continue
            context = call.context
            del call.context
            try:
                try:
                    call.result = (context.run(call.function, *call.args), None)
                except BaseException as error:  # noqa: BLE001  (any exception is handed to the caller)
                    call.result = (None, error)
                if given_up := not call.take():
                    self._interrupter.release(thread)
            except Interrupted:  # pending when the function returned; only calls that were given up are interrupted
                given_up = True
                self._interrupter.release(thread)
            if given_up:  # another thread may have taken this one's place
                return
            self._finished.append(call)
            if not self._waking:
                self._waking = True
                try:
                    call.loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:  # the loop is closed: nobody waits any more
                    self._waking = False

    def _deliver(self) -> None:
        self._waking = False  # before the queue is emptied, or what comes then would wait for the next call
        while self._finished:
            call = self._finished.popleft()
            self._open -= 1
            call.deliver()
