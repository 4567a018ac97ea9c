"""The parts of a reply that weight updates interrupted -> the request that continues it, and one reply of all parts.

Invariant: the kept tokens were sampled, each with its own log-prob and weight version. A reply with something that depends on
the whole of it (a stop string across the cut, a grammar, repetition penalties) starts again, or continues a few tokens
earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace

from engine.backends.servers.reply import ReplyPart
from engine.schemas.generation import FinishReason, Generation, SamplingParams, VersionSpan

TAIL = 64
"""Number of tokens before the cut that are decoded to find the beginning of a stop string."""


def can_resume(sampling: SamplingParams) -> bool:
    """Whether the rest of a reply may be sampled in a request of its own.

    A server applies penalties, grammars and expressions only to what it samples in one request.
    """
    whole = (
        sampling.frequency_penalty,
        sampling.presence_penalty,
        sampling.json_schema,
        sampling.regex,
        sampling.ebnf,
        sampling.structural_tag,
        sampling.stop_regex,
    )
    return not any(whole) and sampling.repetition_penalty in (None, 1.0)


def clean_cut(ids: Sequence[int], stops: Sequence[str], decode: Callable[[list[int]], str]) -> int:
    """How many of `ids` may stay, so that no stop string can begin before the cut and end after it.

    Args:
        ids: what was sampled.
        stops: the stop strings; the server looks for them in what it samples itself.
        decode: ids to text.

    Returns:
        At most len(ids): the longest beginning whose text does not end in the beginning of a stop string
        or in the middle of a character.
    """
    if not stops:
        return len(ids)
    count = len(ids)
    while count:
        text = decode(list(ids[max(0, count - TAIL) : count]))
        if not text.endswith("�") and not any(_begins_at_end(text, stop) for stop in stops):
            return count
        count -= 1
    return 0


def _begins_at_end(text: str, stop: str) -> bool:
    return any(text.endswith(stop[:size]) for size in range(1, len(stop)))


def cut(part: ReplyPart, count: int) -> ReplyPart:
    """The first `count` tokens of a part."""
    versions = [
        span if span.end <= count else VersionSpan(version=span.version, start=span.start, end=count)
        for span in part.versions
        if span.start < count
    ]
    removed = len(part.ids) - count
    experts = part.experts if part.experts is None or not removed else part.experts[: len(part.experts) - removed]
    return replace(part, ids=part.ids[:count], logprobs=part.logprobs[:count], versions=versions, experts=experts)


def join(parts: Sequence[ReplyPart], finish: FinishReason, seconds: float) -> Generation:
    """One generation out of its parts, in order; at least one.

    Args:
        parts: each begins where the one before it ends.
        finish: how the whole ended.
        seconds: how long it took.
    """
    first = parts[0]
    if len(parts) == 1:
        return Generation(
            output_ids=first.ids,
            logprobs=first.logprobs,
            finish=finish,
            versions=first.versions,
            prompt_tokens=first.prompt_tokens,
            prompt_unchecked=not first.echoed,
            cached_tokens=first.cached_tokens,
            seconds=seconds,
            queue_seconds=first.queue_seconds,
            routed_experts=first.experts,
        )
    return Generation(
        output_ids=np.concatenate([part.ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        finish=finish,
        versions=_join_versions(parts),
        prompt_tokens=first.prompt_tokens,
        prompt_unchecked=not all(part.echoed for part in parts),
        cached_tokens=first.cached_tokens,
        seconds=seconds,
        queue_seconds=sum(part.queue_seconds for part in parts),
        routed_experts=_join_experts(parts),
    )


def _join_experts(parts: Sequence[ReplyPart]) -> np.ndarray | None:
    """The experts of all parts; each part has those of the tokens for which no earlier part had any."""
    found = [part.experts for part in parts if part.experts is not None]
    return np.concatenate(found) if found else None


def _join_versions(parts: Sequence[ReplyPart]) -> list[VersionSpan]:
    spans: list[VersionSpan] = []
    at = 0
    for part in parts:
        own = part.versions or [VersionSpan(version=0, start=0, end=len(part.ids))]
        for span in own:
            if span.end == span.start:
                continue
            if spans and spans[-1].version == span.version:
                spans[-1] = VersionSpan(version=span.version, start=spans[-1].start, end=at + span.end)
            else:
                spans.append(VersionSpan(version=span.version, start=at + span.start, end=at + span.end))
        at += len(part.ids)
    return spans
