"""Several servers that serve the same model: which one a request goes to, and which ones are there.

An episode stays with its server, which has its prefix cached; a new one goes to the server with the
fewest requests in flight. A server that fails is left alone until it answers its health check again.

Invariant: `in_flight` of a server is the number of requests that were sent to it and neither answered
nor given up; it never drifts, since it is counted in one place.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import structlog

from engine.backends.http.outage import Outage
from engine.backends.http.refusal import UNAVAILABLE
from engine.backends.http.retries import growing_pause
from engine.backends.sglang.server import Server
from engine.errors import BackendError

log = structlog.get_logger(__name__)

REMEMBERED = 65536
"""Episodes whose server is remembered."""
BROKEN_AFTER = 3
"""Server errors (5xx) in a row after which a server counts as broken."""
MAX_HEAL_PAUSE = 5.0
"""Most seconds between two questions whether a lost server is back."""


class Pool:
    """The servers.

    server = pool.choose("episode-1")
    server.begin()
    try:
        reply = await server.http.request("POST", "/generate", body)
    except HttpFailure as failure:
        pool.failed(server, str(failure))
    finally:
        server.end()
    """

    def __init__(
        self,
        servers: Iterable[Server],
        *,
        health_timeout: float,
        wait: float = 600.0,
        admit: Callable[[Server], Awaitable[None]] | None = None,
    ) -> None:
        """
        Args:
            servers: at least one.
            wait: seconds without any reply after which requests that wait for a server raise `OutageError`.
            health_timeout: seconds without any reply after which a busy server is asked whether it is there.
            admit: called with a server that answers its health check again; raises BackendError to keep it out.
        """
        self.servers = list(servers)
        self.workers = self.servers
        """Servers that take control calls: the same ones, or those behind the router."""
        self._health_timeout = health_timeout
        self._admit = admit
        self._sticky: OrderedDict[str, Server] = OrderedDict()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.outage = Outage(wait)
        self.failovers = 0
        """Episodes that had to change their server."""

    async def available(self, episode_id: str, avoid: Iterable[Server] = ()) -> Server:
        """`choose`, once a server can be asked.

        Raises:
            OutageError: none replied for as long as requests wait.
            BackendError: the pool was closed (kind `closed`).
        """
        while (server := self.choose(episode_id, avoid)) is None:
            if not self.outage.closed:
                self.outage.close(self.outage.reason or "no server is there")
            await self.outage.wait()
        return server

    def choose(self, episode_id: str, avoid: Iterable[Server] = ()) -> Server | None:
        """The server for this episode's next request: its own while it is there, else the least loaded; None where none is.

        Args:
            episode_id: whose request it is.
            avoid: servers that failed this very request; used again only where no other is left.
        """
        own = self._sticky.get(episode_id)
        if own is not None and own.healthy and not own.resting and own not in avoid:
            self._sticky.move_to_end(episode_id)
            return own
        usable = [server for server in self.servers if server.usable]
        candidates = [server for server in usable if server not in avoid] or usable
        if not candidates:
            return None
        server = min(candidates, key=lambda s: (s.in_flight, s.assigned))
        if server is not own:
            if own is not None:
                self.failovers += 1
            server.assigned += 1
            self._sticky[episode_id] = server
            if len(self._sticky) > REMEMBERED:
                self._sticky.popitem(last=False)
        return server

    def forget(self, episode_id: str) -> None:
        """The episode is over."""
        self._sticky.pop(episode_id, None)

    def answered(self, server: Server, status: int, retry_after: float | None = None) -> None:
        """Note a reply's status. A server that keeps failing is taken out, one that asks for a pause is given it.

        Args:
            server: which one answered.
            status: of its reply.
            retry_after: seconds after which it wants to be asked again.
        """
        server.served += 1
        if status < 500:
            server.errors = 0
            if status == 429:
                server.counts["429"] += 1
                self._rest(server, f"{server.url} answered 429", retry_after)
            elif status == 200:
                server.refusals = 0
                if self.outage.since is not None and server.usable:
                    self.outage.served()
            return
        server.errors += 1
        server.counts["5xx"] += 1
        if status in UNAVAILABLE or server.errors >= BROKEN_AFTER:
            self.failed(server, f"answered {status} {server.errors} times in a row", retry_after)

    def _rest(self, server: Server, reason: str, seconds: float | None) -> None:
        """Send a server nothing for the pause that it asks for; for a growing one where it does not say how long."""
        if server.resting and seconds is None:
            return
        if seconds is None:
            seconds = growing_pause(server.refusals)
            server.refusals += 1
        server.resting = True
        until = self.outage.until(seconds)
        if server.rest is not None:
            until = max(until, server.rest.when())
            server.rest.cancel()
        server.rest = asyncio.get_running_loop().call_at(until, self._rested, server)
        self._close_gate(reason)

    def _rested(self, server: Server) -> None:
        server.resting, server.rest = False, None
        if server.usable:
            self.outage.open()

    def failed(self, server: Server, reason: str, retry_after: float | None = None) -> None:
        """Take a server out, and look after it in the background until it is back."""
        server.counts["failed"] += 1
        if not server.healthy:
            return
        server.healthy = False
        server.http.drop_idle()
        log.warning("sglang server taken out", url=server.url, reason=reason)
        self._close_gate(reason if server.url in reason else f"{server.url}: {reason}")
        self._run(f"heal {server.url}", self._heal(server, retry_after or 0.0))

    def _close_gate(self, reason: str) -> None:
        """Have requests wait, where no server can be asked."""
        if not any(server.usable for server in self.servers):
            self.outage.close(reason)

    def watch(self) -> None:
        """Begin to look after servers that are busy and say nothing."""
        self._run("watch", self._watch())

    async def close(self) -> None:
        """Stop looking after servers, tell who waits for one, and close all connections."""
        self.outage.end()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        for server in {*self.servers, *self.workers}:
            await server.http.close()

    def _run(self, name: str, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"sglang: {name}")
        self._tasks[name] = task
        task.add_done_callback(lambda done: self._finished(name, done))

    def _finished(self, name: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]
        if not task.cancelled() and task.exception() is not None:
            log.error("looking after sglang servers failed", task=name, error=repr(task.exception()))

    async def _heal(self, server: Server, pause: float) -> None:
        wait = 0.25
        await asyncio.sleep(min(pause, self.outage.limit))
        while True:
            try:
                await server.json("GET", "/health", timeout=30.0)
                if self._admit is not None:
                    await self._admit(server)
            except BackendError as error:
                log.debug("sglang server is still out", url=server.url, reason=str(error))
                await asyncio.sleep(wait * random.uniform(0.8, 1.2))
                wait = min(MAX_HEAL_PAUSE, wait * 2)
                continue
            server.healthy = True
            server.errors = 0
            if server.usable:  # it was given a request, and replied
                self.outage.served()
            server.counts["rejoined"] += 1
            log.info("sglang server is back", url=server.url)
            return

    async def _watch(self) -> None:
        """A server that has requests and says nothing is asked for its name; where even that stays out, it hangs.

        A slow model, a long queue or a paused server answers such a question, so none is taken for hung.
        """
        while True:
            await asyncio.sleep(self._health_timeout / 2)
            quiet = time.monotonic() - self._health_timeout
            suspects = [s for s in self.servers if s.healthy and s.in_flight and s.heard < quiet]
            await asyncio.gather(*(self._suspect(server) for server in suspects))

    def suspect(self, server: Server) -> None:
        """Ask in the background whether a server is there that has left a request without a reply."""
        name = f"suspect {server.url}"
        if server.healthy and name not in self._tasks:
            self._run(name, self._suspect(server))

    async def _suspect(self, server: Server) -> None:
        try:
            await server.json("GET", "/model_info", timeout=min(10.0, self._health_timeout))
        except BackendError as error:
            if error.kind != "unreachable":
                return
            self.failed(server, f"hangs: {error}")
            server.http.abandon("the server hangs")
