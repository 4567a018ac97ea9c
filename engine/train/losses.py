"""The policy losses per token, and the objective: policy loss, KL penalty and entropy bonus.

With r = current / proximal, the ratio of the sampled token's probabilities, and A its advantage:

    grpo, bnpo, dr_grpo, dapo, ppo
        -min(r A, clip(r, 1 - low, 1 + high) A): PPO's clipped surrogate (arXiv 1707.06347, equation 7). They differ in
        what they average over (`engine.train.loss_weights`). clip_high above clip_low is DAPO's clip-higher (2503.14476,
        section 3.1). With `delta`, r is at most delta where A < 0: dual-clip PPO (1912.09729).
    gspo
        the same with s, the geometric mean of r over the row: GSPO (2507.18071, 5 and 7) in its token form (13 and 14),
        s_t = sg[s] * current_t / sg[current_t]. If all advantages of a row are equal, value and gradient are those of the
        sequence form. Otherwise each token's gradient uses its own advantage.
    cispo
        -sg[clip(r, 1 - low, 1 + high)] A log current: MiniMax-M1 (2506.13585, 4 and 5). Every token has a gradient.
    sapo
        -f(r) A, f(r) = 4 / tau * sigmoid(tau (r - 1)), tau chosen by the sign of A: SAPO (2511.20347). The slope of f is
        1 at r = 1 and decreases smoothly on both sides.
    reinforce
        -A log current (Williams 1992; RLOO, 2402.14740). It has no ratio, so use `update_epochs: 1`.

Log-probs of -inf and very large ratios give finite losses and gradients (`engine.train.ratios`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.schemas.train import CispoLoss, ClippedLoss, GspoLoss, LossSpec, ReinforceLoss, SapoLoss, TrainSpec
from engine.train.corrections import correction_weights
from engine.train.kl import token_kl
from engine.train.metric_sums import MetricSums
from engine.train.ratios import bounded_exp, bounded_k3, floored, group_mean, log_ratio
from engine.train.tokens import Tokens


def objective(spec: TrainSpec, tokens: Tokens) -> tuple[Tensor, MetricSums]:
    """Compute the contribution of a micro-batch to the loss of the step, and its metrics.

        sum of loss weight * (correction weight * policy loss + kl.coefficient * KL - entropy coefficient * entropy)

    Args:
        spec: Loss, rollout correction, KL and entropy.
        tokens: The micro-batch; n may be 0.

    Returns:
        The loss as a scalar with its graph, and the metrics, detached.

    Raises:
        ValueError: `kl` without reference log-probs, or `entropy` without entropies.
    """
    correction = correction_weights(spec.rollout_correction, tokens)
    per_token = policy_loss(spec.loss, tokens) * correction.weights
    metrics = _metric_sums(spec, tokens)
    if spec.rollout_correction.kind != "none":
        metrics.mean("correction/weight_mean", correction.weights)
        metrics.mean("correction/masked", correction.masked)
    if tokens.reference is not None:
        kl = token_kl(spec.kl.estimator, tokens.logprobs, tokens.reference)
        metrics.mean("policy/kl_ref", kl)
        if spec.kl.coefficient:
            per_token = per_token + spec.kl.coefficient * kl
    elif spec.kl.coefficient:
        raise ValueError("`kl.coefficient` is set: `Tokens.reference` must hold the reference's log-probs")
    if tokens.entropy is not None:
        metrics.mean("policy/entropy", tokens.entropy)
        if spec.entropy_coefficient:
            per_token = per_token - spec.entropy_coefficient * tokens.entropy
    elif spec.entropy_coefficient:
        raise ValueError("`entropy_coefficient` is set: `Tokens.entropy` must hold the entropies")
    return (tokens.loss_weights * per_token).sum(), metrics


def policy_loss(loss: LossSpec, tokens: Tokens) -> Tensor:
    """Each token's policy loss, [n], with its graph, without loss weight and without rollout correction."""
    advantages = tokens.advantages
    if isinstance(loss, ReinforceLoss):
        return -advantages * floored(tokens.logprobs)
    ratio = loss_ratio(loss, tokens)
    if isinstance(loss, SapoLoss):
        return -advantages * sapo_gate(loss, ratio, advantages)
    low, high = ratio_bounds(loss, advantages)
    held = ratio.clamp(low, high)
    if isinstance(loss, CispoLoss):
        return -held.detach() * advantages * floored(tokens.logprobs)
    return -held * advantages


def loss_ratio(loss: LossSpec, tokens: Tokens) -> Tensor:
    """current / proximal, [n], with its graph: the token's ratio, or for GSPO the geometric mean over its row."""
    logs = log_ratio(tokens.logprobs, tokens.proximal)
    if isinstance(loss, GspoLoss):
        logs = group_mean(logs.detach(), tokens.rows) + (logs - logs.detach())
    return bounded_exp(logs)


def ratio_bounds(loss: ClippedLoss | CispoLoss, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper bound of the ratio, [n] each. A bound that cannot change the objective is 0 or infinite.

    min(r A, clip(r) A) equals A times r, with r at most 1 + high if A > 0, and at least 1 - low (and at most delta) if A < 0.
    """
    nothing, everything = torch.zeros_like(advantages), torch.full_like(advantages, math.inf)
    if isinstance(loss, CispoLoss):
        weighed = advantages != 0
        low = torch.where(weighed, 1 - loss.clip_low, nothing) if loss.clip_low is not None else nothing
        return low, torch.where(weighed, 1 + loss.clip_high, everything)
    good, bad = advantages > 0, advantages < 0
    high = torch.where(good, 1 + loss.clip_high, everything)
    if loss.delta is not None:
        high = torch.where(bad, loss.delta, high)
    return torch.where(bad, 1 - loss.clip_low, nothing), high


def sapo_gate(loss: SapoLoss, ratio: Tensor, advantages: Tensor) -> Tensor:
    """The gate f(r) of SAPO, [n]."""
    positive = torch.full_like(advantages, loss.temperature_positive)
    tau = torch.where(advantages > 0, positive, loss.temperature_negative)
    return torch.sigmoid(tau * (ratio - 1)) * 4 / tau


@torch.no_grad()
def _metric_sums(spec: TrainSpec, tokens: Tokens) -> MetricSums:
    """Metrics that need neither correction weights, reference log-probs nor entropies.

    approx_kl is the k3 estimate of KL(proximal || current). clip_low and clip_high are the fractions of tokens whose ratio is
    outside of a bound. ess is the effective sample size of current / sampler. sampler/diff compares the sampler's
    log-probs with the proximal ones, which this batch's updates do not change; if those are the sampler's, with the current ones.
    """
    metrics = MetricSums()
    logs = log_ratio(tokens.logprobs, tokens.proximal)
    kl = bounded_k3(logs)
    metrics.mean("policy/approx_kl", kl)
    metrics.maximum("policy/token_kl_max", kl)
    metrics.maximum("policy/ratio_max", bounded_exp(logs))
    metrics.mean("policy/confidence", tokens.logprobs.exp())
    metrics.effective_sample_size("policy/ess", bounded_exp(log_ratio(tokens.logprobs, tokens.sampler)))
    if isinstance(spec.loss, ClippedLoss | CispoLoss):
        ratio = loss_ratio(spec.loss, tokens)
        low, high = ratio_bounds(spec.loss, tokens.advantages)
        metrics.mean("policy/clip_low", ratio < low)
        metrics.mean("policy/clip_high", ratio > high)
    trainer = tokens.logprobs if spec.proximal_logprobs == "sampler" else tokens.proximal
    difference = log_ratio(trainer, tokens.sampler).abs()
    metrics.mean("sampler/diff_mean", difference)
    metrics.maximum("sampler/diff_max", difference)
    return metrics
