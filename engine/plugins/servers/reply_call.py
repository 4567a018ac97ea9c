"""One reply of a backend with servers: what happens without waiting.

Its request is sent as soon as a slot is free, by what frees the slot, and its reply is read in the callback in which it
arrives. What must wait (for a server, before another try) is left to `ServersBackend`.

Invariant: the slot is held from the first request until the whole reply is there; a request whose reply is not read to
the end is aborted on its server, so no server goes on sampling for nobody.
"""

from __future__ import annotations

import time
from math import inf
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from engine.errors import BackendError
from engine.plugins.servers.http.client import HttpCall
from engine.plugins.servers.http.reply import HttpFailure, HttpReply, refusal
from engine.plugins.servers.wire import (
    PromptMismatch,
    ReplyError,
    ReplyPart,
    can_resume,
    clean_cut,
    cut,
    join,
    read_reply,
)
from engine.schemas.generation import FinishReason, VersionSpan

if TYPE_CHECKING:
    from engine.backends.outage import Tries
    from engine.backends.slots import Slots
    from engine.plugins.servers.backend import ServersBackend
    from engine.plugins.servers.pool import Server
    from engine.schemas.generation import GenerateRequest, Generation

INTERRUPTIONS = 32
"""Maximum number of times that one reply is continued."""


class ReplyCall(HttpCall):
    """One reply: the request that is sent now, and the parts that are there.

    Args:
        backend: The backend.
        request: What is asked for.
        slots: The generation slots.
    """

    __slots__ = (
        "_backend", "_expected", "_policy", "_sent", "_slots", "asked", "began", "ends", "error", "failed_servers",
        "generation",
        "holds_slot", "ids", "interruptions", "most_tokens", "must_end", "parts", "request", "sampled", "server",
        "tries",
    )  # fmt: skip

    def __init__(self, backend: ServersBackend, request: GenerateRequest, slots: Slots) -> None:
        super().__init__()
        self._backend, self._slots = backend, slots
        self.request = request
        self.holds_slot = False
        self.generation: Generation | None = None
        """The whole reply."""
        self.parts: list[ReplyPart] = []
        """What is there of a reply that was interrupted."""
        self.interruptions = 0
        self.ends = inf
        """See `Watched.ends`; before the first request is sent nothing ends."""
        self.error: Exception | None = None
        """Why the newest request failed."""
        self.server: Server | None = None
        """The server of the newest request."""

    def start(self) -> bool:
        """Send the first request, because a slot is free. False: its caller was cancelled."""
        if self.over.done():
            return False
        self.holds_slot = True
        self.began = time.perf_counter()
        self.begin_part(self.request, self.request.input_ids, 0)
        self.send()
        self.must_end = self.ends + self._backend.seconds - self._backend.tries.seconds
        return True

    def begin_part(self, request: GenerateRequest, ids: np.ndarray, sampled: int) -> None:
        """Ask for the rest of the reply.

        Args:
            request: What is asked for.
            ids: The prompt and what is there of the reply, int32 [tokens].
            sampled: How many tokens of the reply are there.
        """
        self.ids, self.sampled, self.most_tokens = ids, sampled, request.max_new_tokens - sampled
        self.failed_servers: list[Server] = []
        self.tries: Tries | None = None
        policy = self._backend.policy
        self._policy = policy = None if request.adapter is not None or request.base_model else policy
        if policy is not None:
            self._backend.adapter_uses[policy.name] += 1
            request = replace(request, adapter=policy.name)
        self.asked = request

    def send(self) -> None:
        """Send a request to a server. Where none is there, `over` is done, without an error."""
        backend = self._backend
        try:
            server = backend.pool.choose(self.request.episode_id, self.failed_servers)
            if server is None or backend.closed:
                self.over.set_result(None)
                return
            rid, prefixes = backend.new_rid(), backend.weights.prefixes
            session = None
            if backend.sessions is not None and not self.sampled:
                session = backend.sessions.session(self.request, server, self.ids)
            self._sent = sent = backend.encoder.encode(
                self.asked, rid, self.ids, self.most_tokens, self.sampled, prefixes=prefixes, session=session
            )
        except Exception as error:  # noqa: BLE001  (the caller gets it, not who freed the slot)
            self._fail(error)
            return
        self.server, self._expected = server, backend.weights.expected
        self.pieces, self.most, self.fresh = (
            server.http.pieces("POST", backend.dialect.path, *sent.pieces),
            sent.most,
            False,
        )
        backend.counts["attempts"] += 1
        backend.calls[self] = server
        server.begin()
        backend.tries.watch(self)
        server.http.start(self)

    @property
    def rid(self) -> str:
        """The newest request's id."""
        return self._sent.rid

    def received(self, status: int, body: bytes | bytearray, retry_after: float | None, head: bytes) -> bool:
        """Read the reply to a request. See `HttpCall.received`."""
        backend, server = self._backend, self._end_request()
        try:
            part: ReplyPart | Exception = (
                read_reply(backend.dialect, body, self._sent, backend.encoder.vocab_size)
                if status == 200
                else refusal(server.url, HttpReply(status, bytes(body), retry_after))
            )
        except Exception as error:  # noqa: BLE001  (the caller gets it, not the event loop)
            part = error
        backend.pool.answered(server, status, retry_after)
        if status == 400 and self._sent.session is not None:  # most often it is gone: ask with the whole prompt
            self._end_session()
            self.send()
            return True
        if isinstance(part, ReplyError):
            backend.counts["bad_replies"] += 1
            message = f"{server.url} sent a reply that cannot be used: {part}"
            self._fail(BackendError(message, kind="bad_reply", retryable=True))
            return False  # it may belong to another request
        if isinstance(part, Exception):
            backend.counts["prompt_mismatches"] += isinstance(part, PromptMismatch)
            self._fail(part)
            return not isinstance(part, PromptMismatch)
        if part.version is not None:
            server.version = part.version
            if self._expected is not None and (stale := backend.stale(server, part, self._expected)) is not None:
                self._fail(stale)
                return True
        self._add(part)
        return True

    def _add(self, part: ReplyPart) -> None:
        policy, tokens = self._policy, len(part.ids)
        if policy is not None:
            self._end_policy()
            part = replace(part, versions=[VersionSpan(version=policy.version, start=0, end=tokens)] if tokens else [])
        self.parts.append(part)
        if self._sent.session is not None and part.finish.type != "abort" and self._backend.sessions is not None:
            self._backend.sessions.replied(self._sent, part.ids)
        if part.finish.type == "abort" and self._backend.resumes and self.interruptions < INTERRUPTIONS:
            self.over.set_result(None)
        else:
            self.complete(part.finish)

    def complete(self, finish: FinishReason) -> None:
        """Make the reply out of its parts, and free the slot."""
        self.generation = generation = join(self.parts, finish, time.perf_counter() - self.began)
        counts = self._backend.counts
        counts["turns"] += 1
        counts["turns_unchecked" if generation.prompt_unchecked else "turns_checked"] += 1
        counts["tokens"] += len(generation.output_ids)
        counts["cached_tokens"] += generation.cached_tokens
        counts["prompt_tokens"] += generation.prompt_tokens
        self.holds_slot = False
        if not self.over.done():
            self.over.set_result(None)
        self._slots.end()

    def resume(self) -> None:
        """Ask for the rest of a reply that was interrupted; or end it, where nothing is left to sample."""
        request, parts = self.request, self._kept_parts()
        self.interruptions += 1
        self._backend.counts["interruptions"] += 1
        self.parts = parts
        sampled = sum(len(part.ids) for part in parts)
        if sampled == request.max_new_tokens:
            self.complete(FinishReason(type="length"))
            return
        reported = sum(len(part.experts) for part in parts if part.experts is not None)
        if request.experts_from is not None and reported:  # experts that the parts have are not requested again
            request = replace(request, experts_from=request.experts_from + reported)
        self.begin_part(request, np.concatenate([request.input_ids, *(part.ids for part in parts)]), sampled)

    def _kept_parts(self) -> list[ReplyPart]:
        """The parts of an interrupted reply that its rest may be sampled after."""
        if not can_resume(self.request.sampling):
            return []
        sampled = [token for part in self.parts for token in part.ids.tolist()]
        keep = clean_cut(sampled, self.request.sampling.stop, self._backend.text_of)
        kept_parts: list[ReplyPart] = []
        for part in self.parts:
            if keep > 0 and len(part.ids):
                kept_parts.append(cut(part, min(keep, len(part.ids))))
            keep -= len(part.ids)
        return kept_parts

    def lost(self, failure: HttpFailure) -> None:
        """No reply came to a request. See `HttpCall.lost`."""
        backend, server = self._backend, self._end_request()
        if failure.sent:
            backend.abort(server, self._sent.rid)
        if not backend.closed:  # or it is our own doing
            backend.pool.failed(server, str(failure))
        message = f"{server.url}: {failure}"
        self._fail(BackendError(message, kind="unreachable", retryable=True, refused=not failure.sent))

    def strike(self) -> None:
        """No reply came to a request in time. See `Watched.strike`."""
        backend, server = self._backend, self._abort()
        backend.counts["try_timeouts"] += 1
        backend.pool.suspect(server)
        message = f"{server.url} did not reply within {backend.tries.seconds:g} s (`backend.try_timeout`)"
        self._fail(BackendError(message, kind="timeout", retryable=True))

    def give_up(self) -> None:
        """The reply is not wanted any more, or cannot be had: abort the request that is sent, and free the slot."""
        if self in self._backend.calls:
            self._abort()
        self._end_policy()
        self.holds_slot = False
        self._slots.end()

    def _end_policy(self) -> None:
        if self._policy is not None:
            self._backend.adapter_uses[self._policy.name] -= 1
            self._policy = None

    def _fail(self, error: Exception) -> None:
        self._end_session()
        self.error = error
        self.over.set_result(None)

    def _end_session(self) -> None:
        if self._backend.sessions is not None:
            self._backend.sessions.failed(self.request.episode_id)

    def _abort(self) -> Server:
        server = self._end_request()
        server.http.give_up(self)
        self._backend.abort(server, self._sent.rid)
        return server

    def _end_request(self) -> Server:
        """Count a request that was answered or given up."""
        backend = self._backend
        backend.tries.calls.pop(self, None)
        server = backend.calls.pop(self)
        server.end()
        return server
