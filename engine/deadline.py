"""A call and its seconds -> an error when they are over; a pause stops all clocks together.

Among calls with the same time limit, the call that began first ends first. So one timer serves all of them, where
`asyncio.timeout` sets and cancels a timer for each.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Protocol


class Watched(Protocol):
    """A call with a deadline."""

    ends: float
    """End of its time, by `Deadlines.now`."""

    def strike(self) -> None:
        """End the call, because its time has ended. It is not watched any more."""
        ...


@dataclass(slots=True, eq=False)
class Deadlines:
    """Deadlines of one length, in one event loop at a time. One timer serves all calls.

    deadlines = Deadlines(30.0)
    deadlines.watch(call)                # call.strike() after 30 seconds
    deadlines.calls.pop(call, None)      # the call has ended

    with deadlines.begin():              # the same for code that waits
        await something()                # TimeoutError after 30 seconds
    """

    seconds: float
    """Time limit of each call."""
    calls: dict[Watched, None] = field(default_factory=dict, init=False)
    """The watched calls, the oldest first."""
    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)
    _timer: asyncio.TimerHandle | None = field(default=None, init=False)
    _still: float | None = field(default=None, init=False)
    """Time of the pause, by the loop's clock; None while the time runs."""
    _stood: float = field(default=0.0, init=False)
    """Seconds of all earlier pauses."""

    def now(self) -> float:
        """The time of the calls in seconds: the loop's clock, without the pauses."""
        return (time.monotonic() if self._still is None else self._still) - self._stood

    def watch(self, call: Watched) -> None:
        """Begin the time of a call. It ends when the call is taken out of `calls`."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._timer = loop, None
            self.calls.clear()
        call.ends = (time.monotonic() if self._still is None else self._still) - self._stood + self.seconds
        self.calls[call] = None
        if self._timer is None and self._still is None:
            self._timer = loop.call_at(call.ends + self._stood, self._ring)

    def begin(self) -> Deadline:
        """Return the deadline of a block of code; its time begins with the `with` block."""
        return Deadline(self)

    def pause(self) -> None:
        """Pause the time of all calls, and of calls that begin later."""
        if self._still is None:
            self._still = time.monotonic()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def resume(self) -> None:
        """Continue the time of all calls."""
        if self._still is None:
            return
        self._stood += time.monotonic() - self._still
        self._still = None
        loop, first = asyncio.get_running_loop(), next(iter(self.calls), None)
        if first is not None and self._timer is None and self._loop is loop:
            self._timer = loop.call_at(first.ends + self._stood, self._ring)

    def _ring(self) -> None:
        assert self._loop is not None
        now = self.now()
        self._timer = None
        late = []
        for call in self.calls:
            if call.ends > now:
                self._timer = self._loop.call_at(call.ends + self._stood, self._ring)
                break
            late.append(call)
        for call in late:
            del self.calls[call]
            call.strike()


@dataclass(slots=True, eq=False)
class Deadline:
    """The deadline of a block of code: a context manager like `asyncio.timeout`.

    Raises:
        TimeoutError: At the end of the block, if the time ended inside it.
    """

    group: Deadlines
    ends: float = field(default=0.0, init=False)
    over: bool = field(default=False, init=False)
    """Whether the time ended inside the block."""
    _task: asyncio.Task[Any] | None = field(default=None, init=False)
    _before: int = field(default=0, init=False)

    def strike(self) -> None:
        """Cancel the block, because its time has ended."""
        assert self._task is not None
        self.over = True
        self._task.cancel()

    def __enter__(self) -> Deadline:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a deadline needs a task to cancel")
        self._task = task
        self._before = task.cancelling()
        self.group.watch(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # The timer is not cancelled: a timer without effect costs less than one timer for each call.
        self.group.calls.pop(self, None)
        if self.over and self._task is not None:
            alone = self._task.uncancel() <= self._before  # a cancellation by other code stays
            if alone and kind is asyncio.CancelledError:
                raise TimeoutError from error
