"""Which connections a server keeps: how many, for how long without a request, and with how many bytes that wait for answers.

Invariants:
- A connection counts for its peer until it has sent a key that is known, and from then on for that key. Where one has too many, its own
  oldest connection that waits for a request is closed; so nobody takes the places of others.
- Time is counted in ticks of the event loop, at most one a second: a time in which the engine itself was busy does not count.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from engine.logs import Seldom
from engine.plugins.agents.wire.requests import ApiError

if TYPE_CHECKING:
    from engine.plugins.agents.connection import Connection

log = Seldom(structlog.get_logger(__name__))

HEAD_SECONDS, BODY_SECONDS = 20, 120
"""Time for the head of a request and for its body. A connection whose key is known may wait longer before a request begins."""
MAX_WITHOUT_KEY, MAX_OF_PEER, MAX_OF_KEY = 512, 128, 256
"""Connections that have sent no known key: of all peers, and of one address or socket file. Connections of one key."""
MAX_WAITING_BYTES = 256 << 20
"""Bytes of the requests of one key that are not answered yet."""
_DESCRIPTORS = 1 << 16
"""Limit of file descriptors that is asked of the system. Programs inherit it, and some loop over all descriptors."""


class Admission:
    """The connections of one server."""

    def __init__(self) -> None:
        self._peers: dict[str, dict[Connection, None]] = {}
        """The connections without a known key, by peer, oldest first."""
        self._keys: dict[str, dict[Connection, None]] = {}
        """The others, by key."""
        self._timer: asyncio.TimerHandle | None = None
        self._most = raise_descriptors() // 2

    def add(self, connection: Connection) -> None:
        """Take a new connection."""
        if len(self._peers.get(connection.peer, ())) >= MAX_OF_PEER:
            self._close_oldest(self._peers[connection.peer])
        elif sum(map(len, self._peers.values())) >= MAX_WITHOUT_KEY:
            most_connected = max(self._peers.values(), key=len)
            self._close_oldest(most_connected)
        elif sum(map(len, (*self._peers.values(), *self._keys.values()))) >= self._most:
            self.make_room()
        self._peers.setdefault(connection.peer, {})[connection] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(1.0, self.tick)

    def remove(self, connection: Connection) -> None:
        """Forget a connection; a second call does nothing."""
        groups, name = (self._peers, connection.peer) if connection.key is None else (self._keys, connection.key)
        group = groups.get(name, {})
        group.pop(connection, None)
        if not group:
            groups.pop(name, None)

    def claim(self, connection: Connection, key: str) -> None:
        """Note that a request with a known key has begun.

        Raises:
            ApiError: The key has too many connections, and all of them wait for answers.
        """
        if connection.key != key:
            others = self._keys.get(key, {})
            if len(others) >= MAX_OF_KEY and not self._close_oldest(others):
                text = f"{MAX_OF_KEY} requests with this key wait for their answers: send fewer at a time"
                raise ApiError(text, status=429, code="too_many_connections")
            self.remove(connection)
            connection.key = key
            self._keys.setdefault(key, {})[connection] = None
        connection.patience, connection.waits = None, False

    def forget_key(self, key: str) -> None:
        """Note that a key is not known any more. Its connections have some time to get their answers."""
        for connection in [*self._keys.get(key, ())]:
            self.remove(connection)
            connection.key, connection.patience = None, BODY_SECONDS
            self._peers.setdefault(connection.peer, {})[connection] = None

    def hold(self, connection: Connection, count: int) -> None:
        """Note bytes of a connection's request, which count until its answer.

        Raises:
            ApiError: Too many bytes of its key wait for answers.
        """
        connection.held += count
        if connection.held <= MAX_WAITING_BYTES // MAX_OF_KEY or connection.key is None:
            return
        if sum(each.held for each in self._keys[connection.key]) > MAX_WAITING_BYTES:
            text = f"more than {MAX_WAITING_BYTES >> 20} MiB with this key wait for their answers: send fewer at a time"
            raise ApiError(text, status=429, code="too_many_bytes")

    def make_room(self) -> bool:
        """Close the oldest connection that waits for a request, of the peer or key that has most; False if there is none."""
        groups = [*self._peers.values(), *self._keys.values()]
        return any(self._close_oldest(group) for group in sorted(groups, key=len, reverse=True))

    def tick(self) -> None:
        """Count a second, and close the connections whose time has passed."""
        everyone = [each for group in (*self._peers.values(), *self._keys.values()) for each in group]
        self._timer = asyncio.get_running_loop().call_later(1.0, self.tick) if everyone else None
        for connection in everyone:
            if connection.patience is not None:
                connection.patience -= 1
                if connection.patience <= 0:
                    log.warning("a request took too long to come", peer=connection.peer)
                    self.remove(connection)
                    connection.time_out()

    def close(self) -> None:
        """Count no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_oldest(self, group: Iterable[Connection]) -> bool:
        """Close the oldest connection of a group that waits for a request, or has no known key; False if there is none."""
        oldest = next((each for each in group if each.waits or each.key is None), None)
        if oldest is not None:
            log.warning("too many connections: the oldest one without a request is closed", peer=oldest.peer)
            self.remove(oldest)
            oldest.abort()
        return oldest is not None


def raise_descriptors() -> int:
    """Raise this process's limit of file descriptors as far as the system lets it. Returns the limit."""
    soft, hard = (
        _DESCRIPTORS if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    wanted = min(hard, _DESCRIPTORS)
    if soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            return wanted
    return soft
