"""Off-policy correction: a weight on each token's loss for the difference between trainer and sampler.

The tokens were drawn by the sampler (another engine, other kernels, perhaps weights of some versions ago), while the
clipped ratio is against the proximal policy. With

    ratio = proximal / sampler

as the weight of a loss in current / proximal, the product is current / sampler, as importance sampling wants it: the
decoupled objective of AReaL (arXiv 2505.24298, equation 5), where only the second factor is clipped. Where the proximal
log-probs are the current ones, this is the usual correction of a mismatch; where they are the sampler's, every weight
is 1.

    truncate:  min(max(ratio, low), high)            truncated importance sampling (Ionides 2008; IMPALA's rho,
                                                     arXiv 1802.01561, 4.1)
    mask:      ratio where low <= ratio <= high,     masked importance sampling (IcePop, arXiv 2510.18855)
               else 0

At the level of a turn or a row, log ratio is the mean of its tokens' (the ratio their geometric mean, as GSPO's, arXiv
2507.18071, equation 7), one weight for all of them: a product would grow with the length. CorrectionWeights have no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.schemas.train import Level, RolloutCorrectionSpec
from engine.train.ratios import bounded_exp, group_mean, log_ratio
from engine.train.tokens import Tokens


class CorrectionWeights(NamedTuple):
    """What the correction comes to."""

    weights: Tensor
    """[n], detached, what each token's policy loss is multiplied by."""
    masked: Tensor
    """bool [n]: tokens that `mask` dropped."""


def correction_weights(spec: RolloutCorrectionSpec, tokens: Tokens) -> CorrectionWeights:
    """Each token's weight; 1 everywhere with `kind: none`."""
    ratio = proximal_sampler_ratio(spec.level, tokens)
    if spec.kind == "none":
        return CorrectionWeights(torch.ones_like(ratio), torch.zeros_like(ratio, dtype=torch.bool))
    if spec.kind == "truncate":
        return CorrectionWeights(ratio.clamp(spec.low, spec.high), torch.zeros_like(ratio, dtype=torch.bool))
    masked = (ratio < spec.low) | (ratio > spec.high)
    return CorrectionWeights(ratio.masked_fill(masked, 0.0), masked)


def proximal_sampler_ratio(level: Level, tokens: Tokens) -> Tensor:
    """proximal / sampler of [n], detached, at the level asked for."""
    with torch.no_grad():
        logs = log_ratio(tokens.proximal, tokens.sampler)
        if level == "turn":
            logs = group_mean(logs, tokens.turns)
        elif level == "sequence":
            logs = group_mean(logs, tokens.rows)
        return bounded_exp(logs)


def effective_sample_fraction(count: float, total: float, squares: float) -> float:
    """Kish's effective sample size of weights w, as a share of them: (sum w)^2 / (n * sum w^2), from 1 / n to 1.

    Args:
        count: n.
        total: sum w.
        squares: sum w^2.

    Returns:
        0 where all weights are 0, and where there are none.
    """
    return total * total / (count * squares) if count and squares else 0.0
