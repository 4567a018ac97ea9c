"""The same call to all servers of a pool at once, and what becomes of those that do not reply."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from engine.backends.servers.pool import Pool
from engine.backends.servers.server import Server
from engine.errors import BackendError

log = structlog.get_logger(__name__)


class NoServerError(BackendError):
    """No server is left for a call that concerns all of them. Kind `no_server`."""


class AllServers:
    """The servers of a pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.gone: set[Server] = set()
        """Servers that could not be asked any more during the newest update."""

    def lost(self, server: Server, error: BaseException) -> bool:
        """Take a server out if it cannot be asked any more.

        Returns:
            False if the server is there and refused, or is behind a router, which may still send it requests.
        """
        if not isinstance(error, BackendError) or not error.retryable or server not in self._pool.servers:
            return False
        self.gone.add(server)
        self.out(server, str(error))
        return True

    async def each(self, servers: list[Server], path: str, body: Any, *, seconds: float = 30.0) -> list[Server]:
        """POST to each server, and take out those that are lost. Returns the others.

        Raises:
            BackendError: a server refused (kind `control_failed`), or all were lost (kind `no_server`).
        """
        outcomes = await asyncio.gather(
            *(server.json("POST", path, body, timeout=seconds) for server in servers), return_exceptions=True
        )
        there: list[Server] = []
        reasons: list[str] = []
        refused: list[str] = []
        for server, outcome in zip(servers, outcomes, strict=True):
            if not isinstance(outcome, BaseException):
                there.append(server)
            elif isinstance(outcome, BackendError):
                (reasons if self.lost(server, outcome) else refused).append(str(outcome))
            else:
                raise outcome
        if refused:
            raise BackendError(f"{path} failed: {'; '.join(refused)}", kind="control_failed")
        if not there:
            raise NoServerError(f"{path}: {'; '.join(reasons) or 'no sglang server is there'}", kind="no_server")
        return there

    def reachable(self) -> list[Server]:
        """Return the servers that are there."""
        return [server for server in self._pool.workers if server.healthy]

    def out(self, server: Server, reason: str) -> None:
        """Take a server out of the pool."""
        if server in self._pool.servers:
            self._pool.failed(server, reason)
        else:
            log.error("a server behind the router is out of step", server=server.url, reason=reason)

    async def call(
        self, method: str, path: str, body: Any = None, *, seconds: float = 30.0, servers: list[Server] | None = None
    ) -> dict[str, Any]:
        """Send the same call to these servers; default: to all that are there. Returns URL -> reply.

        Raises:
            BackendError: no server is there (kind `unreachable`), or a server did not reply as it should (kind `control_failed`).
        """
        servers = self.reachable() if servers is None else servers
        if not servers:
            raise BackendError(f"{path}: no sglang server is there", kind="unreachable")
        replies = await asyncio.gather(
            *(server.json(method, path, body, timeout=seconds) for server in servers), return_exceptions=True
        )
        failures = [reply for reply in replies if isinstance(reply, BaseException)]
        for failure in failures:
            if not isinstance(failure, BackendError):
                raise failure
        if failures:
            raise BackendError(f"{path} failed: " + "; ".join(map(str, failures)), kind="control_failed")
        return {server.url: reply for server, reply in zip(servers, replies, strict=True)}
