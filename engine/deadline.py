"""Deadlines for many calls that may each take as long as the others, and clocks that stand still together.

Of calls with the same time allowed, the one that began first is over first. So one timer serves all of them, where
`asyncio.timeout` sets and cancels one for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol


class Clock(Protocol):
    """Something that measures time and can stand still."""

    def pause(self) -> None:
        """Stand still."""
        ...

    def resume(self) -> None:
        """Go on, with as much time left as when it stood still."""
        ...


class Standstill:
    """Clocks that stand still together. It is a clock too; one that was paused twice goes on after the second `resume`."""

    def __init__(self) -> None:
        self._clocks: dict[Clock, None] = {}
        self._pauses = 0

    @property
    def standing(self) -> bool:
        """Whether the clocks stand still now."""
        return self._pauses > 0

    def add(self, clock: Clock) -> None:
        """Have a clock stand still with the others, at once if they do."""
        self._clocks[clock] = None
        if self._pauses:
            clock.pause()

    def remove(self, clock: Clock) -> None:
        """Leave a clock to itself. If it stands still it goes on."""
        if self._clocks.pop(clock, clock) is None and self._pauses:
            clock.resume()

    def pause(self) -> None:
        """Stand still."""
        self._pauses += 1
        if self._pauses == 1:
            for clock in list(self._clocks):
                clock.pause()

    def resume(self) -> None:
        """Go on."""
        self._pauses -= 1
        if not self._pauses:
            for clock in list(self._clocks):
                clock.resume()

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        """`asyncio.timeout` that stands still with the others.

        Raises:
            TimeoutError: the block took longer.
        """
        async with asyncio.timeout(seconds) as limit:
            clock = _Timeout(limit)
            self.add(clock)
            try:
                yield
            finally:
                self.remove(clock)


class _Timeout:
    """An `asyncio.timeout` as a clock."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self._limit = limit
        self._left: float | None = None

    def pause(self) -> None:
        when = self._limit.when()
        if when is not None and not self._limit.expired():
            self._left = when - asyncio.get_running_loop().time()
            self._limit.reschedule(None)

    def resume(self) -> None:
        if self._left is not None:
            self._limit.reschedule(asyncio.get_running_loop().time() + self._left)
            self._left = None


class Deadlines:
    """Deadlines of one length, in one event loop at a time.

        deadlines = Deadlines(30.0)
        with deadlines.begin():
            await something()           # TimeoutError after 30 seconds

    Args:
        seconds: What each call may take.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._calls: dict[Deadline, None] = {}
        """Calls under way, the oldest first."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._still: float | None = None
        """When the calls' time stood still, by the loop's clock; None while it runs."""

    def pause(self) -> None:
        """Have the time of all calls stand still. Of those that begin now, too."""
        if self._still is None:
            self._still = asyncio.get_running_loop().time()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def resume(self) -> None:
        """Have it go on."""
        if self._still is None:
            return
        loop = asyncio.get_running_loop()
        stood, self._still = loop.time() - self._still, None
        if self._loop is not loop:
            return
        for call in self._calls:
            call.ends += stood
        first = next(iter(self._calls), None)
        if first is not None and self._timer is None:
            self._timer = loop.call_at(first.ends, self._ring)

    def begin(self) -> Deadline:
        """One call's deadline; its time begins with the `with` block."""
        return Deadline(self)

    def _add(self, call: Deadline, loop: asyncio.AbstractEventLoop) -> None:
        call.ends = (loop.time() if self._still is None else self._still) + self.seconds
        if self._loop is not loop:
            self._loop, self._timer = loop, None
            self._calls.clear()
        self._calls[call] = None
        if self._timer is None and self._still is None:
            self._timer = loop.call_at(call.ends, self._ring)

    def _ring(self) -> None:
        assert self._loop is not None
        now = self._loop.time()
        self._timer = None
        late = []
        for call in self._calls:
            if call.ends > now:
                self._timer = self._loop.call_at(call.ends, self._ring)
                break
            late.append(call)
        for call in late:
            del self._calls[call]
            call.strike()


class Deadline:
    """One call's deadline: a context manager around what it waits for, as `asyncio.timeout` is.

    Raises:
        TimeoutError: on leaving the block, where the time ended in it.
    """

    __slots__ = ("_before", "_group", "_task", "ends", "over")

    def __init__(self, group: Deadlines) -> None:
        self._group = group
        self._task: asyncio.Task[Any] | None = None
        self._before = 0
        self.ends = 0.0
        """By the loop's clock."""
        self.over = False
        """The time ended inside the block."""

    def strike(self) -> None:
        """The time is over: cancel what is waited for."""
        assert self._task is not None
        self.over = True
        self._task.cancel()

    def __enter__(self) -> Deadline:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        if task is None:
            raise RuntimeError("a deadline needs a task to cancel")
        self._task = task
        self._before = task.cancelling()
        self._group._add(self, loop)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # The timer is left to ring for nothing: that is cheaper than setting it anew for each call.
        self._group._calls.pop(self, None)
        if self.over and self._task is not None:
            alone = self._task.uncancel() <= self._before  # cancelled from outside as well: then that is what happened
            if alone and kind is asyncio.CancelledError:
                raise TimeoutError from error
