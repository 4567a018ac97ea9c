"""The keys of `limits` about condensing."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine.schemas.sections import SpecSection


class CondenseLimits(SpecSection):
    """Before a prompt that is too long."""

    on_overflow: Literal["end", "condense"] = "end"
    """What happens before a prompt that leaves no room for a reply: the event `limit`, or the event `overflow`, which leads to
    the action `condense` and back."""
    condensations: int | None = Field(default=8, ge=1)
    """Maximum number of condensations."""
