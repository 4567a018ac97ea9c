"""Generations -> at most so many requested at once, in the order in which they came.

Invariant: work that finds no free slot is started by the work that frees one, in the same call, in the order in which
it came.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

Start = Callable[[], bool]
"""Begins work, because a slot is free. It must not raise. False: the work is not needed any more, and holds none."""


class Slots:
    """Generation slots.

        slots.take(start)       # calls start(), now or when a slot is free
        slots.end()             # the work has ended

        async with slots:       # the same for code that waits
            await something()

    Args:
        count: How many there are.
    """

    __slots__ = ("_waiting", "free")

    def __init__(self, count: int) -> None:
        self.free = count
        """Number of slots that nothing holds."""
        self._waiting: deque[Start] = deque()

    def take(self, start: Start) -> None:
        """Start work when a slot is free."""
        if not self.free:
            self._waiting.append(start)
            return
        self.free -= 1
        if not start():
            self.end()

    def end(self) -> None:
        """Give a slot to the work that has waited longest."""
        while self._waiting:
            if self._waiting.popleft()():
                return
        self.free += 1

    async def __aenter__(self) -> None:
        began = asyncio.get_running_loop().create_future()

        def start() -> bool:
            needed = not began.done()
            if needed:
                began.set_result(None)
            return needed

        self.take(start)
        try:
            await began
        except asyncio.CancelledError:
            if not began.cancelled():  # the slot was given already
                self.end()
            raise

    async def __aexit__(self, *error: object) -> None:
        self.end()
