"""The computation of the loss."""

from __future__ import annotations

from torch import Tensor

from engine.train.loss_tokens import LossTokens
from engine.train.losses.formulas import PolicyLoss
from tilt_loss.spec import TiltLoss


class TiltedReinforce(PolicyLoss[TiltLoss]):
    """-sg[min(1 + tilt r, most)] A log current."""

    def token_losses(self, tokens: LossTokens, ratio: Tensor) -> Tensor:
        """Each token's loss, [n]."""
        weights = (1 + self.spec.tilt * ratio).clamp(max=self.spec.most).detach()
        return -weights * tokens.advantages * tokens.logprobs
