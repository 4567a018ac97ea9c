"""How much work a check may take: counted in steps, not in seconds, so that the same spec always gets the same answer."""

from __future__ import annotations

from math import inf

from engine.errors import EngineError


class WorkLimitError(EngineError):
    """There is more to do than is done; whoever asked for it says so."""

    kind = "too_much"
    blame = "spec"

    def __init__(self, message: str = "the spec is too large to be looked at whole") -> None:
        super().__init__(message)


class Work:
    """What is left to spend; one unit is one step of a loop, roughly a microsecond or two."""

    __slots__ = ("left",)

    def __init__(self, left: float = inf) -> None:
        self.left = left

    def spend(self, units: float = 1) -> None:
        """Count some work.

        Raises:
            WorkLimitError: nothing is left.
        """
        self.left -= units
        if self.left < 0:
            raise WorkLimitError
