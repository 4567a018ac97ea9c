"""How late the main loop is: a measure of whether code gets its turn in this process.

A timer of the main loop rings every `TICK`. It rings late where threads hold Python's lock, the loop's own work takes long,
or the machine is loaded. Calls in threads wait for the same reasons, and their wall time counts against their deadlines.
"""

from __future__ import annotations

import asyncio

TICK = 0.05
"""Seconds between two rings."""


class Lag:
    """Sums up how late the running loop's timer rings while calls are under way."""

    def __init__(self) -> None:
        self.calls = 0
        """Calls under way; the timer stops at its next ring where there are none."""
        self._seconds = 0.0
        self._due = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self, loop: asyncio.AbstractEventLoop) -> float:
        """Count a call as under way; the seconds of lag before it."""
        self.calls += 1
        if self._loop is not loop:
            self._loop, self.calls = loop, 1
            self._due = loop.time() + TICK
            loop.call_at(self._due, self._ring)
        return self._seconds

    def end(self) -> None:
        """A call is no longer under way."""
        self.calls -= 1

    def since(self, before: float) -> float:
        """Seconds of lag since `begin` returned `before`."""
        assert self._loop is not None
        return self._seconds - before + max(0.0, self._loop.time() - self._due)

    def _ring(self) -> None:
        assert self._loop is not None
        now = self._loop.time()
        self._seconds += now - self._due
        if self.calls <= 0:
            self._loop = None
            return
        self._due = now + TICK
        self._loop.call_at(self._due, self._ring)
