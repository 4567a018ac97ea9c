"""Delay of the main loop: measures whether code in this process runs in time.

A timer of the main loop fires every `TICK`. It fires late if threads hold Python's lock, the loop's own work takes long,
or the machine is loaded. Calls in threads wait for the same reasons, and their wall time counts against their deadlines.
"""

from __future__ import annotations

import asyncio

TICK = 0.05
"""Seconds between two timer events."""


class LoopDelay:
    """Sums the delays of the running loop's timer while calls run."""

    def __init__(self) -> None:
        self.calls = 0
        """Number of running calls; the timer stops at its next event if it is 0."""
        self._seconds = 0.0
        self._due = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self, loop: asyncio.AbstractEventLoop) -> float:
        """Count a call as running; return the total seconds of lag so far."""
        self.calls += 1
        if self._loop is not loop:
            self._loop, self.calls = loop, 1
            self._due = loop.time() + TICK
            loop.call_at(self._due, self._tick)
        return self._seconds

    def end(self) -> None:
        """Count a call as ended."""
        self.calls -= 1

    def since(self, before: float) -> float:
        """Return the seconds of lag since `begin` returned `before`."""
        assert self._loop is not None
        return self._seconds - before + max(0.0, self._loop.time() - self._due)

    def _tick(self) -> None:
        assert self._loop is not None
        now = self._loop.time()
        self._seconds += now - self._due
        if self.calls <= 0:
            self._loop = None
            return
        self._due = now + TICK
        self._loop.call_at(self._due, self._tick)
