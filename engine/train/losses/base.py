"""What every loss has: a formula for the loss of each token, from the ratio at the level that its config class declares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar

from torch import Tensor

from engine.schemas.loss import Loss
from engine.train.loss_tokens import LossTokens
from engine.train.ratios import bounded_exp, group_mean, log_ratio

Spec = TypeVar("Spec", bound=Loss)


class PolicyLoss(ABC, Generic[Spec]):
    """The computation of one loss.

    Args:
        spec: Its config class with the keys of `train.loss`.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    @abstractmethod
    def token_losses(self, tokens: LossTokens, ratio: Tensor) -> Tensor:
        """Each token's loss, [n], with its graph, without loss weight and without rollout correction.

        Args:
            tokens: The micro-batch; n may be 0.
            ratio: current / proximal at the declared `ratio_level`, [n], with its graph.
        """

    def ratio_bounds(self, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Lower and upper bound of the ratio, [n] each; the default has none. A bound that cannot change the loss is 0 or infinite.

        Overridden by losses with `clips_ratio`.

        Args:
            advantages: [n].
        """
        return advantages.new_zeros(advantages.shape), advantages.new_full(advantages.shape, float("inf"))


def implementation(spec: Loss) -> PolicyLoss[Any]:
    """The computation of the loss that a config class declares."""
    found: PolicyLoss[Any] = resolve_name(spec.formula)(spec)
    return found


def policy_loss(spec: Loss, tokens: LossTokens) -> Tensor:
    """Each token's policy loss, [n], with its graph, without loss weight and without rollout correction."""
    return implementation(spec).token_losses(tokens, loss_ratio(spec, tokens))


def loss_ratio(spec: Loss, tokens: LossTokens) -> Tensor:
    """current / proximal, [n], with its graph, at the level that the loss declares.

    At the level of a sequence it is GSPO's s_t = sg[s] * current_t / sg[current_t], with s the geometric mean of r over the
    row (arXiv 2507.18071, equations 7 and 14). A loss without a ratio gets the token's.
    """
    logs = log_ratio(tokens.logprobs, tokens.proximal)
    if spec.ratio_level == "sequence":
        logs = group_mean(logs.detach(), tokens.rows) + (logs - logs.detach())
    return bounded_exp(logs)
