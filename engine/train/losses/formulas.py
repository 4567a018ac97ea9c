"""The formulas of the losses: a token's loss of its ratio and advantage, with bounds that the metrics read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from engine.schemas.loss import CispoLoss, ClippedLoss, Loss, ReinforceLoss, SapoLoss
from engine.train.loss_tokens import LossTokens
from engine.train.ratios import bounded_exp, floored, group_mean, log_ratio

Spec = TypeVar("Spec", bound=Loss)


@dataclass(eq=False)
class PolicyLoss(ABC, Generic[Spec]):
    """The computation of one loss.

    Args:
        spec: Its config class with the keys of `train.loss`.
    """

    spec: Spec

    @abstractmethod
    def token_losses(self, tokens: LossTokens, ratio: Tensor) -> Tensor:
        """Each token's loss, [n], with its graph, without loss weight and without rollout correction.

        Args:
            tokens: The micro-batch; n may be 0.
            ratio: current / proximal at the declared `ratio_level`, [n], with its graph.
        """

    def ratio_bounds(self, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Lower and upper bound of the ratio, [n] each; the default has none. A bound that cannot change the loss is 0
        or infinite.

        Overridden by losses with `clips_ratio`.

        Args:
            advantages: [n].
        """
        return advantages.new_zeros(advantages.shape), advantages.new_full(advantages.shape, float("inf"))


class ClippedSurrogate(PolicyLoss[ClippedLoss]):
    """-min(r A, clip(r, 1 - low, 1 + high) A): PPO (arXiv 1707.06347, equation 7).

    clip_high above clip_low is DAPO's clip-higher (2503.14476, section 3.1). With `delta`, r is at most delta where A <
    0: dual-clip PPO (1912.09729). With the ratio of the sequence it is GSPO in its token form (2507.18071, equations 5,
    7, 13 and 14): if all advantages of a row are equal, value and gradient are those of the sequence form; otherwise
    each token's gradient uses its own advantage.
    """

    def token_losses(self, tokens: LossTokens, ratio: Tensor) -> Tensor:
        low, high = self.ratio_bounds(tokens.advantages)
        return -ratio.clamp(low, high) * tokens.advantages

    def ratio_bounds(self, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Lower and upper bound of the ratio, [n] each.

        min(r A, clip(r) A) equals A times r, with r at most 1 + high if A > 0, and at least 1 - low (and at most delta)
        if A < 0.
        """
        nothing, everything = super().ratio_bounds(advantages)
        good, bad = advantages > 0, advantages < 0
        high = torch.where(good, 1 + self.spec.clip_high, everything)
        if self.spec.delta is not None:
            high = torch.where(bad, self.spec.delta, high)
        return torch.where(bad, 1 - self.spec.clip_low, nothing), high


class ClippedWeight(PolicyLoss[CispoLoss]):
    """-sg[clip(r, 1 - low, 1 + high)] A log current: MiniMax-M1 (arXiv 2506.13585, equations 4 and 5). Every token has
    a gradient."""

    def token_losses(self, tokens: LossTokens, ratio: Tensor) -> Tensor:
        low, high = self.ratio_bounds(tokens.advantages)
        return -ratio.clamp(low, high).detach() * tokens.advantages * floored(tokens.logprobs)

    def ratio_bounds(self, advantages: Tensor) -> tuple[Tensor, Tensor]:
        low, high = super().ratio_bounds(advantages)
        weighed = advantages != 0
        if self.spec.clip_low is not None:
            low = torch.where(weighed, 1 - self.spec.clip_low, low)
        return low, torch.where(weighed, 1 + self.spec.clip_high, high)


class SmoothGate(PolicyLoss[SapoLoss]):
    """-f(r) A, f(r) = 4 / tau * sigmoid(tau (r - 1)), tau chosen by the sign of A: SAPO (arXiv 2511.20347).

    The slope of f is 1 at r = 1 and decreases smoothly on both sides.
    """

    def token_losses(self, tokens: LossTokens, ratio: Tensor) -> Tensor:
        positive = torch.full_like(tokens.advantages, self.spec.temperature_positive)
        tau = torch.where(tokens.advantages > 0, positive, self.spec.temperature_negative)
        return -tokens.advantages * (torch.sigmoid(tau * (ratio - 1)) * 4 / tau)


class Reinforce(PolicyLoss[ReinforceLoss]):
    """-A log current (Williams 1992; RLOO, arXiv 2402.14740). It has no ratio, so use `update_epochs: 1`."""

    def token_losses(self, tokens: LossTokens, ratio: Tensor) -> Tensor:
        return -tokens.advantages * floored(tokens.logprobs)


def implementation(spec: Loss) -> PolicyLoss[Any]:
    """The computation of the loss that a config class declares."""
    computation: PolicyLoss[Any] = resolve_name(spec.formula)(spec)
    return computation


def loss_ratio(spec: Loss, tokens: LossTokens) -> Tensor:
    """current / proximal, [n], with its graph, at the level that the loss declares.

    At the level of a sequence it is GSPO's s_t = sg[s] * current_t / sg[current_t], with s the geometric mean of r over
    the row (arXiv 2507.18071, equations 7 and 14). A loss without a ratio gets the token's.
    """
    logs = log_ratio(tokens.logprobs, tokens.proximal)
    if spec.ratio_level == "sequence":
        logs = group_mean(logs.detach(), tokens.rows) + (logs - logs.detach())
    return bounded_exp(logs)
