"""Probability ratios that are always finite, and what is made of them: the KL penalty and the rollout correction.

Invariants:
- A log-prob below `FLOOR` is replaced by `FLOOR` without gradient, so -inf minus -inf is 0 and 0 times -inf is 0.
- A log-ratio above `LIMIT` is replaced by `LIMIT` without gradient, so neither exp nor its square overflows in float32.
- Values between the bounds are exact. Log-ratios need no lower bound: exp and its gradient go to 0.
- NaN stays NaN, so that a broken model is visible.

KL(policy || reference), by Schulman's estimators from one sampled token x, with d = log ref(x) - log policy(x)
("Approximating KL divergence", 2020, joschu.net/blog/kl-approx.html), and their gradients for tokens that the policy
itself drew:

    k1 = -d                  unbiased, of either sign, high variance     grad log policy(x): mean 0, noise
                                                                         that estimates nothing
    k2 = d^2 / 2             biased, never negative                      -d * grad log policy(x): unbiased,
                                                                         of KL(policy || reference)
    k3 = exp(d) - 1 - d      unbiased, never negative; GRPO's            (1 - exp(d)) * grad log policy(x): unbiased, of
                             (arXiv 2402.03300, equation 4)              KL(reference || policy); near the reference
                                                                         k2's to first order

In the reward instead of the loss (`kl.in: reward`; Ziegler et al. 2019, arXiv 1909.08593, equation 2; verl's
`apply_kl_penalty`), each token earns -coefficient * k1, a constant for the gradient. The credit method counts these
rewards as it counts others (`Member.penalties`): where it gives a token the sum of what comes from its turn on, the
policy gradient is an unbiased estimate of that of KL(policy || reference) of whole episodes.

Rollout correction: the sampler drew the tokens (another engine, other kernels, perhaps older weights), but the
denominator of the clipped ratio is the proximal policy. With proximal / sampler as weight of a loss in current /
proximal, the product is current / sampler, the ratio of importance sampling: the decoupled objective of AReaL (arXiv
2505.24298, equation 5), in which only current / proximal is clipped.

    truncate:  min(max(ratio, low), high)            truncated importance sampling (Ionides 2008; IMPALA's rho,
                                                     arXiv 1802.01561, 4.1)
    mask:      ratio where low <= ratio <= high,     masked importance sampling (IcePop, arXiv 2510.18855)
               else 0

At the level of a turn or a row, all of its tokens have one weight: the geometric mean of their ratios (as in GSPO,
arXiv
2507.18071, equation 7), because a product would grow with the length. Weights have no gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from engine.schemas.train import RolloutCorrectionSpec
from engine.train.loss_tokens import LossTokens

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


LEAST_LOGPROB = -100.0
"""Log-probs below this value count as this value in the reward, so that a penalty is finite."""


def token_kl(estimator: Literal["k1", "k2", "k3"], logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate the KL divergence at each token.

    Args:
        estimator: `k1`, `k2` or `k3`.
        logprobs: Log-probs of the policy, [n], with their graph.
        reference: Log-probs of the reference model, [n].

    Returns:
        [n], in nats. Finite for log-probs of -inf as well (see `engine.train.ratios`).
    """
    exponent = log_ratio(reference.detach(), logprobs)
    if estimator == "k1":
        return -exponent
    if estimator == "k2":
        return exponent.square() / 2
    return bounded_k3(exponent)


def correction_weights(spec: RolloutCorrectionSpec, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """The factor of each token's policy loss, [n], detached (1 for all with `kind: none`), and whether `mask` dropped
    it, bool [n]."""
    logs = log_ratio(tokens.proximal, tokens.sampler).detach()
    if spec.level != "token":
        logs = group_mean(logs, tokens.turns if spec.level == "turn" else tokens.rows)
    ratio = bounded_exp(logs)
    if spec.kind == "none":
        return torch.ones_like(ratio), torch.zeros_like(ratio, dtype=torch.bool)
    if spec.kind == "truncate":
        return ratio.clamp(spec.low, spec.high), torch.zeros_like(ratio, dtype=torch.bool)
    masked = (ratio < spec.low) | (ratio > spec.high)
    return ratio.masked_fill(masked, 0.0), masked
