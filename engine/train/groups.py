"""Which groups are consumed: trained on, left out, cancelled or dropped. A consumed group never trains again.

A group is identified by its number in the order of starts. `TaskOrder` gives the task and the epoch of each number, and with
them the names of its episodes in the run store, so the number identifies the same group in every launch of a training.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class ConsumedGroups:
    """A set of group numbers, kept short: all numbers below `next` belong to it, and those in `beyond`.

    >>> consumed = ConsumedGroups()
    >>> consumed.add([0, 1, 4])
    >>> (consumed.next, consumed.beyond, 4 in consumed, 3 in consumed)
    (2, {4}, True, False)
    """

    next: int = 0
    """The smallest number that is not consumed."""
    beyond: set[int] = field(default_factory=set)
    """Consumed numbers above `next`."""

    def __contains__(self, number: int) -> bool:
        return number < self.next or number in self.beyond

    def add(self, numbers: Iterable[int]) -> None:
        """Add group numbers."""
        self.beyond.update(number for number in numbers if number >= self.next)
        while self.next in self.beyond:
            self.beyond.remove(self.next)
            self.next += 1

    def copy(self) -> ConsumedGroups:
        """A copy that changes independently."""
        return ConsumedGroups(self.next, set(self.beyond))
