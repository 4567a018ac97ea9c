"""An episode -> the server that its requests go to: the same one while it is available, else the one with the fewest
requests in flight.

An episode stays with its server, which has cached its prefix. A server that fails gets no requests until it answers its
health check again.

Invariant: `in_flight` of a server is the number of requests that were sent to it and neither answered nor cancelled; it
is counted in one place.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
import structlog

from engine.backends.outage import Outage, growing_pause
from engine.errors import BackendError
from engine.plugins.servers.http.client import HttpClient
from engine.plugins.servers.http.reply import UNAVAILABLE, HttpFailure, HttpReply, error_text
from engine.schemas.base import Struct

log = structlog.get_logger(__name__)


class ImageFacts(Struct, frozen=True, kw_only=True):
    """How one server processes images."""

    processor: str
    """Its image processor's backend as `/server_info` names it: `auto` (torchvision where it has one), `torchvision`,
    `pil`."""
    unscaled_gap: float
    """Largest difference, in nats, of a prompt's log-probs between the image as it comes and as it is sent: about 0
    where the server scales as the rows' processor does."""


class Server:
    """One server, and what is known about it."""

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self.http = HttpClient(url, headers=headers)
        self.healthy = True
        self.resting = False
        """It asked for a pause (429) that has not ended."""
        self.in_flight = 0
        self.served = 0
        """Number of replies."""
        self.assigned = 0
        """Number of episodes that were assigned to it."""
        self.errors = 0
        """Number of 5xx replies in a row."""
        self.heard = 0.0
        """Time of the newest reply, or of the first request in flight; monotonic seconds."""
        self.version: str | None = None
        """Name of its weights, from its newest reply."""
        self.seeded = False
        """Whether it uses the seed of a request."""
        self.images: ImageFacts | None = None
        """How it processes images, for a model with a vision tower."""
        self.counts: Counter[str] = Counter()
        """`failed` (connections), `5xx`, `429`, `rejoined`."""
        self.refusals = 0
        """Number of 429 replies in a row."""
        self.rest: asyncio.TimerHandle | None = None
        """Ends its pause."""

    @property
    def usable(self) -> bool:
        """Whether a request may be sent to it now."""
        return self.healthy and not self.resting

    def begin(self) -> None:
        """Count a request that is sent."""
        if self.in_flight == 0:
            self.heard = time.monotonic()
        self.in_flight += 1

    def end(self) -> None:
        """Count a request that was answered or cancelled."""
        self.in_flight -= 1
        self.heard = time.monotonic()

    async def ask(self, method: str, path: str, body: bytes, *, timeout: float) -> HttpReply:  # noqa: ASYNC109
        """Send a request. Returns its reply, whatever its status.

        Raises:
            BackendError: No reply in `timeout` seconds (kind `unreachable`, retryable).
        """
        try:
            async with asyncio.timeout(timeout):
                return await self.http.request(method, path, body)
        except TimeoutError:
            message = f"{self.url}{path} did not answer within {timeout:g} s"
        except HttpFailure as failure:
            message = f"{self.url}{path}: {failure}"
        raise BackendError(message, kind="unreachable", retryable=True, refused=True)

    async def json(self, method: str, path: str, body: Any = None, *, timeout: float = 30.0) -> Any:  # noqa: ASYNC109
        """Send a small request. Returns its decoded reply; None if the body is empty.

        Raises:
            BackendError: No reply in `timeout` seconds (kind `unreachable`, retryable), or a status other than 2xx
                (kind `http_<status>`); the message includes the server's.
        """
        data = b"" if body is None else msgspec.json.encode(body)
        reply = await self.ask(method, path, data, timeout=timeout)
        if not 200 <= reply.status < 300:
            message = f"{self.url}{path} answered {reply.status}: {error_text(reply)}"
            raise BackendError(
                message,
                kind=f"http_{reply.status}",
                retryable=reply.status >= 500,
                refused=reply.status in (429, *UNAVAILABLE),
                retry_after=reply.retry_after,
            )
        if not reply.body:
            return None
        try:
            return msgspec.json.decode(reply.body)
        except msgspec.DecodeError:
            return reply.body.decode(errors="replace")

    def stats(self) -> dict[str, Any]:
        """Counts and state; JSON values only."""
        return {
            "url": self.url,
            "healthy": self.healthy,
            "in_flight": self.in_flight,
            "served": self.served,
            "episodes": self.assigned,
            "connections": self.http.opened,
            "weight_version": self.version,
            **self.counts,
        }


REMEMBERED = 65536
"""Maximum number of episodes whose server is remembered."""
BROKEN_AFTER = 3
"""Number of 5xx replies in a row after which a server counts as failed."""
MAX_HEAL_PAUSE = 5.0
"""Maximum pause between two health checks of a failed server, in seconds."""


class Pool:
    """The servers of one backend.

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
        wake: Callable[[Server], Awaitable[None]] | None = None,
        probe: str = "/model_info",
    ) -> None:
        """
        Args:
            servers: At least one.
            wait: Seconds without any reply after which requests that wait for a server raise `OutageError`.
            health_timeout: Seconds without any reply after which a busy server gets a health check.
            probe: Path of a request that a server answers at once, also while it is busy.
            admit: Called with a server that answers its health check again; it raises BackendError if the server must
                stay out.
            wake: Called with a server that is out, before its health check; it raises BackendError if the check must
                wait.
        """
        self.servers = list(servers)
        self.workers = self.servers
        """Servers that take control calls: the same ones, or those behind the router."""
        self._health_timeout = health_timeout
        self._admit = admit
        self._wake = wake
        self._probe = probe
        self._sticky: OrderedDict[str, Server] = OrderedDict()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.outage = Outage(wait)
        self.failovers = 0
        """Number of episodes that had to change their server."""

    async def available(self) -> None:
        """Wait until a server is available.

        Raises:
            OutageError: No server replied for `wait` seconds.
            BackendError: The pool was closed (kind `closed`).
        """
        while not any(server.usable for server in self.servers):
            if not self.outage.closed:
                self.outage.close(self.outage.reason or "no server is there")
            await self.outage.wait()

    def choose(self, episode_id: str, avoid: Iterable[Server] = ()) -> Server | None:
        """The server for an episode's next request: its sticky while that is available, else the least loaded; None:
        there is none.

        Args:
            episode_id: The episode of the request.
            avoid: Servers that failed this request; they are used again only if no other is left.
        """
        sticky = self._sticky.get(episode_id)
        if sticky is not None and sticky.healthy and not sticky.resting and sticky not in avoid:
            self._sticky.move_to_end(episode_id)
            return sticky
        usable = [server for server in self.servers if server.usable]
        candidates = [server for server in usable if server not in avoid] or usable
        if not candidates:
            return None
        server = min(candidates, key=lambda s: (s.in_flight, s.assigned))
        if server is not sticky:
            if sticky is not None:
                self.failovers += 1
            server.assigned += 1
            self._sticky[episode_id] = server
            if len(self._sticky) > REMEMBERED:
                self._sticky.popitem(last=False)
        return server

    def forget(self, episode_id: str) -> None:
        """Drop the server of an episode that has ended."""
        self._sticky.pop(episode_id, None)

    def answered(self, server: Server, status: int, retry_after: float | None = None) -> None:
        """Count a reply by its status. A server that keeps failing is taken out; a server that asks for a pause gets
        one.

        Args:
            server: The server that replied.
            status: The status of its reply.
            retry_after: The pause that it asks for, in seconds.
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
        """Send a server nothing during the pause that it asks for; if it names none, during a pause that grows."""
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
        """Take a server out, and check its health in the background until it is back."""
        server.counts["failed"] += 1
        if not server.healthy:
            return
        server.healthy = False
        server.http.drop_idle()
        log.warning("server taken out", url=server.url, reason=reason)
        self._close_gate(reason if server.url in reason else f"{server.url}: {reason}")
        self._run(f"heal {server.url}", self._heal(server, retry_after or 0.0))

    def _close_gate(self, reason: str) -> None:
        """Have requests wait if no server is available."""
        if not any(server.usable for server in self.servers):
            self.outage.close(reason)

    def watch(self) -> None:
        """Start the health checks of busy servers that send no reply."""
        self._run("watch", self._watch())

    async def close(self) -> None:
        """Stop the health checks, fail the waiting requests, and close all connections."""
        self.outage.end()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        for server in {*self.servers, *self.workers}:
            await server.http.close()

    def _run(self, name: str, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"servers: {name}")
        self._tasks[name] = task
        task.add_done_callback(lambda done: self._finished(name, done))

    def _finished(self, name: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]
        if not task.cancelled() and task.exception() is not None:
            log.error("the health check of servers failed", task=name, error=repr(task.exception()))

    async def _heal(self, server: Server, pause: float) -> None:
        wait = 0.25
        await asyncio.sleep(min(pause, self.outage.limit))
        while True:
            try:
                if self._wake is not None:
                    await self._wake(server)
                await server.json("GET", "/health", timeout=30.0)
                if self._admit is not None:
                    await self._admit(server)
            except BackendError as error:
                log.debug("server is still out", url=server.url, reason=str(error))
                await asyncio.sleep(wait * random.uniform(0.8, 1.2))
                wait = min(MAX_HEAL_PAUSE, wait * 2)
                continue
            server.healthy = True
            server.errors = 0
            if server.usable:  # it replied to the check
                self.outage.served()
            server.counts["rejoined"] += 1
            log.info("server is back", url=server.url)
            return

    async def _watch(self) -> None:
        """Ask busy servers that send no reply for their model; a server that does not answer even this hangs.

        A server with a slow model, with a long queue or in a pause answers, so it is not taken out.
        """
        while True:
            await asyncio.sleep(self._health_timeout / 2)
            quiet = time.monotonic() - self._health_timeout
            suspects = [s for s in self.servers if s.healthy and s.in_flight and s.heard < quiet]
            await asyncio.gather(*(self._suspect(server) for server in suspects))

    def suspect(self, server: Server) -> None:
        """Check in the background a server that has not replied to a request in time."""
        name = f"suspect {server.url}"
        if server.healthy and name not in self._tasks:
            self._run(name, self._suspect(server))

    async def _suspect(self, server: Server) -> None:
        try:
            await server.json("GET", self._probe, timeout=min(10.0, self._health_timeout))
        except BackendError as error:
            if error.kind != "unreachable":
                return
            self.failed(server, f"hangs: {error}")
            server.http.abandon("the server hangs")
