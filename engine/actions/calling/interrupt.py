"""Interrupts user code that keeps computing after its call was abandoned.

Such code holds Python's lock (the GIL) part of the time and slows down every other call. A watcher raises `Interrupted`
inside of it. Rules, so that no other code is interrupted:

- Only threads whose call was abandoned are interrupted. Their results are not used, and they end after their call.
- Only threads that have computed for `BUSY_SECONDS` since then. Waiting code costs nothing and is not interrupted.
- Only while the innermost Python frame is code of the spec. An exception inside the standard library could
  leave a lock held, for example the lock of `logging`, and block the whole process.
- Never after the thread has left the user code: `Interrupter.release` and the watcher exclude each other by a lock, and
  an exception that is pending then is raised and caught in `release`.

An exception is never withdrawn (`PyThreadState_SetAsyncExc` with NULL): CPython 3.11 would keep the flag "an exception
is pending" for the whole process, and each thread with a profiler, debugger or coverage would hang at its next call.

Code that catches `BaseException` and continues is interrupted again. Code in C that does not return cannot be
interrupted.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from engine.actions.calling.code_call import CodeCall

log = structlog.get_logger(__name__)

TICK = 0.1
"""Seconds between two checks of the threads."""
BUSY_SECONDS = 0.05
"""Seconds of CPU time after the call was abandoned from which code counts as busy."""
UNINTERRUPTIBLE_SECONDS = 5.0
"""Seconds after which busy code that interruptions have not ended is reported."""
_SHOWN = 6
"""Number of innermost frames of such code that are logged."""


class Interrupted(BaseException):
    """Raised inside code whose call was abandoned. Not an `Exception`, so that retry loops in a spec's code do not
    catch it."""


class CodeThread:
    """The current thread, which is about to run user code."""

    __slots__ = ("abandoned_at", "busy_since", "call", "clock", "ident", "interruptions", "released", "uninterruptible")

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        find = getattr(time, "pthread_getcpuclockid", None)
        self.clock: int | None = find(self.ident) if find is not None else None
        """Id of its CPU clock; None if the system has none, in which case it never counts as busy."""
        self.released = False
        """Whether it has finished running user code."""
        self.call: CodeCall | None = None
        """Its abandoned call, for messages; None if it is not known."""
        self.abandoned_at = 0.0
        """Its CPU time when the call was abandoned."""
        self.busy_since: float | None = None
        """Time at which it was first seen busy after that."""
        self.interruptions = 0
        self.uninterruptible = False

    def cpu(self) -> float:
        """CPU seconds used so far; 0 if unknown."""
        try:
            return 0.0 if self.clock is None else time.clock_gettime(self.clock)
        except OSError:  # the thread has ended
            return 0.0


@dataclass(eq=False)
class Interrupter:
    """Watches threads whose calls were abandoned and interrupts the busy ones."""

    ended: int = 0
    """Number of threads that left the user code after an interruption."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _threads: set[CodeThread] = field(default_factory=set, init=False)
    """Threads whose call was abandoned."""
    _watches: bool = field(default=False, init=False)

    @property
    def uninterruptible(self) -> int:
        """Number of threads whose code interruptions do not end."""
        with self._lock:
            return sum(thread.uninterruptible for thread in self._threads)

    @property
    def summary(self) -> str:
        """Summary of busy calls past their deadlines in one sentence; empty if there were none."""
        uninterruptible = self.uninterruptible
        if not self.ended and not uninterruptible:
            return ""
        text = (
            f"{self.ended + uninterruptible} calls kept computing after their deadline: {self.ended} were interrupted"
        )
        if uninterruptible:
            text += (
                f", {uninterruptible} cannot be interrupted and slow down all other calls; run that code with "
                "`isolation: process`"
            )
        return text

    def add(self, thread: CodeThread, call: CodeCall | None) -> None:
        """Watch a thread whose call was abandoned; the call is for messages, None if unknown."""
        with self._lock:
            if thread.released:
                return
            thread.call, thread.abandoned_at = call, thread.cpu()
            self._threads.add(thread)
            if not self._watches:
                self._watches = True
                threading.Thread(target=self._watch, name="interrupter", daemon=True).start()

    def release(self, thread: CodeThread) -> None:
        """Stop interrupting the current thread, because it has finished running user code.

        Raises:
            Interrupted: the exception that was pending; call it once more.
        """
        with self._lock:
            thread.released = True  # from here on no exception is added
            abandoned = thread in self._threads
        if not abandoned:
            return
        if thread.interruptions:
            _interrupt_thread(thread.ident)  # takes the place of one that is pending
        with self._lock:
            self._threads.remove(thread)
            self.ended += thread.interruptions > 0

    def _watch(self) -> None:
        while True:
            time.sleep(TICK)
            with self._lock:
                if not self._threads:
                    self._watches = False
                    return
                threads = list(self._threads)
            for thread in threads:
                if thread.cpu() - thread.abandoned_at >= BUSY_SECONDS:
                    self._interrupt(thread)

    def _interrupt(self, thread: CodeThread) -> None:
        now = time.monotonic()
        thread.busy_since = thread.busy_since or now
        with self._lock:
            if thread.released:
                return
            frame = sys._current_frames().get(thread.ident)
            if frame is not None and is_spec_code(frame):
                _interrupt_thread(thread.ident)
                thread.interruptions += 1
            if thread.uninterruptible or now - thread.busy_since < UNINTERRUPTIBLE_SECONDS:
                return
            thread.uninterruptible = True
            stack = traceback.format_list(traceback.extract_stack(frame))
        log.warning(
            "code keeps computing after its deadline, cannot be interrupted and slows down all calls; "
            "run it with `isolation: process`",
            function=thread.call.what if thread.call is not None else "unknown",
            episode=thread.call.episode if thread.call is not None else "unknown",
            stack="".join(stack[-_SHOWN:]),
        )


def is_spec_code(frame: FrameType) -> bool:
    """Whether a frame runs neither the standard library nor the engine."""
    name = str(frame.f_globals.get("__name__", ""))
    top = name.partition(".")[0]
    if top == "engine":
        return name.startswith("engine.environments.")
    return top not in sys.stdlib_module_names


_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc
_INTERRUPTED = ctypes.py_object(Interrupted)


def _interrupt_thread(ident: int) -> None:
    """Make a thread raise `Interrupted` at its next bytecode; the current thread raises and catches it here.

    The current thread always raises one: CPython 3.11 then clears the flag of the process that an exception is pending.
    While that is set, threads with a profiler or debugger hang, and the other thread may wait in C for long. It raises
    its own all the same.
    """
    thread, current = ctypes.c_ulong(ident), ctypes.c_ulong(threading.get_ident())
    try:
        _set_async_exc(thread, _INTERRUPTED)
        _set_async_exc(current, _INTERRUPTED)  # no Python function may begin between the two
        while True:
            pass
    except Interrupted:
        pass
