"""What a backend does while requests fail: tries again after a growing pause, or waits where it has no server to ask.

A request that no server takes is not a failure of its episode. Code that finds no server calls `Outage.close`; requests
then wait until `open` is called, or until there was no reply for `limit` seconds; deadlines stand still meanwhile.

Invariant: `since` is the time of the first refusal after the newest reply, however often the gate was opened in
between. So an outage ends with a reply, or with `OutageError` after `limit` seconds.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from engine.clocks import PausableClocks
from engine.errors import BackendError, OutageError

if TYPE_CHECKING:
    from engine.errors import BackendError

log = structlog.get_logger(__name__)

_LEAST_PAUSE = 0.05
_GRACE = 0.1
"""Seconds after the limit in which a last try is still possible: a server may have asked for a pause until then."""


class Outage:
    """A gate for requests: closed while no server can be asked.

        outage = Outage(600.0)
        outage.rest("http://… answered 429", seconds=8.0)   # close the gate for 8 s
        if outage.closed:
            await outage.wait()                             # OutageError 600 s after the first refusal
        outage.served()                                     # a reply arrived

    Args:
        limit: Seconds without a reply after which waiting requests raise `OutageError`.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.closed = False
        """Whether requests have to wait."""
        self.since: float | None = None
        """When the outage began, in monotonic seconds; None while replies arrive."""
        self.reason = ""
        self.waiting = 0
        """Number of waiting requests."""
        self.clocks = PausableClocks()
        """Deadlines that stand still while the gate is closed."""
        self._opened = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._pauses = 0
        self._ended = False
        self._began = 0.0
        self._count = 0
        self._seconds = 0.0

    def close(self, reason: str) -> None:
        """Have requests wait until `open` is called."""
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
        """Close the gate for a time; then requests may be sent again.

        Args:
            reason: The server's answer, for the progress line.
            seconds: The pause that the server asks for; it ends `limit` seconds after the first refusal at the latest.
                Default: a pause that grows with each refusal in a row, up to 10 s.
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
        """When a pause of `seconds` ends, by the loop's clock: at the limit at the latest."""
        left = self.limit if self.since is None else self.since + self.limit - time.monotonic()
        return asyncio.get_running_loop().time() + max(_LEAST_PAUSE, min(seconds, left))

    def open(self) -> None:
        """Let requests be sent again. The outage ends when one of them is served."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.closed:
            self.closed = False
            self._seconds += time.monotonic() - self._began
            self._opened.set()
            self.clocks.resume()

    def served(self) -> None:
        """End the outage: a reply arrived."""
        if self.since is not None:
            log.info("servers reply again", seconds=round(time.monotonic() - self.since, 1))
        self.since = None
        self._pauses = 0
        self.open()

    async def wait(self) -> None:
        """Wait until requests may be sent.

        Raises:
            OutageError: There was no reply for `limit` seconds.
            BackendError: The backend was closed (kind `closed`).
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
        """Fail the waiting requests: the backend was closed."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._opened.set()

    def told(self) -> str | None:
        """The outage in words, for the progress line; None while replies arrive."""
        if not self.closed or self.since is None:
            return None
        seconds = time.monotonic() - self.since
        return f"waiting for the server for {seconds:.0f} of at most {self.limit:.0f} s: {self.reason}"

    def stats(self) -> dict[str, Any]:
        """Number of outages and their seconds; JSON values only."""
        now = time.monotonic() - self._began if self.closed else 0.0
        return {"outages": self._count, "outage_seconds": round(self._seconds + now, 3)}


FIRST_PAUSE = 0.25
"""Pause after the first failure, in seconds; doubled with each further failure in a row."""
MAX_PAUSE = 10.0
"""Maximum pause in seconds."""


def growing_pause(failures: int) -> float:
    """Pause in seconds after one more failure than `failures` in a row. It has a random part of 20 %, so that requests
    that failed together are not repeated together."""
    return min(MAX_PAUSE, FIRST_PAUSE * 2.0 ** min(failures, 16)) * random.uniform(0.8, 1.2)


@dataclass(slots=True, eq=False)
class Tries:
    """Counts the failed attempts at one reply.

    An attempt that no server worked on (`BackendError.refused`) does not count as a try. It may be repeated until other
    requests were served for `backend.wait` seconds while this one was refused. The time of an outage is not part of
    these
    seconds: nobody is served in it, and the outage itself ends the run after `backend.wait`.

    Args:
        retries: Maximum number of tries after the first.
        outage: The backend's.
    """

    retries: int
    outage: Outage
    refused: float = 0.0
    used: int = 0
    """Number of failed tries."""

    def another(self, error: BackendError) -> bool:
        """Count a failed attempt. Returns whether another one may follow."""
        if not error.retryable:
            return False
        if not error.refused:
            self.used += 1
            return self.used <= self.retries
        if error.kind == "unreachable":
            return True
        now = time.monotonic()
        self.refused = self.refused or now
        others_served_until = now if self.outage.since is None else self.outage.since
        return others_served_until - self.refused <= self.outage.limit

    @property
    def pause(self) -> float:
        """Seconds to wait before the next try."""
        return growing_pause(self.used - 1)
