"""Slots for generations in flight, first come first served.

What `asyncio.Semaphore` does, without a coroutine where a slot is free, and without a search among those who wait.

Invariant: as many slots are given as were taken; one that is given goes to who has waited longest, so nobody overtakes.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Slots:
    """So many at once.

        if not slots.take():
            await slots.wait()
        try:
            ...
        finally:
            slots.give()

    `async with slots` does the same.

    Args:
        count: How many there are, at least 1.
    """

    __slots__ = ("_free", "_waiting")

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"{count} slots would let nobody in")
        self._free = count
        self._waiting: deque[asyncio.Future[None]] = deque()

    def take(self) -> bool:
        """Take a slot that is free; whether there was one."""
        if self._free:
            self._free -= 1
            return True
        return False

    async def wait(self) -> None:
        """Wait for a slot, and take it. Cancelled, it takes none."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was given one already
                self.give()
            raise

    def give(self) -> None:
        """Give a slot back."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    async def __aenter__(self) -> None:
        if not self.take():
            await self.wait()

    async def __aexit__(self, *_: object) -> None:
        self.give()
