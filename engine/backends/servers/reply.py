"""The body of a server's reply -> ids and log-probs, or a typed error."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from engine.errors import BackendError
from engine.schemas.generation import FinishReason, VersionSpan

_FLOAT32_MAX = float(np.finfo(np.float32).max)
ROUNDING = 1e-5
"""Maximum log-prob: float32 rounding can bring the log of a probability of 1 above 0."""


class ReplyError(Exception):
    """A reply is unusable; another try may succeed."""


class ReplyPart(msgspec.Struct, frozen=True):
    """One reply of the server: a whole generation, or what was sampled before it was interrupted."""

    ids: np.ndarray
    """int32 [tokens]"""
    logprobs: np.ndarray
    """float32 [tokens]"""
    finish: FinishReason
    versions: list[VersionSpan]
    """Cover [0, tokens)."""
    version: str | None
    """The last weights' own name."""
    prompt_tokens: int
    cached_tokens: int
    queue_seconds: float
    echoed: bool
    """Whether the server's prompt was compared with the one that was sent."""
    experts: np.ndarray | None = None
    """[tokens, layers, top_k]: the experts of the tokens from `EncodedRequest.experts_from` up to the last but one."""


class PromptMismatch(BackendError):
    """The server worked on another prompt than the one it was sent.

    It shows the first difference between the ids that were sent, shape [n], and those that the server saw.
    """

    def __init__(self, sent: np.ndarray, seen: Sequence[int]) -> None:
        at = next(
            (i for i, (a, b) in enumerate(zip(sent.tolist(), seen, strict=False)) if a != b), min(len(sent), len(seen))
        )
        self.at = at
        window = slice(max(0, at - 2), at + 3)
        super().__init__(
            f"the server's prompt is not the one it was sent: they differ at token {at}. Sent {sent[window].tolist()} "
            f"({len(sent)} tokens), the server saw {list(seen[window])} ({len(seen)} tokens), from token {window.start} on",
            kind="prompt_mismatch",
        )


def arrays(ids: list[int], values: list[Any], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Sampled ids and their log-probs, as int32 [tokens] and float32 [tokens], both read-only.

    Raises:
        ReplyError: An id is outside the vocabulary, or a log-prob is not finite or above 0.
    """
    array = _int32(ids)
    if array is None or (
        ids and np.maximum.reduce(array.view(np.uint32)) >= vocab_size
    ):  # a negative one is the largest
        raise ReplyError(f"it holds an id outside the vocabulary of {vocab_size}")
    logprobs = _float32(values)
    if logprobs is None:
        at = next(at for at, value in enumerate(values) if value is None or not abs(value) <= _FLOAT32_MAX)
        raise ReplyError(f"token {at} has no finite log-prob")
    if values and np.maximum.reduce(logprobs) > ROUNDING:
        at = next(at for at, value in enumerate(values) if value > ROUNDING)
        raise ReplyError(f"token {at} has the log-prob {values[at]:g}; none is above 0")
    return array, logprobs


@lru_cache(4096)
def _packer(form: str) -> Callable[..., bytes]:
    return struct.Struct(form).pack


def _int32(values: list[int]) -> np.ndarray | None:
    """The values as int32 [tokens], read-only; None where one does not fit. At half the cost of `np.array`."""
    try:
        return np.frombuffer(_packer(f"{len(values)}i")(*values), np.int32)
    except struct.error:
        return None


def _float32(values: list[float | None]) -> np.ndarray | None:
    """The values as float32 [tokens], read-only; None where one is not a finite number."""
    try:
        if math.isfinite(sum(values)):  # type: ignore[arg-type]
            return np.frombuffer(_packer(f"{len(values)}f")(*values), np.float32)
    except (TypeError, OverflowError):  # a null among them; one too large
        pass
    return None


@lru_cache(256)
def ending(kind: str, matched: int | str | None, message: str | None) -> FinishReason:
    """A `FinishReason`, kept: replies end in few ways."""
    return FinishReason.read({"type": kind, "matched": matched, "message": message})
