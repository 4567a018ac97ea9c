"""Search for stop strings in sampled token ids.

Only the newest token can complete a stop string, so only a window that is long enough for the longest string is decoded
after each token. Ids are never changed: a token that extends past the stop string stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.schemas.generation import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from engine.schemas.generation import GenerateRequest

_SLACK = 4
"""Tokens of a window in addition to the string's length: a character may need four byte tokens, and decoding may
drop the leading space of the window's first token."""


class StopStrings:
    """Search for the stop strings of one request.

    >>> stops = StopStrings(format.decode, ["</answer>"])
    >>> stops.matched(output_ids)      # called after each token
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], strings: Sequence[str]) -> None:
        self._decode = decode
        self._strings = tuple(strings)
        longest = max((len(string.encode()) for string in self._strings), default=0)
        self._window = longest + _SLACK

    def __bool__(self) -> bool:
        return bool(self._strings)

    def matched(self, output_ids: Sequence[int] | np.ndarray) -> str | None:
        """The stop string that the newest token completes; the earliest in the text if there are several.

        Args:
            output_ids: The sampled ids so far, shape [tokens]. Only the last one is checked.
        """
        if not self._strings or not len(output_ids):
            return None
        window = [int(token) for token in output_ids[-self._window :]]
        text = self._decode(window)
        matches = [(at, string) for string in self._strings if (at := text.find(string)) >= 0]
        return min(matches)[1] if matches else None

    def first(self, ids: Sequence[int]) -> tuple[int, str] | None:
        """Search a whole reply. Returns the number of `ids` to keep, and the stop string that ends them."""
        if not self._strings:
            return None
        for end in range(1, len(ids) + 1):
            if (string := self.matched(ids[max(0, end - self._window) : end])) is not None:
                return end, string
        return None


def finish_reason(
    request: GenerateRequest, output_ids: Sequence[int] | np.ndarray, most: int, stops: StopStrings
) -> FinishReason | None:
    """The reason why the newest token ends a reply that is sampled in this process; None if it does not end.

    Args:
        request: The request of the reply.
        output_ids: The sampled ids so far, shape [tokens], at least one.
        most: Maximum number of sampled ids.
        stops: The request's stop strings.
    """
    count = len(output_ids)
    if count >= min(request.sampling.min_new_tokens or 0, most):
        newest = int(output_ids[-1])
        if newest in request.stop_token_ids and not request.sampling.ignore_eos:
            return FinishReason(type="stop", matched=newest)
        if stops and (string := stops.matched(output_ids)) is not None:
            return FinishReason(type="stop", matched=string)
    return FinishReason(type="length") if count >= most else None
