"""Limits of requests and tokens a minute.

Invariant: over any time `t`, at most `limit * (1 + t / 60)` requests, and tokens as estimated, are sent; a request that
is larger than a minute's tokens is sent alone, when a whole minute's tokens are free.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

_MINUTE = 60.0
_ROUNDING = 1e-6
"""Seconds below which a wait is an error of rounding."""


class _Bucket:
    """Amounts that become free at a constant rate, up to those of one minute."""

    __slots__ = ("_at", "_free", "_limit")

    def __init__(self, limit: int, now: float) -> None:
        self._limit = self._free = float(limit)
        self._at = now

    def seconds(self, amount: float, now: float) -> float:
        """Seconds until `amount` is free; of more than a minute's, until all of it is."""
        self._free = min(self._limit, self._free + (now - self._at) * self._limit / _MINUTE)
        self._at = now
        return max(0.0, (min(amount, self._limit) - self._free) * _MINUTE / self._limit)

    def take(self, amount: float) -> None:
        """Take an amount (or give it back, if negative); what is missing has to become free first."""
        self._free = min(self._limit, self._free - amount)


class Pace:
    """Makes requests wait, first come, first served, so that the limits of an API are kept.

        pace = Pace(requests=500, tokens=30_000)
        await pace.take(1200)           # an estimate: prompt and longest reply
        pace.correct(1200, 800)         # what the API counted

    Args:
        requests: Requests a minute; None: any number.
        tokens: Tokens a minute; None: any number.
        clock: The time in seconds.
        sleep: Waits for some seconds.
    """

    def __init__(
        self,
        requests: int | None,
        tokens: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._requests = None if requests is None else _Bucket(requests, clock())
        self._tokens = None if tokens is None else _Bucket(tokens, clock())
        self._turn = asyncio.Lock()
        self._rests_until = 0.0
        self.waited = 0.0
        """Seconds that requests waited, the waiting in line not counted."""

    async def take(self, tokens: int) -> None:
        """Wait until a request with so many tokens may be sent."""
        if self._requests is None and self._tokens is None and self._rests_until <= self._clock():
            return
        async with self._turn:
            while (seconds := self._seconds(tokens)) > _ROUNDING:
                self.waited += seconds
                await self._sleep(seconds)
            if self._requests is not None:
                self._requests.take(1)
            if self._tokens is not None:
                self._tokens.take(tokens)

    def _seconds(self, tokens: int) -> float:
        now = self._clock()
        wants = ((self._requests, 1), (self._tokens, tokens))
        rest = self._rests_until - now
        return max([rest, *(bucket.seconds(amount, now) for bucket, amount in wants if bucket is not None)])

    def rest(self, seconds: float) -> None:
        """Let no request begin for some seconds, because the API said that nothing is left of a limit."""
        self._rests_until = max(self._rests_until, self._clock() + seconds)

    def correct(self, estimated: int, counted: int) -> None:
        """Replace an estimate by what the API counted."""
        if self._tokens is not None:
            self._tokens.take(counted - estimated)
