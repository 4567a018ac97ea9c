"""An event loop in a thread of its own, for `async` code of others; and the watchdog that sees when it is blocked.

The main loop hands over the calls of one of its rounds together, and gets the results of one of this loop's rounds
together: a burst of calls costs one wake-up each way.

Every `TICK` the watchdog asks the loop for a sign. A loop that gives none is blocked. The stack of its thread holds the
`Handle` that runs, whose context names the call: this works for the tasks and callbacks that a call has started, too.
The time for which a loop is blocked does not count for the deadlines of other calls on it. A loop that is blocked by a
call which was given up or has ended is replaced.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from asyncio.events import Handle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType
from typing import Any

import structlog

from engine.actions.calls import CALL, Call
from engine.actions.interrupt import CodeThread, Interrupter

log = structlog.get_logger(__name__)

TICK = 0.1
"""Seconds between two looks at the loop: the resolution of what is known about blocking."""
WARN_SECONDS = 1.0
"""A loop that is blocked for so long is reported."""
UNKNOWN_SECONDS = 5.0
"""A loop that is blocked for so long by code of an unknown call is replaced."""
MAX_THREADS = 1024
"""Most threads of `asyncio.to_thread` in code of others. asyncio's own bound, a few more than there are cores, would make
healthy calls wait behind hung ones."""
END_SECONDS = 0.5
"""How long a loop that ends waits for its tasks, and its owner for the loop."""
_RUN = Handle._run.__code__


class GuestLoop:
    """One event loop in a thread of its own, for the calls of one main loop.

    Args:
        on_stuck: Called on the main loop when this loop is blocked for good, with the loop.
        interrupter: Ends busy code on this loop once it is blocked for good.
    """

    def __init__(self, on_stuck: Callable[[GuestLoop], None], interrupter: Interrupter) -> None:
        self._interrupter = interrupter
        self._code_thread: CodeThread | None = None
        self.blocked = 0.0
        """Seconds for which it has been blocked so far."""
        self.culprit: Call | None = None
        """What blocked it for good, where that is known."""
        self.retired = False
        """It takes no more calls."""
        self._on_stuck = on_stuck
        self._main = asyncio.get_running_loop()
        self._fresh: list[Call] = []
        self._calls: dict[Call, None] = {}
        """Calls that are not settled; of the main loop's thread."""
        self._left = False
        """A call was given up since the loop was last asked for a sign: it may block the loop."""
        self._finished: list[Call] = []
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_report)
        self._loop.set_task_factory(_kept)
        self._loop.set_default_executor(ThreadPoolExecutor(MAX_THREADS, "guest-executor"))
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._asked = self._counted = 0.0
        """When the loop was asked for a sign, and up to when its silence is counted."""
        self._answered = True
        self._since = 0.0
        self._told = False
        self._handle: Handle | None = None
        self._suspect: Call | None = None
        self._thread = threading.Thread(target=self._work, name="guest-loop", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name="guest-watchdog", daemon=True).start()

    @property
    def main(self) -> asyncio.AbstractEventLoop:
        """The loop whose calls it runs."""
        return self._main

    # --- the main loop's thread ---

    def start(self, call: Call) -> None:
        """Run a call."""
        self._calls[call] = None
        if not self._fresh:
            self._main.call_soon(self._hand_over)
        self._fresh.append(call)

    def leave(self, call: Call) -> bool:
        """Give a call up and cancel it; False where it has finished already, and its result is on its way."""
        if not call.take():
            return False
        self._calls.pop(call, None)
        if not self.retired:
            self._left = True
            self._loop.call_soon_threadsafe(_cancel, call)
        return True

    def left(self, call: Call, seconds: float) -> float:
        """What remains of a call's deadline: the time for which others blocked the loop does not count."""
        if call.began is None:
            return seconds
        with self._lock:
            silent = 0.0 if self._answered else time.monotonic() - self._counted
            own = call.own + (silent if self._suspect is call else 0.0)
            return call.left(seconds) + self.blocked + silent - call.blocked - own

    @property
    def blocks(self) -> bool:
        """Whether it has been blocked for a while, and still is."""
        return self._told and not self._answered

    def close(self) -> None:
        """Take no more calls, cancel the tasks, and let the thread end."""
        self.retired = True
        self._over.set()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def join(self) -> None:
        """After `close`: wait a moment for the thread, if it is not blocked."""
        if self._answered or self._handle is None:
            self._thread.join(END_SECONDS)

    def drop(self) -> int:
        """After `close`: settle the calls that have finished, and wake those that will not as lost; how many are lost."""
        calls, self._calls = self._calls, {}
        for call in calls:
            call.settle(lost=call.take())
        return sum(call.lost for call in calls)

    def _hand_over(self) -> None:
        fresh, self._fresh = self._fresh, []
        if not self.retired:
            self._loop.call_soon_threadsafe(self._begin, fresh)

    def _settle(self, calls: list[Call]) -> None:
        for call in calls:
            self._calls.pop(call, None)
            call.settle()

    # --- the loop's own thread ---

    def _work(self) -> None:
        thread = self._code_thread = CodeThread()
        try:
            self._serve()
        finally:
            self._interrupter.release(thread)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self.retired:
            try:
                self._loop.run_forever()
            except BaseException as error:  # noqa: BLE001  (a callback called `sys.exit()`: the others go on)
                log.warning("a callback of a world raised", error=repr(error))
        with suppress(BaseException):  # whatever they do now, nobody waits for it
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=END_SECONDS))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())

    def _begin(self, calls: list[Call]) -> None:
        for call in calls:
            if not call.over:
                call.task = self._loop.create_task(self._run(call), context=call.context)

    async def _run(self, call: Call) -> None:
        call.began = time.monotonic()
        call.blocked = self.blocked
        try:
            call.result = (await call.function(*call.args), None)
        except BaseException as error:  # noqa: BLE001  (any exception is handed to the caller)
            call.result = (None, error)
        call.task = None
        if not call.take():
            return
        if not self._finished:
            self._loop.call_soon(self._post)
        self._finished.append(call)

    def _post(self) -> None:
        finished, self._finished = self._finished, []
        try:
            self._main.call_soon_threadsafe(self._settle, finished)
        except RuntimeError:  # the main loop is closed: nobody waits any more
            self.close()

    def _answer(self) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._asked > TICK:
                self._count(now)
            self._answered = True

    # --- the watchdog's thread ---

    def _watch(self) -> None:
        while not self._over.wait(TICK):
            if self._main.is_closed():
                self.close()
                return
            if not self._answered:
                if self._look():
                    return
            elif self._calls or self._left:
                self._left = False
                self._ask()

    def _ask(self) -> None:
        with self._lock:
            self._answered = False
            self._asked = self._counted = time.monotonic()
            self._handle = self._suspect = None
        self._since = 0.0
        self._told = False
        self._loop.call_soon_threadsafe(self._answer)

    def _look(self) -> bool:
        """Look at what blocks the loop; True once the loop is given up."""
        handle, stack = self._running()
        with self._lock:
            if self._answered:
                return False
            now = time.monotonic()
            if handle is not self._handle or handle is None:
                self._handle, self._since = handle, now
                self._suspect = handle._context.get(CALL) if handle is not None else None  # type: ignore[attr-defined]
            self._count(now)
            suspect, stuck = self._suspect, now - self._since
        given_up = suspect is not None and suspect.over and stuck > 0
        if given_up or (suspect is None and handle is not None and stuck > UNKNOWN_SECONDS):
            self._tell("its loop is replaced", suspect, now - self._asked, stack)
            self._told = True
            self.culprit = suspect
            if self._code_thread is not None:
                self._interrupter.add(self._code_thread, suspect)
            self._over.set()
            try:
                self._main.call_soon_threadsafe(self._on_stuck, self)
            except RuntimeError:  # the main loop is closed
                self.close()
            return True
        if not self._told and now - self._asked > WARN_SECONDS:
            self._told = True
            self._tell("other calls on its loop wait", suspect, now - self._asked, stack)
        return False

    def _count(self, now: float) -> None:
        """Count the loop's silence up to now; the lock is held."""
        self.blocked += now - self._counted
        if self._suspect is not None:
            self._suspect.own += now - self._counted
        self._counted = now

    def _running(self) -> tuple[Handle | None, list[str]]:
        """What the loop's thread runs now, and its stack from the loop inwards."""
        frame: FrameType | None = sys._current_frames().get(self._thread.ident or 0)
        inner = frame
        while frame is not None and frame.f_code is not _RUN:
            frame = frame.f_back
        if frame is None or inner is None:
            return None, []
        handle = frame.f_locals.get("self")
        stack = traceback.format_list(traceback.extract_stack(inner))
        return (handle if isinstance(handle, Handle) else None), stack

    def _tell(self, then: str, call: Call | None, seconds: float, stack: list[str]) -> None:
        log.warning(
            f"async code blocks its event loop; {then}",
            function=call.what if call is not None else "unknown",
            episode=call.episode if call is not None else "unknown",
            seconds=round(seconds, 1),
            stack="".join(stack[-_SHOWN:]),
        )


_SHOWN = 6
"""Innermost frames of a blocked thread that are logged."""


_tasks: set[asyncio.Task[Any]] = set()
"""Tasks on guest loops that have not ended. A coroutine that is collected is closed, and runs code of others in whichever
thread collects it: so each is kept until it has ended."""


def hung_tasks() -> bool:
    """Whether some `async` code of others has not ended: the interpreter must not collect it, which may never end."""
    return bool(_tasks)


def _kept(loop: asyncio.AbstractEventLoop, code: Any, **options: Any) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(code, loop=loop, **options)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


def _cancel(call: Call) -> None:
    if call.task is not None:
        call.task.cancel()


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """asyncio's complaints about code of others: one line in the log."""
    log.warning("async code of a world", said=context.get("message"), error=repr(context.get("exception")))
