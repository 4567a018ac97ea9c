"""The sampler of another library's trainer as a backend: what the adapters share.

Invariant: a reply without a log-prob and a weight version for each of its tokens is an error, and never a row.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.backends.backend import Backend
from engine.errors import BackendError, ContextOverflow, EngineError
from engine.plugins.servers.wire import ReplyError
from engine.plugins.sglang.routing import checked_experts
from engine.schemas.generation import FinishReason, Generation, VersionSpan

if TYPE_CHECKING:
    from engine.plugins.trainers.pixels import Pixels
    from engine.schemas.backend import BackendBase
    from engine.schemas.generation import GenerateRequest, SamplingParams
    from engine.tokens.experts import ExpertLayout

PER_REPLY = ("max_new_tokens", "stop_token_ids")
"""Parameters of `sampling` that every request has in fields of its own."""


@dataclass(frozen=True, slots=True)
class TrainerReply:
    """What a trainer's sampler replied."""

    ids: Sequence[int]
    """The sampled ids, a sampled stop token too."""
    logprobs: Sequence[float] | None
    """One for each id; None if the sampler gave none."""
    versions: Sequence[int]
    """The weight version of each id."""
    cut: bool
    """Whether the reply ended at its maximum length."""
    cached: int = 0
    """Tokens of the prompt that the sampler had in its cache."""
    experts: np.ndarray | None = None
    """From the prompt's first token to the reply's last but one, or further; integers [tokens, layers, top_k]."""


class TrainerBackend(Backend):
    """A trainer's sampler as a backend. A subclass implements `sample`.

    `GenerateRequest.banned_token_ids` are not sent, so that sampler and trainer have one distribution; an episode
    whose reply has one of them fails (`sampled_placeholder`).

    Args:
        title: The trainer's name, for messages.
        declared: The config class of the spec's backend, for its capabilities.
        context: Maximum length of a sequence in tokens.
    """

    pixels: Pixels | None = None
    """Where `sample` gets the images of a request; None: requests with images are refused."""
    layout: ExpertLayout | None = None
    """The model's experts, if `sample` returns them; None: requests for experts are refused."""

    def __init__(self, title: str, declared: type[BackendBase], *, context: int | None) -> None:
        self.title = title
        self.declared = declared
        self.context = context
        self._counts = Counter(requests=0, tokens=0)

    @classmethod
    def open(cls, spec: Any, format: Any, loaded: Any) -> TrainerBackend:
        """Refuse: a spec does not open it; the adapter makes it inside the trainer.

        Raises:
            BackendError: always.
        """
        raise BackendError("this backend is made inside a trainer, by its adapter", kind="wrong_backend")

    @abstractmethod
    async def sample(self, request: GenerateRequest) -> TrainerReply:
        """Ask the trainer's sampler for one reply. Any exception of the trainer may be raised."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one reply.

        Raises:
            ContextOverflow: The prompt leaves no room for one token.
            BackendError: The request needs something that the sampler is not given (kind `unsupported`), the sampler
                failed (kind `sampler`), or its reply lacks log-probs or versions, or is empty (kind `invalid_reply`).
        """
        began = time.perf_counter()
        length = len(request.input_ids)
        if self.context is not None and length + 1 > self.context:
            raise ContextOverflow(f"the prompt has {length} tokens; {self.title}'s sampler takes {self.context}")
        self._refuse(request)
        try:
            reply = await self.sample(request)
        except EngineError:
            raise
        except Exception as error:
            raise BackendError(
                f"{self.title}'s sampler failed: {type(error).__name__}: {error}", kind="sampler"
            ) from error
        ids = np.asarray(reply.ids, np.int32)
        count = None if reply.logprobs is None else len(reply.logprobs)
        if not len(ids) or count != len(ids) or len(reply.versions) != len(ids):
            raise BackendError(
                f"{self.title}'s sampler gave {len(ids)} tokens, {'no' if count is None else count} log-probs and "
                f"{len(reply.versions)} weight versions; the engine needs a log-prob and a version for each token",
                kind="invalid_reply",
            )
        matched = int(ids[-1]) if ids[-1] in request.stop_token_ids else None
        self._counts["requests"] += 1
        self._counts["tokens"] += len(ids)
        return Generation(
            output_ids=ids,
            logprobs=np.asarray(reply.logprobs, np.float32),
            finish=FinishReason(type="length" if reply.cut and matched is None else "stop", matched=matched),
            versions=spans_of(reply.versions),
            prompt_tokens=length,
            cached_tokens=reply.cached,
            seconds=time.perf_counter() - began,
            routed_experts=self._experts(reply, request, length + len(ids) - 1),
        )

    def _experts(self, found: TrainerReply, request: GenerateRequest, end: int) -> np.ndarray | None:
        if request.experts_from is None or self.layout is None:
            return None
        if found.experts is None or len(found.experts) < end:
            given = "no experts" if found.experts is None else f"the experts of {len(found.experts)} tokens"
            raise BackendError(f"{self.title}'s sampler gave {given} where {end} are needed", kind="invalid_reply")
        try:
            return checked_experts(np.asarray(found.experts)[request.experts_from : end], self.layout)
        except ReplyError as error:
            raise BackendError(f"{self.title}'s sampler gave a wrong reply: {error}", kind="invalid_reply") from None

    def _refuse(self, request: GenerateRequest) -> None:
        asked = {
            "images": request.images and self.pixels is None,
            "a LoRA adapter or the base model": request.adapter is not None or request.base_model,
            "the experts that were chosen": request.experts_from is not None and self.layout is None,
        }
        named = [name for name, value in asked.items() if value]
        if named:
            raise BackendError(
                f"this adapter does not send to {self.title}'s sampler: {', '.join(named)}; use `engine train`",
                kind="unsupported",
            )

    def stats(self) -> dict[str, Any]:
        """`requests` and `tokens` that were sampled, and what a subclass counts."""
        return dict(self._counts)


def spans_of(versions: Sequence[int]) -> list[VersionSpan]:
    """The versions of a reply's tokens as spans."""
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [VersionSpan(version=int(versions[at]), start=at, end=until) for at, until in pairwise(edges) if at < until]


def given(sampling: SamplingParams, names: Mapping[str, str]) -> dict[str, Any]:
    """The parameters of a spec's `sampling` that are set, by a sampler's names; `names`: name in the spec -> there."""
    values = sampling.model_dump(exclude_none=True)
    return {there: values[here] for here, there in names.items() if values.get(here) not in (None, [])}


def unsupported(sampling: SamplingParams, names: Collection[str]) -> list[str]:
    """The parameters of a spec's `sampling` that are set and that a sampler, which takes `names`, does not take."""
    values = sampling.model_dump(exclude_none=True, exclude_defaults=True)
    return [name for name in values if name not in (*names, *PER_REPLY)]
