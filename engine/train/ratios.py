"""Ratios of probabilities that are always numbers, and means over groups of tokens.

Invariants:
- A log-prob below `FLOOR` counts as `FLOOR`, and has no gradient: -inf minus -inf is then 0, and 0 times -inf is 0.
- A log-ratio above `LIMIT` counts as `LIMIT`, and has no gradient: exp never overflows, nor does its square in float32.
- Between the two, everything is exact. No bound is needed below: exp falls to 0, and its gradient with it.
- NaN stays NaN: a broken model is to be seen, not covered up.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOOR = -1e4
"""Of log-probs, in nats. A logit that is masked with -inf, or with the smallest float, comes to this."""

LIMIT = 20.0
"""Of log-ratios, in nats: a ratio is at most exp(20), about 4.9e8."""


def floored(logprobs: Tensor) -> Tensor:
    """Log-probs of any shape, none below `FLOOR`."""
    return logprobs.clamp(min=FLOOR)


def log_ratio(above: Tensor, below: Tensor) -> Tensor:
    """log(p / q) for log p and log q of one shape; finite wherever both are log-probs, -inf among them."""
    return floored(above) - floored(below)


def bounded_exp(exponent: Tensor) -> Tensor:
    """exp, at most exp(`LIMIT`)."""
    return exponent.clamp(max=LIMIT).exp()


def bounded_k3(exponent: Tensor) -> Tensor:
    """exp(d) - 1 - d for d of any shape, d at most `LIMIT`: never negative, 0 only for d = 0."""
    exponent = exponent.clamp(max=LIMIT)
    return torch.expm1(exponent) - exponent


def group_mean(values: Tensor, groups: Tensor) -> Tensor:
    """For each of [n] values, the mean over the values whose group (int64, [n]) is the same; has a gradient."""
    _, group, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    sums = values.new_zeros(len(sizes)).index_add(0, group, values)
    means: Tensor = (sums / sizes)[group]
    return means
