"""`sapo`: a smooth gate around ratio 1."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.schemas.loss import SapoLoss
from engine.train.loss_tokens import LossTokens
from engine.train.losses.base import PolicyLoss


class SmoothGate(PolicyLoss[SapoLoss]):
    """-f(r) A, f(r) = 4 / tau * sigmoid(tau (r - 1)), tau chosen by the sign of A: SAPO (arXiv 2511.20347).

    The slope of f is 1 at r = 1 and decreases smoothly on both sides.
    """

    def token_losses(self, tokens: LossTokens, ratio: Tensor) -> Tensor:
        positive = torch.full_like(tokens.advantages, self.spec.temperature_positive)
        tau = torch.where(tokens.advantages > 0, positive, self.spec.temperature_negative)
        return -tokens.advantages * (torch.sigmoid(tau * (ratio - 1)) * 4 / tau)
