"""Backends whose servers take token ids: one reply of several requests, deadlines, and counts.

Invariant: one call of `generate` returns at most one generation, and each of its tokens was sampled after exactly the prompt
that was sent. Lost connections and servers change only the counts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.backends.backend import Backend
from engine.backends.http.keys import key_headers
from engine.backends.servers.attempts import Attempts
from engine.backends.servers.resume import can_resume, clean_cut, cut, join
from engine.backends.servers.server import Server
from engine.deadline import Deadlines
from engine.errors import BackendError, ContextOverflow
from engine.schemas.generation import FinishReason, GenerateRequest, Generation, SamplingParams

if TYPE_CHECKING:
    from engine.backends.http.outage import Outage
    from engine.backends.servers.attempts import Decode, GivenWeights
    from engine.backends.servers.launched import LaunchedServers
    from engine.backends.servers.pool import Pool
    from engine.backends.servers.reply import Part
    from engine.backends.servers.request import PromptEncoder
    from engine.schemas.backend import ServersSpec
    from engine.tokens.template import ChatTemplate

INTERRUPTIONS = 32
"""Maximum number of times that one reply is continued."""


def servers_of(spec: ServersSpec, api_key: str | None, launched: LaunchedServers | None) -> list[Server]:
    """Return the servers of `backend.urls`, or those that the engine starts.

    Raises:
        ValueError: a URL is invalid.
    """
    headers = key_headers(api_key)
    return [Server(url, headers) for url in (launched.urls if launched is not None else spec.urls)]


class ServersBackend(Backend):
    """Samples from one or more servers that take ids and report ids."""

    def __init__(
        self,
        spec: ServersSpec,
        format: ChatTemplate,
        *,
        sampling: SamplingParams,
        model: str,
        launched: LaunchedServers | None,
        pool: Pool,
        encoder: PromptEncoder,
        decode: Decode,
        path: str,
        abort_path: str | None,
        weights: GivenWeights,
    ) -> None:
        """Nothing is opened yet.

        Args:
            spec: Deadlines, retries, and what to do with interrupted replies.
            format: The model's chat format: vocabulary, decoding.
            sampling: The spec's sampling parameters, tested at the start.
            model: The model's name in the spec.
            launched: The servers of `spec.launch`, started with the backend and stopped with it.
            pool: The servers.
            encoder: See `Attempts`, as for `decode`, `path`, `abort_path` and `weights`.
            decode: Reads the body of a reply.
            path: Path of the requests.
            abort_path: Path of the calls that abort a request, if there is one.
            weights: Says which weights the servers must have.
        """
        self._spec = spec
        self._format = format
        self._sampling = sampling
        self._model = model
        self._counts: Counter[str] = Counter()
        self.pool = pool
        self.attempts = Attempts(
            pool,
            encoder,
            path=path,
            decode=decode,
            abort_path=abort_path,
            weights=weights,
            retries=spec.retries,
            try_timeout=spec.try_timeout or spec.timeout / 2,
            counts=self._counts,
        )
        self.at_close: list[Callable[[], Awaitable[None]]] = []
        """Called by `close` while the servers can still be asked. They must not raise."""
        self.outage: Outage = pool.outage
        self.vocab_size = format.vocab_size
        self._launched = launched
        self._timeout = spec.timeout
        self._resumes = spec.interrupted == "resume"
        self._decode = format.decode
        self._deadlines = Deadlines(spec.timeout)
        pool.outage.clocks.add(self._deadlines)
        pool.outage.clocks.add(self.attempts.deadlines)

    async def launch(self) -> None:
        """Start the servers of `backend.launch`, if there are any.

        Raises:
            BackendError: One of them does not start (kind `launch`).
        """
        if self._launched is not None:
            await self._launched.start(self.logs)

    def spread(self, number: int) -> None:
        """Begin with another server than the other processes of the run: among equally loaded servers the first is chosen."""
        self.pool.rotate(number)

    async def prepare(self, request: GenerateRequest) -> None:
        """Prepare a request before its deadline starts.

        Raises:
            BackendError: The servers cannot serve it.
        """

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one reply: ids int32 [tokens], log-probs float32 [tokens]. Cancelling the call stops the server's work.

        Raises:
            ContextOverflow: The prompt does not fit the servers' context.
            OutageError: No server replied to any request for `backend.wait`.
            BackendError: Kinds `timeout`, `unreachable`, `unavailable`, `rate_limited`, `server_error`, `bad_reply`,
                `bad_request`, `bad_prompt`, `prompt_mismatch`, `unauthorized`, `not_found`, `closed`.
        """
        began = time.perf_counter()
        if self.context is not None and len(request.input_ids) >= self.context:
            raise ContextOverflow(f"{len(request.input_ids)} tokens; the servers take fewer than {self.context}")
        await self.prepare(request)
        try:
            with self._deadlines.begin():
                part = await self._part(request, request.input_ids, request.max_new_tokens, 0)
                parts, finish = [part], part.finish
                if finish.type == "abort" and self._resumes:
                    parts, finish = await self._continue(request, part)
        except TimeoutError:
            self._counts["timeouts"] += 1
            raise BackendError(f"no reply within {self._timeout:g} s", kind="timeout") from None
        generation = join(parts, finish, time.perf_counter() - began)
        counts = self._counts
        counts["turns"] += 1
        counts["unchecked" if generation.prompt_unchecked else "checked"] += 1
        counts["tokens"] += len(generation.output_ids)
        counts["cached_tokens"] += generation.cached_tokens
        counts["prompt_tokens"] += generation.prompt_tokens
        return generation

    def release(self, episode_id: str) -> None:
        """Drop the prompt and the server of an episode that has ended."""
        self.attempts.encoder.forget(episode_id)
        self.pool.forget(episode_id)

    async def close(self) -> None:
        """Have the servers stop what is running, and close all connections."""
        await self.attempts.close()
        for end in self.at_close:
            await end()
        await self.pool.close()
        if self._launched is not None:
            await self._launched.close()

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
            "servers": [server.stats() for server in self.pool.servers],
            **({} if self._launched is None else {"launched": self._launched.stats()}),
        }

    # -- one reply

    async def _continue(self, request: GenerateRequest, part: Part) -> tuple[list[Part], FinishReason]:
        """Continue a reply whose first part was interrupted. Returns all parts."""
        parts: list[Part] = []
        for _ in range(INTERRUPTIONS):
            self._counts["interruptions"] += 1
            parts = self._kept(request, [*parts, part])
            sampled = sum(len(kept.ids) for kept in parts)
            if sampled == request.max_new_tokens:
                return parts, FinishReason(type="length")
            ids = np.concatenate([request.input_ids, *(kept.ids for kept in parts)])
            part = await self._part(_without_experts_of(request, parts), ids, request.max_new_tokens - sampled, sampled)
            if part.finish.type != "abort":
                break
        return [*parts, part], part.finish

    def _kept(self, request: GenerateRequest, parts: list[Part]) -> list[Part]:
        """The parts of an interrupted reply that its rest may be sampled after."""
        if not can_resume(request.sampling):
            return []
        sampled = [token for part in parts for token in part.ids.tolist()]
        keep = clean_cut(sampled, request.sampling.stop, self._decode)
        kept: list[Part] = []
        for part in parts:
            if keep > 0 and len(part.ids):
                kept.append(cut(part, min(keep, len(part.ids))))
            keep -= len(part.ids)
        return kept

    def _part(self, request: GenerateRequest, ids: np.ndarray, most: int, sampled: int) -> Coroutine[Any, Any, Part]:
        """One reply of one server; see `Attempts.reply`."""
        return self.attempts.reply(request, ids, most, sampled)


def _without_experts_of(request: GenerateRequest, parts: list[Part]) -> GenerateRequest:
    """The request for the rest of a reply: experts that `parts` have are not requested again."""
    known = sum(len(part.experts) for part in parts if part.experts is not None)
    if request.experts_from is None or not known:
        return request
    return replace(request, experts_from=request.experts_from + known)
