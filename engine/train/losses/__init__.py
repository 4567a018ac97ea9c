"""The policy losses, one file for each formula, and the objective: policy loss, KL penalty and entropy bonus.

    loss, metrics = objective(spec.train, tokens)       # of a micro-batch; add up over micro-batches and processes

With r = current / proximal, the ratio of the sampled token's probabilities, and A its advantage, a formula gives the
loss of each token. `engine.schemas.loss` has the config class of each loss: its keys, its formula, the level of its
ratio and its denominator (`engine.train.loss_columns`). Log-probs of -inf and very large ratios give finite losses and
gradients (`engine.train.ratios`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.schemas.train import TrainSpec
from engine.train.loss_tokens import LossTokens
from engine.train.losses.formulas import PolicyLoss, implementation, loss_ratio
from engine.train.metric_sums import MetricSums
from engine.train.ratios import bounded_exp, bounded_k3, correction_weights, log_ratio, token_kl

__all__ = ["PolicyLoss", "implementation", "loss_ratio", "objective"]


def objective(spec: TrainSpec, tokens: LossTokens) -> tuple[Tensor, MetricSums]:
    """Compute the contribution of a micro-batch to the loss of the step, and its metrics.

        sum of loss weight * (correction weight * policy loss + kl.coefficient * KL - entropy coefficient * entropy)

    Args:
        spec: Loss, rollout correction, KL and entropy.
        tokens: The micro-batch; n may be 0.

    Returns:
        The loss as a scalar with its graph, and the metrics, detached. For a loss that clips the ratio,
        `policy/clip_low` and `policy/clip_high` are the fractions of tokens whose ratio is below and above its bounds.

    Raises:
        ValueError: `kl` without reference log-probs, or `entropy` without entropies.
    """
    correction, masked = correction_weights(spec.rollout_correction, tokens)
    ratio = loss_ratio(spec.loss, tokens)
    loss = implementation(spec.loss)
    per_token = loss.token_losses(tokens, ratio) * correction
    metrics = _metric_sums(spec, tokens)
    if spec.loss.clips_ratio:
        low, high = loss.ratio_bounds(tokens.advantages)
        metrics.mean("policy/clip_low", ratio < low)
        metrics.mean("policy/clip_high", ratio > high)
    if spec.rollout_correction.kind != "none":
        metrics.mean("correction/weight_mean", correction)
        metrics.mean("correction/masked", masked)
    if tokens.reference is not None:
        kl = token_kl(spec.kl.estimator, tokens.logprobs, tokens.reference)
        metrics.mean("policy/kl_ref", kl)
        if spec.kl.in_loss:
            per_token = per_token + spec.kl.coefficient * kl
    elif spec.kl.in_loss:
        raise ValueError("`kl.coefficient` is set: `LossTokens.reference` must hold the reference's log-probs")
    if tokens.entropy is not None:
        metrics.mean("policy/entropy", tokens.entropy)
        if spec.entropy_coefficient:
            per_token = per_token - spec.entropy_coefficient * tokens.entropy
    elif spec.entropy_coefficient:
        raise ValueError("`entropy_coefficient` is set: `LossTokens.entropy` must hold the entropies")
    return (tokens.loss_weights * per_token).sum(), metrics


@torch.no_grad()
def _metric_sums(spec: TrainSpec, tokens: LossTokens) -> MetricSums:
    """Metrics that need neither the loss, correction weights, reference log-probs nor entropies.

    approx_kl is the k3 estimate of KL(proximal || current). ess is the effective sample size of current / sampler.
    sampler/diff compares the sampler's log-probs with the proximal ones, which this batch's updates do not change; if
    those are the sampler's, with the current ones.
    """
    metrics = MetricSums()
    logs = log_ratio(tokens.logprobs, tokens.proximal)
    kl = bounded_k3(logs)
    metrics.mean("policy/approx_kl", kl)
    metrics.maximum("policy/token_kl_max", kl)
    metrics.maximum("policy/ratio_max", bounded_exp(logs))
    metrics.mean("policy/confidence", tokens.logprobs.exp())
    metrics.effective_sample_size("policy/ess", bounded_exp(log_ratio(tokens.logprobs, tokens.sampler)))
    trainer = tokens.logprobs if spec.proximal_logprobs == "sampler" else tokens.proximal
    difference = log_ratio(trainer, tokens.sampler).abs()
    metrics.mean("sampler/diff_mean", difference)
    metrics.maximum("sampler/diff_max", difference)
    return metrics
