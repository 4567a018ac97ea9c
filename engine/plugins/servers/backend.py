"""Backends whose servers take token ids: tries, deadlines, interruptions and aborts.

Invariant: one call of `generate` returns at most one generation, and each of its tokens was sampled after exactly the
prompt that was sent. Lost connections and servers change only the counts.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import structlog

from engine.backends.backend import Backend, GivenWeights
from engine.backends.outage import Tries
from engine.backends.slots import Slots
from engine.deadline import Deadlines
from engine.errors import BackendError, ContextOverflow
from engine.plugins.servers.http.client import key_headers
from engine.plugins.servers.pool import Pool, Server
from engine.plugins.servers.reply_call import ReplyCall
from engine.plugins.servers.wire import RequestEncoder
from engine.schemas.generation import GenerateRequest, Generation, SamplingParams

if TYPE_CHECKING:
    from engine.backends.backend import PolicyAdapter
    from engine.backends.outage import Outage
    from engine.plugins.servers.dialect import Dialect
    from engine.plugins.servers.launched import LaunchedServers
    from engine.plugins.servers.sessions import Sessions
    from engine.plugins.servers.wire import ReplyPart
    from engine.schemas.backend import ServersSpec
    from engine.tokens.experts import ExpertLayout
    from engine.tokens.template import ChatTemplate

log = structlog.get_logger(__name__)

ABORT_SECONDS = 2.0
"""Time that `close` waits until servers have received their aborts, in seconds."""
_CERTIFICATE = ("turns_checked", "turns_unchecked", "prompt_mismatches")
_COUNTED = (
    "turns", "tokens", "prompt_tokens", "cached_tokens", "attempts", "retries", "interruptions", "aborts", "timeouts",
    "try_timeouts",
    "bad_replies",
)  # fmt: skip


class ServersBackend(Backend):
    """Samples from one or more servers that take ids and report ids."""

    dialect: ClassVar[Dialect]
    """How its servers write requests and replies."""
    sessions: Sessions | None = None
    """Set where servers keep the prompts of long episodes."""

    def __init__(
        self,
        spec: Any,
        format: ChatTemplate,
        *,
        sampling: SamplingParams,
        model: str,
        api_key: str | None = None,
        launched: LaunchedServers | None = None,
        layout: ExpertLayout | None = None,
    ) -> None:
        """Nothing is opened yet. `sampling` is tested at the start; `layout`: the model's experts, where they are
        requested.

        Raises:
            ValueError: a URL is invalid.
        """
        self._spec: ServersSpec = spec
        self._format = format
        self._sampling = sampling
        self._model = model
        self._headers = key_headers(api_key)
        self._launched = launched
        self._layout = layout
        self.pool = Pool(
            [Server(url, self._headers) for url in (launched.urls if launched is not None else spec.urls)],
            health_timeout=spec.health_timeout,
            wait=spec.wait,
            admit=self._admit,
            wake=self._wake,
            probe=self.dialect.probe,
        )
        self.weights = GivenWeights()
        """Says which weights the servers must have."""
        self.encoder = RequestEncoder(self.dialect, vocab_size=format.vocab_size)
        """Encodes the requests; replaced when the servers' facts are known."""
        self.counts = dict.fromkeys((*_CERTIFICATE, *_COUNTED), 0)
        self.at_close: list[Callable[[], Awaitable[None]]] = []
        """Called by `close` while the servers can still be asked. They must not raise."""
        self.outage: Outage = self.pool.outage
        self.vocab_size, self.text_of = format.vocab_size, format.decode
        self.seconds = spec.timeout
        """Time limit of one reply."""
        self.resumes = spec.interrupted == "resume"
        """Whether a reply that was interrupted is continued."""
        self.tries = Deadlines(min(spec.try_timeout or spec.timeout / 2, spec.timeout))
        self.outage.clocks.add(self.tries)
        self.policy: PolicyAdapter | None = None
        """Set while the policy is a LoRA adapter: a reply then has the version of the adapter."""
        self.adapter_uses: Counter[str] = Counter()
        """Adapter name -> number of requests in flight that are sampled with it."""
        self.calls: dict[ReplyCall, Server] = {}
        """The requests that were sent and neither answered nor given up."""
        self._nonce = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._aborts: set[asyncio.Task[None]] = set()
        self.closed = False
        self._closing = asyncio.Event()
        self._stopped = False
        """Closed: no more aborts are sent."""

    async def _wake(self, server: Server) -> None:
        """Have a server that is out sample again, for its health check."""

    @abstractmethod
    async def _admit(self, server: Server) -> None:
        """Check a server that is back. Raises: BackendError: It must stay out."""

    def spread(self, number: int) -> None:
        """Begin with another server than the other processes of the run: among equally loaded servers the first is
        chosen."""
        servers = self.pool.servers
        servers[:] = [*servers[number % len(servers) :], *servers[: number % len(servers)]]

    def prepare(self, request: GenerateRequest) -> Awaitable[None] | None:
        """Prepare a request with images, banned ids or an adapter before it gets a slot. None: nothing must be done.

        Raises:
            BackendError: The servers cannot serve it.
        """
        return None

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one reply: ids int32 [tokens], log-probs float32 [tokens]. Cancelling the call stops the server's
        work.

        Raises:
            ContextOverflow: The prompt does not fit the servers' context.
            OutageError: No server replied to any request for `backend.wait`.
            BackendError: Kinds `timeout`, `unreachable`, `unavailable`, `rate_limited`, `server_error`, `bad_reply`,
                `bad_request`, `bad_prompt`, `prompt_mismatch`, `unauthorized`, `not_found`, `closed`.
        """
        return await self.generate_in_slot(request, Slots(1))

    async def generate_in_slot(self, request: GenerateRequest, slots: Slots) -> Generation:
        """See `Backend.generate_in_slot`. The usual reply is one wait: the rest happens in the callbacks of
        `ReplyCall`.

        Raises:
            ContextOverflow: The prompt does not fit the servers' context.
            BackendError: As `generate`.
        """
        if self.context is not None and len(request.input_ids) >= self.context:
            raise ContextOverflow(f"{len(request.input_ids)} tokens; the servers take fewer than {self.context}")
        special = request.images or request.banned_token_ids or request.adapter is not None
        if special and (preparing := self.prepare(request)) is not None:
            await preparing
        call = ReplyCall(self, request, slots)
        slots.take(call.start)
        try:
            await call.over
            return call.generation or await self._go_on(call)
        finally:
            if call.holds_slot:
                call.give_up()

    async def _go_on(self, call: ReplyCall) -> Generation:
        """Get the rest of a reply that was interrupted, or whose first request failed."""
        try:
            if (left := call.must_end - self.tries.now()) <= 0:
                raise TimeoutError
            with self.outage.clocks.timeout(min(left, self.seconds)):
                while call.generation is None:
                    if self.closed:
                        raise BackendError("the backend was closed", kind="closed")
                    if call.error is not None:
                        await self._before_another_try(call, call.error)
                    elif call.parts and call.parts[-1].finish.type == "abort":
                        call.resume()
                        if call.generation is not None:
                            break
                    await self.pool.available()
                    call.over, call.error = asyncio.get_running_loop().create_future(), None
                    call.send()
                    await call.over
        except TimeoutError:
            self.counts["timeouts"] += 1
            raise BackendError(f"no reply within {self.seconds:g} s", kind="timeout") from None
        return call.generation

    async def _before_another_try(self, call: ReplyCall, error: Exception) -> None:
        """Wait before another try at a request that failed, where all servers have failed it.

        An attempt that no server worked on does not count as a retry. Raises the error if there is no other try.
        """
        if not isinstance(error, BackendError):
            raise error
        call.tries = call.tries or Tries(self._spec.retries, self.pool.outage)
        if not call.tries.another(error):
            raise error
        if error.kind == "stale_weights" and not any(other.usable for other in self.pool.servers):
            raise error  # waiting brings no other weights: only the next push does
        assert call.server is not None  # else nothing is retried
        request, server, failed = call.request, call.server, call.failed_servers
        self.counts["retries"] += 1
        log.info("retrying", episode=request.episode_id, turn=request.turn, server=server.url, reason=str(error))
        if server not in failed:
            failed.append(server)
        if not error.refused and all(other in failed or not other.usable for other in self.pool.servers):
            with suppress(TimeoutError):
                async with asyncio.timeout(call.tries.pause):
                    await self._closing.wait()
                raise BackendError("the backend was closed", kind="closed")

    # -- what a `ReplyCall` asks

    def new_rid(self) -> str:
        """A request's id of fixed length: SGLang aborts every request whose id begins with the given one."""
        return f"{self._nonce}{next(self._numbers):012x}"

    def stale(self, server: Server, part: ReplyPart, expected: str) -> BackendError | None:
        """The error of a reply that was sampled with older weights than were expected when it was requested."""
        if expected != self.weights.expected or not len(part.ids) or part.version is None:
            return None
        if self.weights.accepts(part.version, expected):
            return None
        self.pool.failed(server, f"samples with weights {part.version!r}; every server was given {expected!r}")
        message = f"{server.url} samples with weights {part.version!r}, not {expected!r}"
        return BackendError(message, kind="stale_weights", retryable=True)

    def abort(self, server: Server, rid: str) -> None:
        """Have a server stop a request. This does not wait for the server; `close` does."""
        if self._stopped:
            return
        self.counts["aborts"] += 1
        if self.dialect.abort_path is None:  # its connection is closed, since the reply was not read to the end
            return
        targets = [server] if server in self.pool.workers else self.pool.workers
        for target in targets:
            task = asyncio.get_running_loop().create_task(self._send_abort(target, self.dialect.abort_path, rid))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _send_abort(self, server: Server, path: str, rid: str) -> None:
        try:
            await server.json("POST", path, {"rid": rid}, timeout=ABORT_SECONDS)
        except BackendError as error:  # a server that is gone has stopped anyway
            log.debug("abort was not delivered", server=server.url, rid=rid, reason=str(error))

    # -- the end

    def release(self, episode_id: str) -> None:
        """Drop the prompt and the server of an episode that has ended."""
        self.encoder.forget(episode_id)
        self.pool.forget(episode_id)
        if self.sessions is not None:
            self.sessions.end(episode_id)

    async def close(self) -> None:
        """Have the servers stop what is running, wait up to `ABORT_SECONDS` until they know, and close all
        connections."""
        self.closed = True
        self._closing.set()
        for call, server in list(self.calls.items()):
            self.abort(server, call.rid)
        if self._aborts:
            await asyncio.wait(list(self._aborts), timeout=ABORT_SECONDS)
        self._stopped = True
        late = list(self._aborts)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        for end in self.at_close:
            await end()
        await self.pool.close()
        if self._launched is not None:
            await self._launched.close()

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and the certificate of the prompts."""
        return {
            "certificate": {name: self.counts[name] for name in _CERTIFICATE},
            **{name: self.counts[name] for name in _COUNTED},
            "failovers": self.pool.failovers,
            **self.outage.stats(),
            "servers": [server.stats() for server in self.pool.servers],
            **({} if self._launched is None else {"launched": self._launched.stats()}),
        }
