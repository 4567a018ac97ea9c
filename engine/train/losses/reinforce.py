"""`reinforce`: advantage times log-prob."""

from __future__ import annotations

from torch import Tensor

from engine.schemas.loss import ReinforceLoss
from engine.train.loss_tokens import LossTokens
from engine.train.losses.base import PolicyLoss
from engine.train.ratios import floored


class Reinforce(PolicyLoss[ReinforceLoss]):
    """-A log current (Williams 1992; RLOO, arXiv 2402.14740). It has no ratio, so use `update_epochs: 1`."""

    def token_losses(self, tokens: LossTokens, ratio: Tensor) -> Tensor:
        return -tokens.advantages * floored(tokens.logprobs)
