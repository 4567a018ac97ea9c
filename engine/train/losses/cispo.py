"""`cispo`: the clipped ratio as a weight without gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.schemas.loss import CispoLoss
from engine.train.loss_tokens import LossTokens
from engine.train.losses.base import PolicyLoss
from engine.train.ratios import floored


class ClippedWeight(PolicyLoss[CispoLoss]):
    """-sg[clip(r, 1 - low, 1 + high)] A log current: MiniMax-M1 (arXiv 2506.13585, equations 4 and 5). Every token has a gradient."""

    def token_losses(self, tokens: LossTokens, ratio: Tensor) -> Tensor:
        low, high = self.ratio_bounds(tokens.advantages)
        return -ratio.clamp(low, high).detach() * tokens.advantages * floored(tokens.logprobs)

    def ratio_bounds(self, advantages: Tensor) -> tuple[Tensor, Tensor]:
        low, high = super().ratio_bounds(advantages)
        weighed = advantages != 0
        if self.spec.clip_low is not None:
            low = torch.where(weighed, 1 - self.spec.clip_low, low)
        return low, torch.where(weighed, 1 + self.spec.clip_high, high)
