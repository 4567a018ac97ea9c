"""The loss of a critic: squared errors of its values, clipped as PPO clips its policy, and their metrics.

Invariant: the loss of an update is the mean over all of its trained values, however its rows are cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.plugins.critic.spec import ValueCritic
from engine.schemas.base import Struct
from engine.train.metric_sums import MetricSums

if TYPE_CHECKING:
    from engine.rewards.credit import Values
    from engine.train.loss_columns import LossColumns
    from engine.train.packing import Pack


class ValueTokens(Struct, frozen=True, eq=False, kw_only=True):
    """Tensors [n] of the value loss, in the order of a pack's trained tokens."""

    values: Tensor
    """A critic's values before the tokens, with their graph."""
    old: Tensor
    """The values before the batch's first update."""
    returns: Tensor
    """The targets of the values."""
    weights: Tensor
    """Factor of each token in the value loss: 0 where no value is trained."""

    @classmethod
    def of(cls, values: Tensor, pack: Pack, columns: Sequence[LossColumns]) -> ValueTokens:
        """The tokens of a pack.

        Args:
            values: The critic's values before the pack's trained tokens, [n], with their graph.
            pack: The pack.
            columns: Those of the whole update, with `values`, `returns` and `has_value`.
        """
        count = max(1.0, sum(float(of_row.extra["has_value"].sum()) for of_row in columns))

        def column(of_rows: Sequence[Values]) -> Tensor:
            flat = np.concatenate(of_rows) if of_rows else np.zeros(0)
            return torch.as_tensor(flat, dtype=torch.float32).to(values.device)

        packed = [columns[number].extra for number in pack.rows]
        return cls(
            values=values,
            old=column([of_row["values"] for of_row in packed]),
            returns=column([of_row["returns"] for of_row in packed]),
            weights=column([of_row["has_value"] / count for of_row in packed]),
        )


def value_losses(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Each token's value loss.

        1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)

    The maximum is that of PPO's code (openai/baselines, ppo2; arXiv 2005.12729, section 3): a value that is already further than
    `clip` from the old one, in the direction of its target, has no gradient.

    Args:
        values: V, [n], with its graph.
        old: V before the batch's first update, [n].
        returns: R, the targets, [n].
        clip: Largest change that is rewarded; None: 1/2 (V - R)^2.

    Returns:
        The losses, [n], with their graph, and whether the clipped value decides, bool [n].
    """
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    clipped = (torch.clamp(values, old - clip, old + clip) - returns).square()
    decides = clipped > plain
    return 0.5 * torch.where(decides, clipped, plain), decides


def value_objective(spec: ValueCritic, tokens: ValueTokens) -> tuple[Tensor, MetricSums]:
    """The contribution of a micro-batch to the value loss of an update, a scalar with its graph, and its metrics.

    Args:
        spec: The critic's section.
        tokens: The micro-batch; n may be 0.
    """
    losses, clipped = value_losses(tokens.values, tokens.old, tokens.returns, spec.clip)
    trained = tokens.weights > 0
    metrics = MetricSums()
    metrics.mean("critic/loss", losses[trained])
    metrics.mean("critic/clip_fraction", clipped[trained])
    return (tokens.weights * losses).sum(), metrics


def value_metrics(columns: Sequence[LossColumns]) -> dict[str, float]:
    """Mean value, mean target and explained variance before the first update: 1 - Var(target - value) / Var(target).

    The explained variance is 1 for exact values and 0 for a constant; it is left out if all targets are equal.
    """
    trained = [of_row.extra["has_value"] > 0 for of_row in columns]
    values, returns = (
        np.concatenate([of_row.extra[name][mask] for of_row, mask in zip(columns, trained, strict=True)])
        for name in ("values", "returns")
    )
    if not len(values):
        return {}
    metrics = {"critic/value_mean": float(values.mean()), "critic/return_mean": float(returns.mean())}
    if (spread := float(returns.var())) > 1e-12:
        metrics["critic/explained_variance"] = 1.0 - float((returns - values).var()) / spread
    return metrics
