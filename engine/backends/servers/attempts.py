"""Sends one request to the servers of a pool until one of them answers it.

Invariant: an attempt whose reply is not awaited to the end is aborted on its server, so no server goes on sampling for nobody.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

import structlog

from engine.backends.http.refusal import refusal
from engine.backends.http.reply import HttpFailure, HttpReply
from engine.backends.http.retries import Tries
from engine.backends.servers.reply import Part, PromptMismatch, ReplyError
from engine.backends.servers.request import Outgoing, PromptEncoder
from engine.deadline import Deadlines
from engine.errors import BackendError

if TYPE_CHECKING:
    import numpy as np

    from engine.backends.servers.pool import Pool
    from engine.backends.servers.server import Server
    from engine.schemas.generation import GenerateRequest

log = structlog.get_logger(__name__)

ABORT_SECONDS = 2.0
"""Time that `close` waits until servers have received their aborts, in seconds."""


Decode = Callable[[bytes, Outgoing, int], Part]
"""Reads the body of a reply to a request, for a vocabulary of a given size; it raises ReplyError or PromptMismatch."""


class GivenWeights(Protocol):
    """Which weights the servers were given; None: their own."""

    @property
    def expected(self) -> str | None:
        """Name of the weights that every request sent from now on must be sampled with."""

    @property
    def prefixes(self) -> str | None:
        """Name of the weights that computed the cached prefixes that requests may use from now on."""

    def accepts(self, version: str, expected: str) -> bool:
        """Whether a reply may be sampled with the weights `version`, if `expected` was expected when it was requested."""


class OwnWeights:
    """The `GivenWeights` of servers that are given none."""

    expected: str | None = None
    prefixes: str | None = None

    def accepts(self, version: str, expected: str) -> bool:
        """Nothing is expected."""
        return True


class Attempts:
    """The requests of one backend: attempts, retries on other servers, and aborts.

    Args:
        pool: The servers.
        encoder: Encodes the requests.
        path: Path of the requests.
        decode: See `Decode`.
        abort_path: Path of the calls that abort a request; None: a server aborts a request whose connection is closed.
        weights: Says which weights the servers must have.
        retries: Maximum number of retries of a request.
        try_timeout: Deadline of one attempt in seconds.
        counts: The backend's counts: attempts, retries, aborts and what was wrong with replies are added here.
    """

    def __init__(
        self,
        pool: Pool,
        encoder: PromptEncoder,
        *,
        path: str,
        decode: Decode,
        abort_path: str | None,
        weights: GivenWeights,
        retries: int,
        try_timeout: float,
        counts: Counter[str],
    ) -> None:
        self.encoder = encoder
        """Replaced when the servers' facts are known."""
        self.deadlines = Deadlines(try_timeout)
        self._pool = pool
        self._path = path
        self._decode = decode
        self._abort_path = abort_path
        self._weights = weights
        self._retries = retries
        self._counts = counts
        self._nonce = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._calls: dict[str, Server] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._closed = asyncio.Event()
        self._stopped = False
        """Closed: no more aborts are sent."""

    async def reply(self, request: GenerateRequest, ids: np.ndarray, most: int, sampled: int) -> Part:
        """Send a request until a server answers it; see `Encoder.encode` for the arguments.

        Args:
            request: The request.
            ids: The prompt, int32 [tokens].
            most: Maximum number of tokens to sample.
            sampled: How many tokens of the reply were sampled by earlier parts.

        An attempt that no server worked on does not count as a retry.

        Raises:
            BackendError: as `ServersBackend.generate`.
        """
        failed: list[Server] = []
        tries: Tries | None = None
        while True:
            server = self._pool.choose(request.episode_id, failed)
            if server is None:
                server = await self._pool.available(request.episode_id, failed)
            try:
                return await self._attempt(server, self._encode(request, ids, most, sampled))
            except BackendError as error:
                if self._closed.is_set():
                    raise BackendError("the backend was closed", kind="closed") from None
                tries = tries or Tries(self._retries, self._pool.outage)
                if not tries.another(error):
                    raise
                if error.kind == "stale_weights" and not any(other.usable for other in self._pool.servers):
                    raise  # waiting brings no other weights: only the next push does
                refused = error.refused
                self._counts["retries"] += 1
                log.info(
                    "retrying", episode=request.episode_id, turn=request.turn, server=server.url, reason=str(error)
                )
            if server not in failed:
                failed.append(server)
            if not refused and all(other in failed or not other.usable for other in self._pool.servers):
                await self._wait(tries.pause)

    def _encode(self, request: GenerateRequest, ids: np.ndarray, most: int, sampled: int) -> Outgoing:
        return self.encoder.encode(request, self._rid(), ids, most, sampled, prefixes=self._weights.prefixes)

    def _rid(self) -> str:
        """A request id of fixed length: SGLang aborts every request whose id begins with the given one."""
        return f"{self._nonce}{next(self._numbers):012x}"

    async def _wait(self, seconds: float) -> None:
        """Wait before another try.

        Raises:
            BackendError: The backend was closed meanwhile.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._closed.wait()
        except TimeoutError:
            return
        raise BackendError("the backend was closed", kind="closed")

    async def _attempt(self, server: Server, sent: Outgoing) -> Part:
        """Send a request once. If its reply is not awaited to the end, the server gets an abort."""
        if self._closed.is_set():
            raise BackendError("the backend was closed", kind="closed")
        self._counts["attempts"] += 1
        expected = self._weights.expected
        self._calls[sent.rid] = server
        server.begin()
        try:
            with self.deadlines.begin():
                reply = await server.http.request(
                    "POST", self._path, *sent.pieces, read=partial(self._read, sent), most=sent.most
                )
        except HttpFailure as failure:
            if failure.sent:
                self.abort(server, sent.rid)
            if not self._closed.is_set():  # or it is our own doing
                self._pool.failed(server, str(failure))
            message = f"{server.url}: {failure}"
            raise BackendError(message, kind="unreachable", retryable=True, refused=not failure.sent) from None
        except TimeoutError:
            self.abort(server, sent.rid)
            self._counts["try_timeouts"] += 1
            self._pool.suspect(server)
            message = f"{server.url} did not reply within {self.deadlines.seconds:g} s (`backend.try_timeout`)"
            raise BackendError(message, kind="timeout", retryable=True) from None
        except asyncio.CancelledError:
            self.abort(server, sent.rid)
            raise
        finally:
            server.end()
            del self._calls[sent.rid]
        self._pool.answered(server, reply.status, reply.retry_after)
        if reply.status != 200:
            raise refusal(server.url, HttpReply(reply.status, reply.read, None, reply.retry_after))
        return self._accepted(server, reply.read, expected)

    def _read(self, sent: Outgoing, status: int, body: bytes) -> Part | ReplyError | PromptMismatch | bytes:
        """A decoded reply, or the error in it; the body if the status is not 200."""
        if status != 200:
            return body
        try:
            return self._decode(body, sent, self.encoder.vocab_size)
        except (ReplyError, PromptMismatch) as error:
            return error

    def _accepted(self, server: Server, part: Part | ReplyError | PromptMismatch, expected: str | None) -> Part:
        if isinstance(part, ReplyError):
            self._counts["bad_replies"] += 1
            raise BackendError(
                f"{server.url} sent a reply that cannot be used: {part}", kind="bad_reply", retryable=True
            )
        if isinstance(part, PromptMismatch):
            self._counts["mismatches"] += 1
            raise part
        if part.version is not None:
            server.version = part.version
            if (
                expected is not None
                and expected == self._weights.expected
                and not self._weights.accepts(part.version, expected)
                and len(part.ids)
            ):
                self._pool.failed(server, f"samples with weights {part.version!r}; every server was given {expected!r}")
                message = f"{server.url} samples with weights {part.version!r}, not {expected!r}"
                raise BackendError(message, kind="stale_weights", retryable=True)
        return part

    def abort(self, server: Server, rid: str) -> None:
        """Have a server stop a request. This does not wait for the server; `close` does."""
        if self._stopped:
            return
        self._counts["aborts"] += 1
        if self._abort_path is None:  # its connection is closed, since the reply was not read to the end
            return
        targets = [server] if server in self._pool.workers else self._pool.workers
        for target in targets:
            task = asyncio.get_running_loop().create_task(self._send_abort(target, self._abort_path, rid))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _send_abort(self, server: Server, path: str, rid: str) -> None:
        try:
            await server.json("POST", path, {"rid": rid}, timeout=ABORT_SECONDS)
        except BackendError as error:  # a server that is gone has stopped anyway
            log.debug("abort was not delivered", server=server.url, rid=rid, reason=str(error))

    async def close(self) -> None:
        """Abort what is running, and wait up to `ABORT_SECONDS` until the servers have received it."""
        self._closed.set()
        for rid, server in list(self._calls.items()):
            self.abort(server, rid)
        if self._aborts:
            await asyncio.wait(list(self._aborts), timeout=ABORT_SECONDS)
        self._stopped = True
        late = list(self._aborts)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
