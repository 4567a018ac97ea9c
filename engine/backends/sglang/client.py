"""SGLang servers as a backend: requests, retries, what an interrupted reply becomes, and the certificate.

Invariant: one call of `generate` hands on at most one generation, whose every token was sampled after
exactly the prompt that was sent. What was lost on the way (a connection, a server) leaves no trace but counts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import secrets
import time
from collections import Counter
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import structlog
from msgspec.structs import replace

from engine.backends.base import Backend
from engine.backends.http.keys import key_headers, read_key
from engine.backends.http.outage import Outage
from engine.backends.http.refusal import refusal
from engine.backends.http.reply import HttpFailure, HttpReply
from engine.backends.http.retries import Tries
from engine.backends.sglang.checks import ask_worker, check_model_path, check_server, check_servers
from engine.backends.sglang.control import Control
from engine.backends.sglang.images import refuse_family
from engine.backends.sglang.pool import Pool
from engine.backends.sglang.resume import can_resume, clean_cut, cut, join
from engine.backends.sglang.server import Server
from engine.backends.sglang.wire import DEFAULT_VERSION, Encoder, Outgoing, Part, PromptMismatch, ReplyError, decode
from engine.deadline import Deadlines
from engine.errors import BackendError, ContextOverflow
from engine.schemas.backend import SGLangBackendSpec
from engine.schemas.generation import FinishReason, GenerateRequest, Generation, SamplingParams, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.backends.sglang.verify import Difference
    from engine.schemas.backend import SGLangBackendSpec
    from engine.spec.load import LoadedSpec
    from engine.tokens.format import ChatFormat

log = structlog.get_logger(__name__)

INTERRUPTIONS = 32
"""Most times that one reply is taken up again."""
ABORT_SECONDS = 2.0
"""How long closing waits for servers to be told what to stop."""


class PolicyAdapter(NamedTuple):
    """The adapter that requests without one of their own are sampled with, while a policy is trained as one."""

    name: str
    version: int


class SGLangBackend(Backend):
    """Samples from one or more SGLang servers.

    backend = SGLangBackend.open(spec, chat_format, loaded)
    await backend.start()                           # reaches all servers, checks model and sampling
    generation = await backend.generate(request)
    await backend.control.update_weights_from_disk("step-10/", version=10)
    await backend.close()                           # has the servers stop what is still running
    """

    declared = SGLangBackendSpec

    def __init__(
        self,
        spec: SGLangBackendSpec,
        format: ChatFormat,
        *,
        sampling: SamplingParams,
        model: str,
        api_key: str | None = None,
        folder: Callable[[], Path] | None = None,
    ) -> None:
        """Nothing is opened yet.

        Args:
            spec: servers, deadlines, retries.
            format: the model's chat format: vocabulary, context, decoding.
            sampling: the spec's own parameters, tried out at the start.
            model: what the spec calls the model.
            api_key: sent as a bearer token.
            folder: finds the model's files, for `spec.verify`.
        """
        headers = key_headers(api_key)
        self._spec = spec
        self._format = format
        self._sampling = sampling
        self._model = model
        self._folder = folder
        self._headers = headers
        self.pool = Pool(
            (Server(url, headers) for url in spec.urls),
            health_timeout=spec.health_timeout,
            wait=spec.wait,
            admit=self._admit,
        )
        self.outage: Outage = self.pool.outage
        self.control = Control(self.pool)
        self.vocab_size = format.vocab_size
        self.policy: PolicyAdapter | None = None
        """Set while the policy is a LoRA adapter: the version of a reply is then the adapter's."""
        self.adapter_uses: Counter[str] = Counter()
        """Requests on their way, by the policy's adapter that they name."""
        self.dropped: list[str] = []
        """Parameters that a router does not pass on."""
        self.verified: Difference | None = None
        """How far the servers' log-probs are from the model's files; None where `spec.verify` does not ask."""
        self._encoder = Encoder(vocab_size=self.vocab_size, vision=format.vision)
        self._nonce = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._calls: dict[str, Server] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._told = False
        """Closed: servers were told what to stop, and are told nothing more."""
        self._closed = asyncio.Event()
        self._deadlines = Deadlines(spec.timeout)
        self._try_deadlines = Deadlines(spec.try_timeout or spec.timeout / 2)
        self.outage.clocks.add(self._deadlines)
        self.outage.clocks.add(self._try_deadlines)
        self._counts: Counter[str] = Counter()

    @classmethod
    def open(cls, spec: SGLangBackendSpec, format: ChatFormat, loaded: LoadedSpec) -> SGLangBackend:
        """See `Backend.open`.

        Raises:
            BackendError: The variable of the API key is not set, a URL is invalid, or the model's images cannot be served.
        """
        from engine.tokens.catalogue import resolve_model

        if format.vision is not None:
            refuse_family(format.vision)
        try:
            return cls(
                spec,
                format,
                sampling=loaded.spec.sampling,
                model=loaded.spec.model.path,
                api_key=read_key(spec.api_key_env),
                folder=lambda: resolve_model(loaded.spec.model.path, loaded.spec.model.revision, loaded.base),
            )
        except ValueError as error:
            raise BackendError(f"backend.urls: {error}", kind="bad_url") from None

    @classmethod
    async def check_weights(cls, spec: SGLangBackendSpec, folder: Path) -> None:
        """Check that every server samples with the weights in `folder`.

        Raises:
            OutageError: A server cannot be reached.
            BackendError: A server has other weights (kind `wrong_server`), or refuses to answer.
        """
        await check_model_path(spec.urls, key_headers(read_key(spec.api_key_env)), folder)

    @property
    def workers(self) -> list[Server]:
        """Servers that take control calls: those of `backend.urls`, or those behind the router."""
        return self.pool.workers

    async def start(self) -> None:
        """Reach the servers and check that they serve this model, and take this spec's sampling.

        Raises:
            BackendError: none is there, or one of them cannot serve this spec.
        """
        facts = await check_servers(self.pool, self._spec, self._format, self._sampling, self._model, self._headers)
        self.vocab_size = facts.vocab_size
        self.context = facts.context
        self.dropped = facts.dropped
        self._encoder = Encoder(
            vocab_size=facts.vocab_size,
            seeded=any(server.seeded for server in self.workers),
            echo="return_prompt_token_ids" not in facts.dropped,
            vision=self._format.vision,
        )
        if self._spec.verify and self._folder is not None:
            from engine.backends.sglang.verify import verify_servers

            there = [server for server in self.workers if server.healthy]
            given = {server.url: server.version for server in there if server.version not in (None, DEFAULT_VERSION)}
            if given:  # by a training that goes on: not those of the spec's files
                log.warning("not verified: servers were given other weights since they started", versions=given)
            else:
                self.verified = await verify_servers(there, self._format, self._folder, ask_worker)
        self.pool.watch()

    async def generate(self, request: GenerateRequest) -> Generation:
        """One reply, whatever happens on the way to it. Cancelling the call tells the server to stop.

        Raises:
            ContextOverflow: the prompt does not fit the servers' context.
            OutageError: no server replied to any request for `backend.wait`.
            BackendError: kinds `timeout`, `unreachable`, `unavailable`, `rate_limited`, `server_error`, `bad_reply`,
                `bad_request`, `bad_prompt`, `prompt_mismatch`, `unauthorized`, `not_found`, `closed`.
        """
        began = time.perf_counter()
        if request.banned_token_ids and "logit_bias" in self.dropped:
            raise BackendError(
                "the router drops logit_bias, so ids cannot be banned; name the servers themselves", kind="unsupported"
            )
        if request.adapter is not None and request.adapter in self.control.unloaded:
            raise BackendError(f"the adapter {request.adapter!r} was unloaded", kind="bad_request")
        if self.context is not None and len(request.input_ids) >= self.context:
            raise ContextOverflow(f"{len(request.input_ids)} tokens; the servers take fewer than {self.context}")
        if request.images:
            await self._encoder.scale_images(request)
        try:
            with self._deadlines.begin():
                part = await self._part(request, request.input_ids, request.max_new_tokens, 0)
                parts, finish = [part], part.finish
                if finish.type == "abort" and self._spec.interrupted != "report":
                    parts, finish = await self._taken_up(request, part)
        except TimeoutError:
            self._counts["timeouts"] += 1
            raise BackendError(f"no reply within {self._spec.timeout:g} s", kind="timeout") from None
        generation = join(parts, finish, time.perf_counter() - began)
        counts = self._counts
        counts["turns"] += 1
        checked = part.echoed if len(parts) == 1 else all(part.echoed for part in parts)
        counts["checked" if checked else "unchecked"] += 1
        counts["tokens"] += len(generation.output_ids)
        counts["cached_tokens"] += generation.cached_tokens
        counts["prompt_tokens"] += generation.prompt_tokens
        return generation

    def release(self, episode_id: str) -> None:
        """The episode is over: forget its prompt and its server."""
        self._encoder.forget(episode_id)
        self.pool.forget(episode_id)

    async def close(self) -> None:
        """Tell the servers to stop what is running, and close every connection."""
        self._closed.set()
        for rid, server in list(self._calls.items()):
            self.abort(server, rid)
        if self._aborts:
            await asyncio.wait(list(self._aborts), timeout=ABORT_SECONDS)
        self._told = True
        late = list(self._aborts)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        await self.pool.close()

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and the certificate of the prompts."""
        names = (
            "turns",
            "tokens",
            "prompt_tokens",
            "cached_tokens",
            "attempts",
            "retries",
            "interruptions",
            "aborts",
            "timeouts",
            "try_timeouts",
        )
        return {
            "certificate": {
                "turns_checked": self._counts["checked"],
                "turns_unchecked": self._counts["unchecked"],
                "prompt_mismatches": self._counts["mismatches"],
            },
            **{name: self._counts[name] for name in names},
            "bad_replies": self._counts["bad_replies"],
            "failovers": self.pool.failovers,
            **self.outage.stats(),
            "seeded": self._encoder.seeded,
            "dropped_by_router": list(self.dropped),
            "servers": [server.stats() for server in self.pool.servers],
            **({} if self._format.vision is None else {"images": self._images()}),
            **({} if self.verified is None else {"verified": self.verified._asdict()}),
        }

    def _images(self) -> dict[str, Any]:
        """How images were shown: see images.py."""
        known = [server.images for server in self.workers if server.images is not None]
        return {
            "sent": "scaled",
            "server_processors": sorted({facts.processor for facts in known}),
            "unscaled_gap": max((facts.unscaled_gap for facts in known), default=None),
        }

    # -- one reply

    async def _taken_up(self, request: GenerateRequest, part: Part) -> tuple[list[Part], FinishReason]:
        """The parts of a reply whose first one was interrupted."""
        parts: list[Part] = []
        for _ in range(INTERRUPTIONS):
            self._counts["interruptions"] += 1
            parts = self._kept(request, [*parts, part])
            sampled = sum(len(kept.ids) for kept in parts)
            if sampled == request.max_new_tokens:
                return parts, FinishReason(type="length")
            ids = np.concatenate([request.input_ids, *(kept.ids for kept in parts)])
            part = await self._part(request, ids, request.max_new_tokens - sampled, sampled)
            if part.finish.type != "abort":
                break
        return [*parts, part], part.finish

    def _kept(self, request: GenerateRequest, parts: list[Part]) -> list[Part]:
        """What of an interrupted reply its rest may be sampled after."""
        if not can_resume(request.sampling):
            return []
        sampled = [token for part in parts for token in part.ids.tolist()]
        keep = clean_cut(sampled, request.sampling.stop, self._format.decode)
        kept: list[Part] = []
        for part in parts:
            if keep > 0 and len(part.ids):
                kept.append(cut(part, min(keep, len(part.ids))))
            keep -= len(part.ids)
        return kept

    def _part(self, request: GenerateRequest, ids: np.ndarray, most: int, sampled: int) -> Coroutine[Any, Any, Part]:
        """One reply of one server, sampled with the policy's adapter where it is one."""
        if self.policy is None or request.adapter is not None:
            return self._tried(request, ids, most, sampled)
        return self._adapted(self.policy, request, ids, most, sampled)

    async def _adapted(
        self, policy: PolicyAdapter, request: GenerateRequest, ids: np.ndarray, most: int, sampled: int
    ) -> Part:
        self.adapter_uses[policy.name] += 1
        try:
            named = dataclasses.replace(request, adapter=policy.name)
            part = await self._tried(named, ids, most, sampled)
        finally:
            self.adapter_uses[policy.name] -= 1
        tokens = len(part.ids)
        return replace(part, versions=[VersionSpan(version=policy.version, start=0, end=tokens)] if tokens else [])

    async def _tried(self, request: GenerateRequest, ids: np.ndarray, most: int, sampled: int) -> Part:
        """The same after as many attempts as it takes. What no server worked on uses up no try."""
        failed: list[Server] = []
        tries: Tries | None = None
        while True:
            server = self.pool.choose(request.episode_id, failed)
            if server is None:
                server = await self.pool.available(request.episode_id, failed)
            try:
                return await self._attempt(server, self._encode(request, ids, most, sampled))
            except BackendError as error:
                if self._closed.is_set():
                    raise BackendError("the backend was closed", kind="closed") from None
                tries = tries or Tries(self._spec.retries, self.outage)
                if not tries.another(error):
                    raise
                if error.kind == "stale_weights" and not any(other.usable for other in self.pool.servers):
                    raise  # waiting brings no other weights: only the next push does
                refused = error.refused
                self._counts["retries"] += 1
                log.info(
                    "retrying", episode=request.episode_id, turn=request.turn, server=server.url, reason=str(error)
                )
            if server not in failed:
                failed.append(server)
            if not refused and all(other in failed or not other.usable for other in self.pool.servers):
                await self._wait(tries.pause)

    def _encode(self, request: GenerateRequest, ids: np.ndarray, most: int, sampled: int) -> Outgoing:
        return self._encoder.encode(request, self._rid(), ids, most, sampled, prefixes=self.control.prefixes)

    def _rid(self) -> str:
        """A name of fixed length: SGLang aborts every request whose name begins with the one it is given."""
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
        """Send once. The server is told to stop where its reply is not waited for to the end."""
        if self._closed.is_set():
            raise BackendError("the backend was closed", kind="closed")
        self._counts["attempts"] += 1
        expected = self.control.expected
        self._calls[sent.rid] = server
        server.begin()
        try:
            read = partial(_read, sent, self.vocab_size)
            with self._try_deadlines.begin():
                reply = await server.http.request("POST", "/generate", *sent.pieces, read=read, most=sent.most)
        except HttpFailure as failure:
            if failure.sent:
                self.abort(server, sent.rid)
            if not self._closed.is_set():  # or it is our own doing
                self.pool.failed(server, str(failure))
            message = f"{server.url}: {failure}"
            raise BackendError(message, kind="unreachable", retryable=True, refused=not failure.sent) from None
        except TimeoutError:
            self.abort(server, sent.rid)
            self._counts["try_timeouts"] += 1
            self.pool.suspect(server)
            message = f"{server.url} did not reply within {self._try_deadlines.seconds:g} s (`backend.try_timeout`)"
            raise BackendError(message, kind="timeout", retryable=True) from None
        except asyncio.CancelledError:
            self.abort(server, sent.rid)
            raise
        finally:
            server.end()
            del self._calls[sent.rid]
        self.pool.answered(server, reply.status, reply.retry_after)
        if reply.status != 200:
            raise refusal(server.url, HttpReply(reply.status, reply.read, None, reply.retry_after))
        return self._accepted(server, reply.read, expected)

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
                and expected == self.control.expected
                and part.version != expected
                and len(part.ids)
            ):
                self.pool.failed(server, f"samples with weights {part.version!r}; every server was given {expected!r}")
                message = f"{server.url} samples with weights {part.version!r}, not {expected!r}"
                raise BackendError(message, kind="stale_weights", retryable=True)
        return part

    def abort(self, server: Server, rid: str) -> None:
        """Have a server stop a request, without waiting for it; `close` waits."""
        if self._told:
            return
        self._counts["aborts"] += 1
        targets = [server] if server in self.workers else self.workers
        for target in targets:
            task = asyncio.get_running_loop().create_task(self._send_abort(target, rid))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _send_abort(self, server: Server, rid: str) -> None:
        try:
            await server.json("POST", "/abort_request", {"rid": rid}, timeout=ABORT_SECONDS)
        except BackendError as error:  # a server that is gone works for nobody
            log.debug("abort was not delivered", server=server.url, rid=rid, reason=str(error))

    async def _admit(self, server: Server) -> None:
        """A server that was away may have been started anew, as something else even: give it what the others have."""
        await self.control.catch_up(server)
        if self._spec.router:
            return
        found = await check_server(server, self._spec, self._format, self._sampling, self._model)
        if self.context is None:  # the first check of all is still going on
            return
        if (found.vocab_size or self.vocab_size) < self.vocab_size or (found.context or self.context) < self.context:
            raise BackendError(f"{server.url} came back with a smaller vocabulary or context", kind="wrong_server")


def _read(sent: Outgoing, vocab_size: int, status: int, body: bytes) -> Part | ReplyError | PromptMismatch | bytes:
    """A reply decoded, or what is wrong with it; one that is no 200 as it is."""
    if status != 200:
        return body
    try:
        return decode(body, sent, vocab_size)
    except (ReplyError, PromptMismatch) as error:
        return error
