"""Delay of the main loop: measures whether code in this process runs in time.

A timer of the main loop fires every `TICK`. It fires late if threads hold Python's lock, the loop's own work takes long,
or the machine is loaded. Calls in threads wait for the same reasons, and their wall time counts against their deadlines.
"""

from __future__ import annotations

import asyncio

TICK = 0.05
"""Seconds between two timer events."""


class LoopDelay:
    """Sums the delays of the running loop's timer while calls run. The caller counts calls and calls `start` for a new loop."""

    __slots__ = ("_due", "calls", "loop", "seconds")

    def __init__(self) -> None:
        self.calls = 0
        """Number of running calls; the timer stops at its next event if it is 0."""
        self.seconds = 0.0
        """Total delay so far."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """The loop whose timer runs; None: no timer runs."""
        self._due = 0.0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the timer of a loop, for the first of its calls."""
        self.loop, self.calls = loop, 1
        self._due = loop.time() + TICK
        loop.call_at(self._due, self._tick)

    def since(self, before: float) -> float:
        """Return the seconds of delay since `seconds` was `before`."""
        assert self.loop is not None
        return self.seconds - before + max(0.0, self.loop.time() - self._due)

    def _tick(self) -> None:
        assert self.loop is not None
        now = self.loop.time()
        self.seconds += now - self._due
        if self.calls <= 0:
            self.loop = None
            return
        self._due = now + TICK
        self.loop.call_at(self._due, self._tick)
