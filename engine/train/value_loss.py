"""The loss of a critic: squared errors of its values, clipped as PPO clips its policy."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.schemas.critic import CriticBase
from engine.train.loss_tokens import ValueTokens
from engine.train.metric_sums import MetricSums


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


def value_objective(spec: CriticBase, tokens: ValueTokens) -> tuple[Tensor, MetricSums]:
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
