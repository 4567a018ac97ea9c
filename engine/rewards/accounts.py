"""One reward of one turn, summed exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence


class Account:
    """The sum of one reward of one turn: exact, and rounded only when it is read.

    The partials are Shewchuk's non-overlapping floats (Discrete & Computational Geometry 18, 1997, fig. 7), as in `math.fsum`.
    Their sum is exact, so the order of postings does not matter.
    """

    __slots__ = ("held", "partials")

    def __init__(self, partials: Sequence[float] = (0.0,)) -> None:
        self.partials = list(partials)
        self.held = math.fsum(partials)

    def plus(self, delta: float) -> Account:
        """The account after one more posting."""
        partials = []
        for partial in self.partials:
            high, low = (delta, partial) if abs(delta) >= abs(partial) else (partial, delta)
            delta = high + low
            rest = low - (delta - high)
            if rest:
                partials.append(rest)
        if delta or not partials:
            partials.append(delta)
        return Account(partials)
