"""What the core asks of a critic (`train.critic`). The kinds are added by plugins.

A critic predicts, before each sampled token, the rewards that are still to come. Credit methods with `needs_values` read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from engine.schemas.base import Contract
from engine.schemas.open_union import OneOf


class CriticBase(Contract):
    """Base class of the critics."""

    own_model: ClassVar[bool] = False
    """It computes its values with a model of its own, not from the policy's hidden states."""

    if TYPE_CHECKING:  # a literal of each class
        kind: str

    @property
    def bootstraps(self) -> frozenset[str]:
        """The limits that cut an episode without being its end, by their names in outcomes: the value of the last state counts as the
        rewards that would have come."""
        return frozenset()


CRITICS: OneOf[CriticBase] = OneOf("critics", base=CriticBase)
CriticSpec = Annotated[CriticBase, CRITICS]
"""The critic; `kind` selects it."""
