"""A budget for the work of a check, counted in steps and not in seconds, so that a spec always gets the same result."""

from __future__ import annotations

from math import inf

from engine.errors import EngineError


class WorkLimitError(EngineError):
    """The work of a check exceeds its budget."""

    kind = "work_limit"
    blame = "spec"

    def __init__(self, message: str = "the spec is too large to check completely") -> None:
        super().__init__(message)


class Work:
    """The remaining budget. One unit is one step of a loop, about one or two microseconds."""

    __slots__ = ("left",)

    def __init__(self, left: float = inf) -> None:
        self.left = left

    def spend(self, units: float = 1) -> None:
        """Take some units from the budget.

        Raises:
            WorkLimitError: the budget is used up.
        """
        self.left -= units
        if self.left < 0:
            raise WorkLimitError
