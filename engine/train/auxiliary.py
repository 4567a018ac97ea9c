"""Objectives beside the policy's loss: what they compute for the rows of a batch, and what they train by the same passes.

Invariant: an objective adds columns and rewrites no row; an update with a number that is not finite changes neither the policy nor an
objective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from engine.schemas.base import Struct
from engine.train.metric_sums import MetricSums

if TYPE_CHECKING:
    from engine.train.learner import Learner
    from engine.train.loss_columns import LossColumns
    from engine.train.packing import Pack
    from engine.train.state_parts import StatePart


class Forward(Struct, frozen=True, eq=False, kw_only=True):
    """What an objective's loss of one pack reads."""

    columns: Sequence[LossColumns]
    """Those of all rows of the update, to which packs refer by numbers."""
    states: Tensor | None
    """The policy's hidden states before the pack's trained tokens, [n, H], if the objective `reads_states`. With their graph, unless
    the update leaves the policy as it is."""


class AuxiliaryObjective:
    """One objective beside the policy's. A subclass defines what it needs."""

    epochs: int | None = 0
    """Passes over a batch in which it is trained; None: as many as the policy. Passes beyond the policy's leave the policy as it is."""
    reads_states: bool = False
    """Whether its loss reads `Forward.states`."""
    diverged = "the loss of an objective beside the policy's, or its gradient's norm, is not finite: the update was not applied"
    """The message of an update that is not made; it should say what to lower, and which metrics to look at."""

    def columns(
        self, columns: Sequence[LossColumns], learner: Learner, step: int
    ) -> tuple[Sequence[LossColumns], Mapping[str, float]]:
        """The columns of a batch before its first update, with those that it adds, and metrics of them."""
        return columns, {}

    def holds_policy(self, step: int) -> bool:
        """Whether the policy stays as it is in a step."""
        return False

    def loss(self, pack: Pack, forward: Forward) -> tuple[Tensor, MetricSums] | None:
        """Its part of what is differentiated for a pack, a scalar with its graph, and metrics."""
        return None

    def clip_gradients(self) -> dict[str, float]:
        """Sum its gradients over processes and clip them. Returns the norms before, by their metrics; the update must not be made if one
        is not finite."""
        return {}

    def update(self) -> None:
        """Make a step of its optimizer with the gradients that are there."""

    def zero_gradients(self) -> None:
        """Forget its gradients."""

    def state_parts(self) -> dict[str, StatePart]:
        """Its parts of a checkpoint, by name."""
        return {}
