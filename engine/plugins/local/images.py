"""The images of one prompt: their tokens, and where the prompt may be split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, eq=False)
class PromptImages:
    """The images of one prompt, in order."""

    ids: np.ndarray
    """The prompt, int32 [tokens]."""
    marked: np.ndarray
    """The prompt with a negative number in place of each placeholder, one number for each different image, int32 [tokens]. Prompts
    with equal beginnings here show equal images there."""
    digests: list[str]
    spans: list[tuple[int, int]]
    """The tokens [start, end) of each image."""
    positions: torch.Tensor | None = None
    """Position ids of the prompt, int64 [axes, tokens]; computed by the model at the first pass."""

    def whole(self, length: int) -> int:
        """The largest part of the first `length` tokens that ends in no image."""
        return next((start for start, end in self.spans if start < length < end), length)

    def end(self, start: int) -> int:
        """The end of the image that begins at token `start`; `start` if there is none."""
        return next((end for begin, end in self.spans if begin == start), start)

    def within(self, start: int, end: int) -> list[str]:
        """The images that begin at the tokens [start, end)."""
        return [digest for digest, (begin, _) in zip(self.digests, self.spans, strict=True) if start <= begin < end]
