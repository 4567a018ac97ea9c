"""Objectives beside the policy's loss: what they compute for the rows of a batch, and what they train by the same
passes.

Invariant: an objective adds columns and rewrites no row; an update with a number that is not finite changes neither the
policy nor an objective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

from engine.plugin import Hook
from engine.train.metric_sums import MetricSums

if TYPE_CHECKING:
    from engine.schemas.train import TrainSpec
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate
    from engine.train.learner import Learner
    from engine.train.loss_columns import LossColumns
    from engine.train.packed_model import PackedModel
    from engine.train.packing import Pack
    from engine.train.policy import Policy
    from engine.train.state_parts import StatePart


class AuxiliaryObjective:
    """One objective beside the policy's. A subclass defines what it needs."""

    epochs: int | None = 0
    """Passes over a batch in which it is trained; None: as many as the policy. Passes beyond the policy's leave the
    policy as it is."""
    reads_states: bool = False
    """Whether its loss reads hidden states of the policy."""
    diverged = (
        "the loss of an objective beside the policy's, or its gradient's norm, is not finite: the update was not "
        "applied"
    )
    """The message of an update that is not made; it should say what to lower, and which metrics to look at."""
    optimizer: Optimizer | None = None
    """The optimizer of its own parameters, made by `shard`; None if it has none."""
    parameters: Mapping[str, nn.Parameter] = MappingProxyType({})
    """What its optimizer updates, by name."""
    net: PackedModel | None = None
    """Its own model."""
    heads: Sequence[nn.Module] = ()
    """Its own layers that are not a part of `net`."""

    def shard(self, *, offload: bool) -> None:
        """Shard its weights over the processes, and make its optimizer. Called once, after the policy was sharded.

        Args:
            offload: Whether weights stay on the CPU (see `ProcessGroup.shard`).
        """

    def columns(
        self, columns: Sequence[LossColumns], learner: Learner, step: int
    ) -> tuple[Sequence[LossColumns], Mapping[str, float]]:
        """The columns of a batch before its first update, with those that it adds, and metrics of them."""
        return columns, {}

    def holds_policy(self, step: int) -> bool:
        """Whether the policy stays as it is in a step."""
        return False

    def predict(self, pack: Pack, states: Tensor | None) -> Tensor | None:
        """What its loss compares with targets, [n], with a graph to its own parameters. `states`: as in `loss`."""
        return None

    def loss(
        self, pack: Pack, columns: Sequence[LossColumns], states: Tensor | None
    ) -> tuple[Tensor, MetricSums] | None:
        """Its part of what is differentiated for a pack, a scalar with its graph, and metrics.

        Args:
            pack: The pack.
            columns: Those of all rows of the update, to which packs refer by numbers.
            states: The policy's hidden states before the pack's trained tokens, [n, H], if the objective
                `reads_states`. With their graph, unless the update leaves the policy as it is.
        """
        return None

    def clip_gradients(self) -> dict[str, float]:
        """Sum its gradients over processes and clip them. Returns the norms before, by their metrics; the update must
        not be made if one is not finite."""
        return {}

    def update(self) -> None:
        """Make a step of its optimizer with the gradients that are there."""

    def state_parts(self) -> dict[str, StatePart]:
        """Its parts of a checkpoint, by name."""
        return {}

    def held(self) -> list[Tensor]:
        """All of its weights, those that are not trained included, and their float32 copies; of any shape."""
        return []


OBJECTIVES: Hook[Callable[[LoadedSpec, TrainSpec, ChatTemplate, Policy], AuxiliaryObjective | None]]
OBJECTIVES = Hook("auxiliary_objective")
"""Makes the objective of a plugin for a training, not sharded; None if the spec needs none. The `TrainSpec` is the
section as it is used."""
