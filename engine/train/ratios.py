"""Probability ratios that are always finite, and means over groups of tokens.

Invariants:
- A log-prob below `FLOOR` is replaced by `FLOOR` without gradient, so -inf minus -inf is 0 and 0 times -inf is 0.
- A log-ratio above `LIMIT` is replaced by `LIMIT` without gradient, so neither exp nor its square overflows in float32.
- Values between the bounds are exact. Log-ratios need no lower bound: exp and its gradient go to 0.
- NaN stays NaN, so that a broken model is visible.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOOR = -1e4
"""Lower bound of log-probs, in nats. Logits masked with -inf or with the smallest float have this log-prob."""

LIMIT = 20.0
"""Upper bound of log-ratios, in nats: a ratio is at most exp(20), about 4.9e8."""


def floored(logprobs: Tensor) -> Tensor:
    """Log-probs of any shape, clamped to at least `FLOOR`."""
    return logprobs.clamp(min=FLOOR)


def log_ratio(above: Tensor, below: Tensor) -> Tensor:
    """log(p / q) for log p and log q of one shape; finite for all log-probs, -inf included."""
    return floored(above) - floored(below)


def bounded_exp(exponent: Tensor) -> Tensor:
    """exp of any shape, at most exp(`LIMIT`)."""
    return exponent.clamp(max=LIMIT).exp()


def bounded_k3(exponent: Tensor) -> Tensor:
    """exp(d) - 1 - d for d of any shape, with d clamped to at most `LIMIT`. Never negative; 0 only for d = 0."""
    exponent = exponent.clamp(max=LIMIT)
    return torch.expm1(exponent) - exponent


def group_mean(values: Tensor, groups: Tensor) -> Tensor:
    """For each of [n] values, the mean over the values of its group (`groups`: int64 [n]), with gradient."""
    _, group, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    sums = values.new_zeros(len(sizes)).index_add(0, group, values)
    means: Tensor = (sums / sizes)[group]
    return means
