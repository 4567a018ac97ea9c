"""Calls of `async` code -> their results, from an event loop in a thread of its own, with a watchdog that notices when
it is blocked.

The main loop passes all calls of one iteration at once, and gets all results of one iteration of this loop at
once: a burst of calls costs one wake-up in each direction. One task runs those that do not wait, one after the other,
each in a context of its own.

Every `TICK` the watchdog schedules a callback on the loop. A loop that does not run it is blocked. The stack of its
thread holds the running `Handle`. The loop says which call a step belongs to; tasks and callbacks that a call has
started have a context that names it.
The time for which a loop is blocked does not count for the deadlines of other calls on it. A loop that is blocked by an
abandoned or ended call is replaced.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
import types
from asyncio.events import Handle
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context
from types import CoroutineType, FrameType
from typing import Any
from zlib import crc32

import structlog

from engine.actions.calling.code_call import CALL, CodeCall, EpisodeScope
from engine.actions.calling.interrupt import CodeThread, Interrupted, Interrupter

log = structlog.get_logger(__name__)

TICK = 0.1
"""Seconds between two checks of the loop: the resolution of blocking times."""
WARN_SECONDS = 1.0
"""Seconds of blocking after which the log reports the loop."""
UNKNOWN_SECONDS = 5.0
"""Seconds of blocking by an unknown call after which the loop is replaced."""
MAX_THREADS = 1024
"""Maximum number of threads of `asyncio.to_thread` in user code. asyncio's own maximum, a few more than the number of
cores, would make healthy calls wait for hung ones."""
END_SECONDS = 0.5
"""Seconds that an ending loop waits for its tasks, and its owner for the loop."""
_RUN = Handle._run.__code__


class CodeLoop:
    """One event loop in its own thread, for the calls of one main loop. Blocked permanently, it calls `on_blocked` on
    the main loop, and `interrupter` ends the code that blocks it.
    """

    def __init__(self, on_blocked: Callable[[CodeLoop], None], interrupter: Interrupter) -> None:
        self._interrupter = interrupter
        self._code_thread: CodeThread | None = None
        self.blocked = 0.0
        """Total seconds for which it has been blocked."""
        self.blocker: CodeCall | None = None
        """The call that blocked it permanently, if known."""
        self.retired = False
        """Whether it no longer takes calls."""
        self._on_blocked = on_blocked
        self.main = asyncio.get_running_loop()
        """The loop whose calls it runs."""
        self._new: list[CodeCall] = []
        self._calls: dict[CodeCall, None] = {}
        """Calls without a delivered result; used only in the main loop's thread."""
        self._abandoned = False
        """Whether a call was abandoned since the last probe: it may block the loop."""
        self._finished: list[CodeCall] = []
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_report)
        self._loop.set_task_factory(_kept)
        self._loop.set_default_executor(ThreadPoolExecutor(MAX_THREADS, "code-executor"))
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._probed = self._counted = 0.0
        """Time of the last probe, and time up to which blocking is counted."""
        self._answered = True
        self._since = 0.0
        self.warned = False
        """Whether it has been blocked for `WARN_SECONDS` since the last probe."""
        self._stepping: CodeCall | None = None
        """The call of which a step runs now."""
        self._stepped: CodeCall | None = None
        self._handle: Handle | None = None
        self._suspect: CodeCall | None = None
        self._thread = threading.Thread(target=self._work, name="code-loop", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name="code-watchdog", daemon=True).start()

    # --- the main loop's thread ---

    def start(self, call: CodeCall) -> None:
        """Start a call."""
        self._calls[call] = None
        if not self._new:
            self.main.call_soon(self._hand_over)
        self._new.append(call)

    def abandon(self, call: CodeCall) -> bool:
        """Abandon a call and cancel it; False if it has already finished and its result is about to arrive."""
        if not call.take():
            return False
        self._calls.pop(call, None)
        if not self.retired:
            self._abandoned = True
            self._loop.call_soon_threadsafe(_cancel, call)
        return True

    def remaining(self, call: CodeCall, seconds: float) -> float:
        """Remaining seconds of a call's deadline. The time for which other calls blocked the loop does not count."""
        if call.began is None:
            return seconds
        with self._lock:
            silent = 0.0 if self._answered else time.monotonic() - self._counted
            by_itself = call.blocking + (silent if self._suspect is call else 0.0)
            return call.remaining(seconds) + self.blocked + silent - call.blocked - by_itself

    @property
    def blocks(self) -> bool:
        """Whether it has been blocked for `WARN_SECONDS` and still is."""
        return self.warned and not self._answered

    def close(self) -> None:
        """Take no more calls, cancel the tasks, and let the thread end."""
        self.retired = True
        self._over.set()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def join(self) -> None:
        """After `close`: wait up to `END_SECONDS` for the thread, if it is not blocked."""
        if self._answered or self._handle is None:
            self._thread.join(END_SECONDS)

    def drop(self) -> int:
        """After `close`: deliver finished calls and mark the others as lost; return the number of lost calls."""
        calls, self._calls = self._calls, {}
        for call in calls:
            call.deliver(lost=call.take())
        return sum(call.lost for call in calls)

    def _hand_over(self) -> None:
        new, self._new = self._new, []
        if not self.retired:
            self._loop.call_soon_threadsafe(self._begin, new)

    def _deliver(self, calls: list[CodeCall]) -> None:
        for call in calls:
            self._calls.pop(call, None)
            call.deliver()

    # --- the loop's own thread ---

    def _work(self) -> None:
        thread = self._code_thread = CodeThread()
        try:
            try:
                self._serve()
            finally:
                self._interrupter.release(thread)
        except Interrupted:  # it was pending when the loop ended
            self._interrupter.release(thread)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self.retired:
            try:
                self._loop.run_forever()
            except BaseException as error:  # noqa: BLE001  (a callback called `sys.exit()`: the others continue)
                log.warning("a callback of user code raised", error=repr(error))
        with suppress(BaseException):  # nothing waits for their results now
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=END_SECONDS))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())

    def _begin(self, calls: list[CodeCall]) -> None:
        self._loop.create_task(self._run(deque(calls)))

    async def _run(self, calls: deque[CodeCall]) -> None:
        """Run calls one after the other, as long as they do not wait: one that waits keeps this task, and another runs
        the rest."""
        task = asyncio.current_task()
        while calls:
            call = calls.popleft()
            if not call.untaken:
                continue
            call.began, call.blocked = time.monotonic(), self.blocked
            self._stepping = call
            context = call.context
            del call.context
            try:
                code = context.run(call.function, *call.args)
                if type(code) is not CoroutineType:
                    code = _awaiting(code)
                waited_for = context.run(code.send, None)
            except StopIteration as end:
                call.result = (end.value, None)
            except BaseException as error:  # noqa: BLE001  (any exception is passed to the caller)
                call.result = (None, error)
            else:
                self._stepping, call.task = None, task
                if calls:
                    self._loop.create_task(self._run(calls))
                    calls = deque()
                try:
                    call.result = (await self._rest(call, context, code, waited_for), None)
                except BaseException as error:  # noqa: BLE001  (as above)
                    call.result = (None, error)
                call.task = None
            self._stepping = None
            if call.take():
                if not self._finished:
                    self._loop.call_soon(self._post)
                self._finished.append(call)
            if calls and task is not None and task.cancelling():  # the call has cancelled the task that it ran in
                self._loop.create_task(self._run(calls))
                return

    @types.coroutine
    def _rest(self, call: CodeCall, context: Context, code: Any, waited_for: Any) -> Generator[Any, Any, Any]:
        """Run the rest of a coroutine that waits, each step in the call's context."""
        while True:
            try:
                sent = yield waited_for
            except BaseException as error:  # noqa: BLE001  (thrown into the code)
                step, value = code.throw, error
            else:
                step, value = code.send, sent
            self._stepping = call
            try:
                waited_for = context.run(step, value)
            except StopIteration as end:
                return end.value
            finally:
                self._stepping = None

    def _post(self) -> None:
        finished, self._finished = self._finished, []
        try:
            self.main.call_soon_threadsafe(self._deliver, finished)
        except RuntimeError:  # the main loop is closed: nothing waits for results
            self.close()

    def _answer(self) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._probed > TICK:
                self._count(now)
            self._answered = True

    # --- the watchdog's thread ---

    def _watch(self) -> None:
        while not self._over.wait(TICK):
            if self.main.is_closed():
                self.close()
                return
            if not self._answered:
                if self._check():
                    return
            elif self._calls or self._abandoned:
                with self._lock:
                    self._abandoned = self._answered = False
                    self._probed = self._counted = time.monotonic()
                    self._handle = self._suspect = self._stepped = None
                self._since = 0.0
                self.warned = False
                self._loop.call_soon_threadsafe(self._answer)

    def _check(self) -> bool:
        """Check what blocks the loop; True once the loop is to be replaced."""
        handle, stack = self._running()
        with self._lock:
            if self._answered:
                return False
            now = time.monotonic()
            stepping = self._stepping
            if handle is not self._handle or handle is None or stepping is not self._stepped:
                self._handle, self._since, self._stepped = handle, now, stepping
                self._suspect = stepping
                if stepping is None and handle is not None:  # a task or a callback that a call has started
                    self._suspect = handle._context.get(CALL)  # type: ignore[attr-defined]
            self._count(now)
            suspect, stuck = self._suspect, now - self._since
        given_up = suspect is not None and not suspect.untaken and stuck > 0
        if given_up or (suspect is None and handle is not None and stuck > UNKNOWN_SECONDS):
            self._warn("the loop is replaced", suspect, now - self._probed, stack)
            self.warned = True
            self.blocker = suspect
            if self._code_thread is not None:
                self._interrupter.add(self._code_thread, suspect)
            self._over.set()
            try:
                self.main.call_soon_threadsafe(self._on_blocked, self)
            except RuntimeError:  # the main loop is closed
                self.close()
            return True
        if not self.warned and now - self._probed > WARN_SECONDS:
            self.warned = True
            self._warn("other calls on this loop wait", suspect, now - self._probed, stack)
        return False

    def _count(self, now: float) -> None:
        """Count the blocked time up to now; the caller holds the lock."""
        self.blocked += now - self._counted
        if self._suspect is not None:
            self._suspect.blocking += now - self._counted
        self._counted = now

    def _running(self) -> tuple[Handle | None, list[str]]:
        """What the loop's thread runs now, and its stack, innermost frame last."""
        frame: FrameType | None = sys._current_frames().get(self._thread.ident or 0)
        inner = frame
        while frame is not None and frame.f_code is not _RUN:
            frame = frame.f_back
        if frame is None or inner is None:
            return None, []
        handle = frame.f_locals.get("self")
        stack = traceback.format_list(traceback.extract_stack(inner))
        return (handle if isinstance(handle, Handle) else None), stack

    def _warn(self, then: str, call: CodeCall | None, seconds: float, stack: list[str]) -> None:
        log.warning(
            f"async code blocks its event loop; {then}",
            function=call.what if call is not None else "unknown",
            episode=call.episode if call is not None else "unknown",
            seconds=round(seconds, 1),
            stack="".join(stack[-_SHOWN:]),
        )


async def _awaiting(awaitable: Any) -> Any:
    """A coroutine of what a function marked as asynchronous returned instead of one."""
    return await awaitable


_SHOWN = 6
"""Number of innermost frames of a blocked thread that are logged."""


unfinished_tasks: set[asyncio.Task[Any]] = set()
"""Tasks on code loops that have not ended. Garbage collection closes a coroutine, which runs user code in the
collecting thread and may never end: so each task is kept until it has ended."""


def _kept(loop: asyncio.AbstractEventLoop, code: Any, **options: Any) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(code, loop=loop, **options)
    unfinished_tasks.add(task)
    task.add_done_callback(unfinished_tasks.discard)
    return task


def _cancel(call: CodeCall) -> None:
    if call.task is not None:
        call.task.cancel()


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log asyncio's error reports about user code, one line each."""
    log.warning("error in async user code", said=context.get("message"), error=repr(context.get("exception")))


MAX_LOOPS = 64
"""Maximum number of code loops, not counting blocked ones that were replaced."""
_GROWTH = 4


class CodeLoops:
    """Chooses a loop for each asynchronous call: one for all episodes, and another after code has blocked one.

    Each time a loop is blocked, the number of loops grows, and an episode that lost its loop moves to another. So
    blocking code delays fewer and fewer other calls, without knowing in advance which code blocks. Used only in the
    main loop's thread.
    """

    def __init__(self, interrupter: Interrupter) -> None:
        self._interrupter = interrupter
        self._loops: dict[int, CodeLoop] = {}
        self._most = 1

    def choose(self, scope: EpisodeScope | None, tries: int = 0) -> CodeLoop:
        """Choose a loop for a call that is not bound to one and has lost its loop `tries` times; not a blocked one, if
        another is available."""
        only = self._loops.get(0) if self._most == 1 else None
        if only is not None and not (only.warned and only.blocks) and only.main is asyncio.get_running_loop():
            return only
        first = 0
        if scope is not None:
            first = crc32(f"{scope.episode}/{scope.losses + tries}".encode())
        for grown in (False, True):
            for shift in range(self._most):
                code_loop = self._at((first + shift) % self._most)
                if not code_loop.blocks:
                    return code_loop
            if not grown:
                self._most = min(MAX_LOOPS, self._most * _GROWTH)
        return self._at(first % self._most)

    def _at(self, place: int) -> CodeLoop:
        code_loop = self._loops.get(place)
        if (
            code_loop is not None and code_loop.main is not asyncio.get_running_loop()
        ):  # of another run, which has ended
            code_loop.close()
            code_loop = None
        if code_loop is None:
            code_loop = self._loops[place] = CodeLoop(self._replace, self._interrupter)
        return code_loop

    def _replace(self, code_loop: CodeLoop) -> None:
        self._loops = {place: other for place, other in self._loops.items() if other is not code_loop}
        self._most = min(MAX_LOOPS, self._most * _GROWTH)
        code_loop.close()
        lost = code_loop.drop()
        log.warning("a blocked event loop was replaced", lost_calls=lost, loops=self._most)

    def close(self) -> None:
        """End the loops. Blocked ones end with the process."""
        for code_loop in self._loops.values():
            code_loop.close()
        for code_loop in self._loops.values():
            code_loop.join()
        self._loops = {}
