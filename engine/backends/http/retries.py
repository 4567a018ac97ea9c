"""The failed tries of one request -> the pause before the next one, or the error that ends them."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.backends.http.outage import Outage
    from engine.errors import BackendError

FIRST_PAUSE = 0.25
"""Pause after the first failure, in seconds; doubled with each further failure in a row."""
MAX_PAUSE = 10.0
"""Maximum pause in seconds."""


def growing_pause(failures: int) -> float:
    """Pause in seconds after one more failure than `failures` in a row. It has a random part of 20 %, so that requests that
    failed together are not repeated together."""
    return min(MAX_PAUSE, FIRST_PAUSE * 2.0 ** min(failures, 16)) * random.uniform(0.8, 1.2)


class Tries:
    """Counts the failed attempts at one reply.

    An attempt that no server worked on (`BackendError.refused`) does not count as a try. It may be repeated until other
    requests were served for `backend.wait` seconds while this one was refused. The time of an outage is not part of these
    seconds: nobody is served in it, and the outage itself ends the run after `backend.wait`.

    Args:
        retries: Maximum number of tries after the first.
        outage: The backend's.
    """

    def __init__(self, retries: int, outage: Outage) -> None:
        self._retries = retries
        self._outage = outage
        self._refused = 0.0
        self.used = 0
        """Number of failed tries."""

    def another(self, error: BackendError) -> bool:
        """Count a failed attempt. Returns whether another one may follow."""
        if not error.retryable:
            return False
        if not error.refused:
            self.used += 1
            return self.used <= self._retries
        if error.kind == "unreachable":
            return True
        now = time.monotonic()
        self._refused = self._refused or now
        others_served_until = now if self._outage.since is None else self._outage.since
        return others_served_until - self._refused <= self._outage.limit

    @property
    def pause(self) -> float:
        """Seconds to wait before the next try."""
        return growing_pause(self.used - 1)
