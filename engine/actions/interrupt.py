"""Ends code of others that goes on computing after its call was given up.

Such code takes its share of Python's lock (the GIL) and makes every other call slower. A watcher raises `Interrupted` inside
of it. Rules, so that nothing else is hit:

- Only threads whose call was given up are interrupted. Their results are not used, and they end after their call.
- Only threads that have computed for `BUSY_SECONDS` since then. Code that waits costs nothing and is left alone.
- Only while the innermost Python frame is the world's own code. An exception that comes up inside the standard library could
  leave a lock held, for example the lock of `logging`, and block the whole process.
- Never after the thread has left the code of others: `Interrupter.release` and the watcher exclude each other by a lock.

Code that catches `BaseException` and goes on is interrupted again. Code in C that does not return cannot be interrupted.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from engine.actions.calls import Call

log = structlog.get_logger(__name__)

TICK = 0.1
"""Seconds between two looks at the threads."""
BUSY_SECONDS = 0.05
"""CPU time after its call was given up from which code counts as busy."""
STUBBORN_SECONDS = 5.0
"""Busy code that interruptions have not ended after so many seconds is reported."""
_SHOWN = 6
"""Innermost frames of such code that are logged."""


class Interrupted(BaseException):
    """Raised inside code whose call was given up. Not an `Exception`, so that retry loops of a world do not catch it."""


class CodeThread:
    """The running thread, which is about to run code of others."""

    __slots__ = ("clock", "ident", "released")

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        find = getattr(time, "pthread_getcpuclockid", None)
        self.clock: int | None = find(self.ident) if find is not None else None
        """Id of its CPU clock; None where the system has none: then it is never taken for busy."""
        self.released = False
        """It has left the code of others for good."""

    def cpu(self) -> float:
        """Seconds that it has computed so far; 0 where that is not known."""
        try:
            return 0.0 if self.clock is None else time.clock_gettime(self.clock)
        except OSError:  # it has ended
            return 0.0


@dataclass
class _Busy:
    """A thread whose call was given up."""

    call: Call | None
    cpu: float
    """Its CPU time when the call was given up."""
    since: float | None = None
    """When it was first seen busy."""
    interruptions: int = 0
    stubborn: bool = False


class Interrupter:
    """Watches threads whose calls were given up and interrupts the busy ones."""

    def __init__(self) -> None:
        self.ended = 0
        """Threads that left the code of others after an interruption."""
        self._lock = threading.Lock()
        self._threads: dict[CodeThread, _Busy] = {}
        self._watches = False

    @property
    def stubborn(self) -> int:
        """Threads that still run code which interruptions do not end."""
        with self._lock:
            return sum(busy.stubborn for busy in self._threads.values())

    @property
    def summary(self) -> str:
        """What became of busy calls past their deadlines, in one sentence; empty where there were none."""
        stubborn = self.stubborn
        if not self.ended and not stubborn:
            return ""
        text = f"{self.ended + stubborn} calls went on computing past their deadline: {self.ended} were interrupted"
        if stubborn:
            text += f", {stubborn} cannot be and slow down all others; run that code with `isolation: process`"
        return text

    def add(self, thread: CodeThread, call: Call | None) -> None:
        """Watch a thread whose call was given up.

        Args:
            thread: The thread.
            call: For messages; None where it is not known.
        """
        with self._lock:
            if thread.released:
                return
            self._threads[thread] = _Busy(call, thread.cpu())
            if not self._watches:
                self._watches = True
                threading.Thread(target=self._watch, name="interrupter", daemon=True).start()

    def release(self, thread: CodeThread) -> None:
        """Never interrupt the running thread again: it has left the code of others for good.

        One exception may be pending from before. None is added while code of the engine is on top.
        """
        try:
            self._release(thread)
        except Interrupted:
            self._release(thread)

    def _release(self, thread: CodeThread) -> None:
        with self._lock:
            thread.released = True
            _raise_in(thread.ident, None)
            busy = self._threads.pop(thread, None)
            if busy is not None and busy.interruptions:
                self.ended += 1

    def _watch(self) -> None:
        while True:
            time.sleep(TICK)
            with self._lock:
                if not self._threads:
                    self._watches = False
                    return
                threads = list(self._threads.items())
            for thread, busy in threads:
                if thread.cpu() - busy.cpu >= BUSY_SECONDS:
                    self._interrupt(thread, busy)

    def _interrupt(self, thread: CodeThread, busy: _Busy) -> None:
        now = time.monotonic()
        busy.since = busy.since or now
        with self._lock:
            if thread.released:
                return
            frame = sys._current_frames().get(thread.ident)
            if frame is not None and is_worlds_own(frame):
                _raise_in(thread.ident, Interrupted)
                busy.interruptions += 1
            if busy.stubborn or now - busy.since < STUBBORN_SECONDS:
                return
            busy.stubborn = True
            stack = traceback.format_list(traceback.extract_stack(frame))
        log.warning(
            "code goes on computing after its deadline, cannot be interrupted and slows down all calls; "
            "run it with `isolation: process`",
            function=busy.call.what if busy.call is not None else "unknown",
            episode=busy.call.episode if busy.call is not None else "unknown",
            stack="".join(stack[-_SHOWN:]),
        )


def is_worlds_own(frame: FrameType) -> bool:
    """Whether a frame runs neither the standard library nor the engine."""
    name = str(frame.f_globals.get("__name__", ""))
    top = name.partition(".")[0]
    if top == "engine":
        return name.startswith("engine.environments.")
    return top not in sys.stdlib_module_names


def _raise_in(ident: int, error: type[BaseException] | None) -> None:
    """Have a thread raise an exception at its next bytecode; None takes a pending one back. It holds the GIL throughout."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(error) if error else None)
