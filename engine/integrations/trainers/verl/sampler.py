"""Samples with the servers of verl: a backend over verl's LLMServerClient, ids in, and ids, log-probs and weight versions out."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.backends.base import Backend
from engine.errors import BackendError, ContextOverflow
from engine.schemas.generation import FinishReason, Generation, VersionSpan

if TYPE_CHECKING:
    from engine.schemas.backend_base import BackendBase
    from engine.schemas.generation import GenerateRequest, SamplingParams

SHARED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
)
"""The parameters of `sampling` that verl's SGLang and vLLM servers both take, under the same names."""


class VerlBackend(Backend):
    """The servers of a verl training as a backend.

    verl reports the versions of a reply as a smallest and a largest one. If they differ, all tokens get the smallest one, and
    `collapsed_versions` of `stats` counts the reply.
    """

    def __init__(self, client: Any, declared: type[BackendBase], *, context: int | None) -> None:
        """
        Args:
            client: verl's `LLMServerClient`.
            declared: The config class of the spec's backend, for its capabilities.
            context: Maximum length of a sequence in tokens.
        """
        self._client = client
        self.declared = declared
        self.context = context
        self._counts: Counter[str] = Counter()

    @classmethod
    def open(cls, spec: Any, format: Any, loaded: Any) -> VerlBackend:
        """Refuse: a spec does not open it; verl's manager makes it.

        Raises:
            BackendError: always.
        """
        raise BackendError("this backend is made inside verl's training, by EngineManager", kind="wrong_backend")

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one reply with the server that has the episode's prefix.

        Raises:
            ContextOverflow: The prompt leaves no room for one token.
            BackendError: The request was aborted (kind `aborted`, may be tried again), or the reply has no log-probs or no
                version (kind `invalid_reply`).
        """
        began = time.perf_counter()
        length = len(request.input_ids)
        if self.context is not None and length + 1 >= self.context:
            raise ContextOverflow(f"the prompt has {length} tokens; verl's servers take {self.context}")
        found = await self._client.generate(
            request.episode_id, prompt_ids=request.input_ids.tolist(), sampling_params=sampling_params(request)
        )
        if found.stop_reason in ("aborted", "abort"):
            raise BackendError("verl's server aborted the request", kind="aborted", retryable=True)
        ids = np.asarray(found.token_ids, np.int32)
        if found.log_probs is None or len(found.log_probs) != len(ids):
            raise BackendError(
                f"verl's server gave {'no' if found.log_probs is None else len(found.log_probs)} log-probs for {len(ids)} tokens; set "
                "`actor_rollout_ref.rollout.calculate_log_probs=true`",
                kind="invalid_reply",
            )
        oldest, newest = versions_of(found.extra_fields)
        self._counts["requests"] += 1
        self._counts["tokens"] += len(ids)
        self._counts["collapsed_versions"] += oldest != newest
        return Generation(
            output_ids=ids,
            logprobs=np.asarray(found.log_probs, np.float32),
            finish=_finish(ids, request),
            versions=[VersionSpan(version=oldest, start=0, end=len(ids))] if len(ids) else [],
            prompt_tokens=length,
            cached_tokens=int(found.extra_fields.get("num_cached_tokens") or 0),
            seconds=time.perf_counter() - began,
        )

    def stats(self) -> dict[str, Any]:
        """`requests`, `tokens`, and `collapsed_versions`: replies of several versions."""
        return {name: self._counts[name] for name in ("requests", "tokens", "collapsed_versions")}


def versions_of(extra_fields: dict[str, Any]) -> tuple[int, int]:
    """The smallest and the largest weight version of a reply.

    Raises:
        BackendError: kind `invalid_reply`: the server did not tell them.
    """
    single = extra_fields.get("global_steps")
    oldest, newest = (extra_fields.get(name, single) for name in ("min_global_steps", "max_global_steps"))
    if oldest is None or newest is None:
        raise BackendError("verl's server gave no weight version (`global_steps`)", kind="invalid_reply")
    return int(oldest), int(newest)


def sampling_params(request: GenerateRequest) -> dict[str, Any]:
    """A request's sampling parameters under the names that both kinds of servers take."""
    given = request.sampling.model_dump(exclude_none=True)
    found = {name: given[name] for name in SHARED if given.get(name) not in (None, [])}
    return found | {
        "max_new_tokens": request.max_new_tokens,
        "stop_token_ids": sorted(set(request.stop_token_ids)),
        "logprobs": True,
    }


def unsupported(sampling: SamplingParams) -> list[str]:
    """The parameters that are set and that verl's servers do not both take."""
    given = sampling.model_dump(exclude_none=True, exclude_defaults=True)
    return [name for name in given if name not in (*SHARED, "max_new_tokens")]


def _finish(ids: np.ndarray, request: GenerateRequest) -> FinishReason:
    if len(ids) and int(ids[-1]) in request.stop_token_ids:
        return FinishReason(type="stop", matched=int(ids[-1]))
    return FinishReason(type="length") if len(ids) >= request.max_new_tokens else FinishReason(type="stop")
