"""Rollout correction: importance weights of the tokens' losses for the difference between trainer and sampler.

The sampler drew the tokens (another engine, other kernels, perhaps older weights), but the denominator of the clipped ratio
is the proximal policy. With

    ratio = proximal / sampler

as weight of a loss in current / proximal, the product is current / sampler, the ratio of importance sampling. This is the
decoupled objective of AReaL (arXiv 2505.24298, equation 5): only current / proximal is clipped. If the proximal log-probs are
the current ones, the weight corrects the mismatch of sampler and trainer. If they are the sampler's, every weight is 1.

    truncate:  min(max(ratio, low), high)            truncated importance sampling (Ionides 2008; IMPALA's rho,
                                                     arXiv 1802.01561, 4.1)
    mask:      ratio where low <= ratio <= high,     masked importance sampling (IcePop, arXiv 2510.18855)
               else 0

At the level of a turn or a row, all of its tokens have one weight: the geometric mean of their ratios (as in GSPO, arXiv
2507.18071, equation 7), because a product would grow with the length. Weights have no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.schemas.train import Level, RolloutCorrectionSpec
from engine.train.loss_tokens import LossTokens
from engine.train.ratios import bounded_exp, group_mean, log_ratio


class CorrectionWeights(NamedTuple):
    """The weights of the tokens, and which tokens `mask` dropped."""

    weights: Tensor
    """[n], detached: factor of each token's policy loss."""
    masked: Tensor
    """bool [n]: true for tokens that `mask` dropped."""


def correction_weights(spec: RolloutCorrectionSpec, tokens: LossTokens) -> CorrectionWeights:
    """Compute the weight of each token, [n]; 1 for all tokens with `kind: none`."""
    ratio = proximal_sampler_ratio(spec.level, tokens)
    if spec.kind == "none":
        return CorrectionWeights(torch.ones_like(ratio), torch.zeros_like(ratio, dtype=torch.bool))
    if spec.kind == "truncate":
        return CorrectionWeights(ratio.clamp(spec.low, spec.high), torch.zeros_like(ratio, dtype=torch.bool))
    masked = (ratio < spec.low) | (ratio > spec.high)
    return CorrectionWeights(ratio.masked_fill(masked, 0.0), masked)


def proximal_sampler_ratio(level: Level, tokens: LossTokens) -> Tensor:
    """proximal / sampler, [n], detached, at the given level."""
    with torch.no_grad():
        logs = log_ratio(tokens.proximal, tokens.sampler)
        if level == "turn":
            logs = group_mean(logs, tokens.turns)
        elif level == "sequence":
            logs = group_mean(logs, tokens.rows)
        return bounded_exp(logs)


def effective_sample_fraction(count: float, total: float, squares: float) -> float:
    """Kish's effective sample size of weights w as a fraction of n: (sum w)^2 / (n * sum w^2), from 1 / n to 1.

    Args:
        count: n.
        total: sum w.
        squares: sum w^2.

    Returns:
        The fraction; 0 if all weights are 0 or there are none.
    """
    return total * total / (count * squares) if count and squares else 0.0
