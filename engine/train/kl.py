"""The KL penalty against the reference model: Schulman's estimators of KL(policy || reference).

From one sampled token x, with d = log ref(x) - log policy(x) ("Approximating KL divergence", 2020,
joschu.net/blog/kl-approx.html):

    k1 = -d                  unbiased, of either sign, high variance
    k2 = d^2 / 2             biased, never negative
    k3 = exp(d) - 1 - d      unbiased, never negative; GRPO's (arXiv 2402.03300, equation 4)

A good estimate of the value does not imply a good estimate of the gradient, which a loss uses. For tokens that the policy
itself drew:

    k1:  grad log policy(x)                    mean 0: noise that estimates nothing
    k2:  -d * grad log policy(x)               an unbiased estimate of the gradient of KL(policy || reference)
    k3:  (1 - exp(d)) * grad log policy(x)     an unbiased estimate of the gradient of KL(reference || policy), which
                                               near the reference is k2's to first order in d

In the reward instead of the loss (`kl.in: reward`; Ziegler et al. 2019, arXiv 1909.08593, equation 2; verl's
`apply_kl_penalty`), each token earns -coefficient * k1, a constant for the gradient. The credit method counts these rewards as it counts
others (`engine.rewards.credit`, `Member.penalties`): where it gives a token the sum of what comes from its turn on, the policy
gradient is an unbiased estimate of that of KL(policy || reference) of whole episodes.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from engine.train.ratios import bounded_k3, log_ratio

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
