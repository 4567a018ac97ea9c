"""The checks of a reply that a backend says the model sampled."""

from __future__ import annotations

import math

import numpy as np

from engine.errors import BackendError
from engine.schemas.generation import Generation
from engine.tokens.format import ChatFormat
from engine.tokens.tape import largest


def check_sampled(form: ChatFormat, generation: Generation) -> None:
    """Refuse a reply that the model cannot have sampled.

    Raises:
        BackendError: An id is not in the vocabulary (`bad_token`), a log-probability is not finite (`bad_logprob`), or the arrays have
            other types or shapes than a `Generation` (`bad_reply`).
        ImageError: It contains a placeholder of images (`sampled_placeholder`).
    """
    ids, logprobs, size = generation.output_ids, generation.logprobs, form.vocab_size
    if not (_is_vector(ids, np.int32) and _is_vector(logprobs, np.float32) and len(ids) == len(logprobs)):
        raise BackendError(
            "the backend gave a reply whose `output_ids` and `logprobs` are not a flat int32 array and a flat float32 "
            "array of one length",
            kind="bad_reply",
        )
    if largest(ids) >= size:
        wrong = next(int(id_) for id_ in ids if not 0 <= id_ < size)
        raise BackendError(
            f"the backend sampled id {wrong}, but the model's vocabulary is [0, {size}): does it serve the model "
            "that the spec names?",
            kind="bad_token",
        )
    if form.vision is not None:
        form.vision.check_sampled(ids)
    if not math.isfinite(np.add.reduce(logprobs)):
        raise BackendError("the backend gave a log-probability that is not a finite number", kind="bad_logprob")


def _is_vector(array: np.ndarray, dtype: type[np.generic]) -> bool:
    """Whether a backend's array is of one dimension and of a type."""
    return isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim == 1
