"""What bounds a check: work, counted in steps, so that results do not depend on speed; a deadline for spec code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from types import FrameType

from engine.errors import EngineError


class WorkLimitError(EngineError):
    """The work of a check exceeds its budget."""

    kind = "work_limit"
    blame = "spec"

    def __init__(self, message: str = "the spec is too large to check completely") -> None:
        super().__init__(message)


@dataclass(slots=True)
class Work:
    """The remaining budget. One unit is one step of a loop, about one or two microseconds."""

    left: float = inf

    def spend(self, units: float = 1) -> None:
        """Take some units from the budget.

        Raises:
            WorkLimitError: the budget is used up.
        """
        self.left -= units
        if self.left < 0:
            raise WorkLimitError


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the code inside after `seconds`.

    Code that blocks in C is not stopped; the time limit of the whole process is. Outside of the main thread nothing is
    limited.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
