"""The keys of a spec."""

from __future__ import annotations

from pydantic import Field

from engine.schemas.sections import SpecSection


class SumCheckSpec(SpecSection):
    """What the action `check_sums` gives for a reply, and whether the model may check sums itself."""

    right: float = 0.0
    """Reward `sums` of a reply whose sums are all right."""
    wrong: float = -0.5
    """Reward `sums` of a reply with a wrong sum."""
    tool: bool = False
    """Whether the model gets the tool `check_sums`."""


class SumCheckLimits(SpecSection):
    """How often sums are checked."""

    sum_checks: int | None = Field(default=3, ge=1)
    """Maximum number of replies whose sums are checked."""
