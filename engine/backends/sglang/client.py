"""SGLang servers as a backend: interrupted replies, the policy's adapter, and the certificate of prompts.

Invariant: one call of `generate` returns at most one generation, and each of its tokens was sampled after exactly the prompt
that was sent. Lost connections and servers change only the counts.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import structlog
from msgspec.structs import replace

from engine.backends.base import Backend
from engine.backends.http.keys import key_headers, read_key
from engine.backends.http.outage import Outage
from engine.backends.sglang.attempts import Attempts
from engine.backends.sglang.checks import ask_worker, check_model_path, check_server, check_servers
from engine.backends.sglang.control import Control
from engine.backends.sglang.images import refuse_family
from engine.backends.sglang.pool import Pool
from engine.backends.sglang.reply_body import DEFAULT_VERSION, Part
from engine.backends.sglang.request_body import Encoder
from engine.backends.sglang.resume import can_resume, clean_cut, cut, join
from engine.backends.sglang.server import Server
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
"""Maximum number of times that one reply is continued."""


class PolicyAdapter(NamedTuple):
    """The LoRA adapter under training: requests that name no adapter are sampled with it."""

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
            spec: Servers, deadlines, retries.
            format: The model's chat format: vocabulary, context, decoding.
            sampling: The spec's sampling parameters, tested at the start.
            model: The model's name in the spec.
            api_key: Sent as a bearer token.
            folder: Finds the model's files, for `spec.verify`.
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
        """Set while the policy is a LoRA adapter: a reply then has the version of the adapter."""
        self.adapter_uses: Counter[str] = Counter()
        """Adapter name -> number of requests in flight that are sampled with it."""
        self.dropped: list[str] = []
        """Parameters that the router drops."""
        self.verified: Difference | None = None
        """Difference between the servers' log-probs and those of the model's files; None without `spec.verify`."""
        self._counts: Counter[str] = Counter()
        self.attempts = Attempts(
            self.pool,
            self.control,
            Encoder(vocab_size=self.vocab_size, vision=format.vision),
            retries=spec.retries,
            try_timeout=spec.try_timeout or spec.timeout / 2,
            counts=self._counts,
        )
        self._deadlines = Deadlines(spec.timeout)
        self.outage.clocks.add(self._deadlines)
        self.outage.clocks.add(self.attempts.deadlines)

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
        """Reach the servers, and check that they serve this model and accept this spec's sampling.

        Raises:
            OutageError: No server can be reached.
            BackendError: A server cannot serve this spec.
        """
        facts = await check_servers(self.pool, self._spec, self._format, self._sampling, self._model, self._headers)
        self.vocab_size = facts.vocab_size
        self.context = facts.context
        self.dropped = facts.dropped
        self.attempts.encoder = Encoder(
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
        """Sample one reply: ids int32 [tokens], log-probs float32 [tokens]. Cancelling the call stops the server's work.

        Raises:
            ContextOverflow: The prompt does not fit the servers' context.
            OutageError: No server replied to any request for `backend.wait`.
            BackendError: Kinds `timeout`, `unreachable`, `unavailable`, `rate_limited`, `server_error`, `bad_reply`,
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
            await self.attempts.encoder.scale_images(request)
        try:
            with self._deadlines.begin():
                part = await self._part(request, request.input_ids, request.max_new_tokens, 0)
                parts, finish = [part], part.finish
                if finish.type == "abort" and self._spec.interrupted != "report":
                    parts, finish = await self._continue(request, part)
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
        """Drop the prompt and the server of an episode that has ended."""
        self.attempts.encoder.forget(episode_id)
        self.pool.forget(episode_id)

    async def close(self) -> None:
        """Have the servers stop what is running, and close all connections."""
        await self.attempts.close()
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
            "seeded": self.attempts.encoder.seeded,
            "dropped_by_router": list(self.dropped),
            "servers": [server.stats() for server in self.pool.servers],
            **({} if self._format.vision is None else {"images": self._images()}),
            **({} if self.verified is None else {"verified": self.verified._asdict()}),
        }

    def _images(self) -> dict[str, Any]:
        """How servers processed images; see images.py."""
        known = [server.images for server in self.workers if server.images is not None]
        return {
            "sent": "scaled",
            "server_processors": sorted({facts.processor for facts in known}),
            "unscaled_gap": max((facts.unscaled_gap for facts in known), default=None),
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
            part = await self._part(request, ids, request.max_new_tokens - sampled, sampled)
            if part.finish.type != "abort":
                break
        return [*parts, part], part.finish

    def _kept(self, request: GenerateRequest, parts: list[Part]) -> list[Part]:
        """The parts of an interrupted reply that its rest may be sampled after."""
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
        """One reply of one server, sampled with the policy's adapter if there is one and the request is not for the base model."""
        if self.policy is None or request.adapter is not None or request.base_model:
            return self.attempts.reply(request, ids, most, sampled)
        return self._adapted(self.policy, request, ids, most, sampled)

    async def _adapted(
        self, policy: PolicyAdapter, request: GenerateRequest, ids: np.ndarray, most: int, sampled: int
    ) -> Part:
        self.adapter_uses[policy.name] += 1
        try:
            named = dataclasses.replace(request, adapter=policy.name)
            part = await self.attempts.reply(named, ids, most, sampled)
        finally:
            self.adapter_uses[policy.name] -= 1
        tokens = len(part.ids)
        return replace(part, versions=[VersionSpan(version=policy.version, start=0, end=tokens)] if tokens else [])

    async def _admit(self, server: Server) -> None:
        """Give a server that is back the weights and adapters of the others, and check it: it may serve another model now."""
        await self.control.catch_up(server)
        if self._spec.router:
            return
        found = await check_server(server, self._spec, self._format, self._sampling, self._model)
        if self.context is None:  # the first check of all is still going on
            return
        if (found.vocab_size or self.vocab_size) < self.vocab_size or (found.context or self.context) < self.context:
            raise BackendError(f"{server.url} came back with a smaller vocabulary or context", kind="wrong_server")
