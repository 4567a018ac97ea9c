"""Deadlines for many calls that may each take as long as the others.

Of calls with the same time allowed, the one that began first is over first. So one timer serves all of them, where
`asyncio.timeout` sets and cancels one for each.
"""

from __future__ import annotations

import asyncio
from typing import Any


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

    def begin(self) -> Deadline:
        """One call's deadline; its time begins with the `with` block."""
        return Deadline(self)

    def _add(self, call: Deadline, loop: asyncio.AbstractEventLoop) -> None:
        call.ends = loop.time() + self.seconds
        if self._loop is not loop:
            self._loop, self._timer = loop, None
            self._calls.clear()
        self._calls[call] = None
        if self._timer is None:
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
