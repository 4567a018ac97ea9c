"""The time in which a backend has no server to ask: requests wait, clocks stand still, and after a bound the run stops.

Requests that no server takes are not failures of their episodes. Whoever finds that no server can be asked closes the
gate; requests wait at it until it is opened, or until nothing has been served for `limit` seconds.

Invariant: `since` is the time of the first refusal after the last reply that was served, however often the gate was
opened in between. So an outage ends with a reply, or with `OutageError` after `limit` seconds.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import structlog

from engine.deadline import Standstill
from engine.errors import BackendError, OutageError

log = structlog.get_logger(__name__)

FIRST_PAUSE = 0.25
"""Seconds before a server that refused is asked again, where it does not say when; doubled with each refusal in a row."""
MAX_PAUSE = 10.0
_LEAST_PAUSE = 0.05
_GRACE = 0.1
"""Seconds after the limit in which a last try may still be made: a server may have asked for a pause until then."""


def growing_pause(refusals: int) -> float:
    """Seconds before a server that refused `refusals` times before is asked again; no two are alike."""
    return min(MAX_PAUSE, FIRST_PAUSE * 2.0 ** min(refusals, 16)) * random.uniform(0.8, 1.2)


class Outage:
    """Whether requests may be sent, and the requests that wait until they may.

        outage = Outage(600.0)
        outage.rest(seconds=8.0, reason="http://… answered 429")    # close the gate for 8 s
        if outage.closed:
            await outage.wait()                                     # OutageError 600 s after the first refusal
        outage.served()                                             # a reply came

    Args:
        limit: seconds without a reply after which waiting requests raise `OutageError`.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.closed = False
        """Requests wait."""
        self.since: float | None = None
        """When the outage began, in monotonic seconds; None while replies come."""
        self.reason = ""
        self.waiting = 0
        """Requests that wait now."""
        self.clocks = Standstill()
        """Clocks that stand still while the gate is closed."""
        self._opened = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._pauses = 0
        self._ended = False
        self._began = 0.0
        self._count = 0
        self._seconds = 0.0

    def close(self, reason: str) -> None:
        """No server can be asked until `open` is called."""
        self.reason = reason
        if self.since is None:
            self.since = time.monotonic()
            self._count += 1
            log.warning("no server can be asked; requests wait", reason=reason, limit=self.limit)
        if not self.closed:
            self.closed = True
            self._began = time.monotonic()
            self._opened.clear()
            self.clocks.pause()

    def rest(self, reason: str, seconds: float | None = None) -> None:
        """Close the gate for a time; then requests may try again.

        Args:
            reason: what the server answered, for the progress line.
            seconds: the pause that the server asks for, kept up to `limit` seconds after the first refusal; without it
                the pause grows with each refusal in a row, up to 10 s.
        """
        if self.closed and seconds is None:
            return
        if seconds is None:
            seconds = growing_pause(self._pauses)
            self._pauses += 1
        self.close(reason)
        when = self.until(seconds)
        if self._timer is not None:
            when = max(when, self._timer.when())
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self.open)

    def until(self, seconds: float) -> float:
        """When a pause that a server asks for is over, by the loop's clock: at the limit at the latest."""
        left = self.limit if self.since is None else self.since + self.limit - time.monotonic()
        return asyncio.get_running_loop().time() + max(_LEAST_PAUSE, min(seconds, left))

    def open(self) -> None:
        """Requests may be sent again. The outage is over once one of them is served."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.closed:
            self.closed = False
            self._seconds += time.monotonic() - self._began
            self._opened.set()
            self.clocks.resume()

    def served(self) -> None:
        """A reply came: the outage is over."""
        if self.since is not None:
            log.info("replies come again", seconds=round(time.monotonic() - self.since, 1))
        self.since = None
        self._pauses = 0
        self.open()

    async def wait(self) -> None:
        """Wait until requests may be sent.

        Raises:
            OutageError: no reply came for `limit` seconds.
            BackendError: the backend was closed (kind `closed`).
        """
        while self.closed and not self._ended:
            assert self.since is not None
            left = self.since + self.limit + _GRACE - time.monotonic()
            if left <= 0:
                raise self._too_long()
            self.waiting += 1
            try:
                async with asyncio.timeout(left):
                    await self._opened.wait()
            except TimeoutError:
                raise self._too_long() from None
            finally:
                self.waiting -= 1
        if self._ended:
            raise BackendError("the backend was closed", kind="closed")

    def _too_long(self) -> OutageError:
        return OutageError(f"no reply for {self.limit:g} s (`backend.wait`): {self.reason}", kind="outage")

    def end(self) -> None:
        """The backend is closed: whoever waits is told."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._opened.set()

    def told(self) -> str | None:
        """The outage in words, for the progress line; None while replies come."""
        if not self.closed or self.since is None:
            return None
        seconds = time.monotonic() - self.since
        return f"waiting for the server for {seconds:.0f} of at most {self.limit:.0f} s: {self.reason}"

    def stats(self) -> dict[str, Any]:
        """JSON values only."""
        now = time.monotonic() - self._began if self.closed else 0.0
        return {"outages": self._count, "outage_seconds": round(self._seconds + now, 3)}


class Tries:
    """The failed attempts at one reply.

    An attempt that no server worked on (`BackendError.refused`) is no try. It may be repeated as long as the outage lasts,
    and where other requests are served meanwhile for `backend.wait` seconds.

    Args:
        retries: tries that may follow the first.
        outage: of the backend.
    """

    def __init__(self, retries: int, outage: Outage) -> None:
        self._retries = retries
        self._outage = outage
        self._refused = 0.0
        self.used = 0
        """Tries that failed."""

    def another(self, error: BackendError) -> bool:
        """Count a failed attempt; whether another one may follow."""
        if not error.retryable:
            return False
        if not error.refused:
            self.used += 1
            return self.used <= self._retries
        if error.kind == "unreachable":
            return True
        now = time.monotonic()
        self._refused = self._refused or now
        others = self._outage.since is None or self._outage.since > self._refused
        return not others or now - self._refused <= self._outage.limit
