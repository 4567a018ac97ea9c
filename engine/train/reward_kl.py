"""The KL penalty as a part of the reward (`train.kl.in: reward`): each trained token pays coefficient × k1, computed before the first update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from engine.errors import TrainError
from engine.train.auxiliary import AuxiliaryObjective
from engine.train.credited_rows import PENALTIES, credited_columns
from engine.train.kl import LEAST_LOGPROB

if TYPE_CHECKING:
    from engine.schemas.credit import CreditMethod
    from engine.schemas.train import KlSpec
    from engine.train.learner import Learner
    from engine.train.loss_columns import LossColumns


def reward_penalties(kl: KlSpec, credit: CreditMethod | None) -> list[AuxiliaryObjective]:
    """The objective of `train.kl.in: reward`, before all others; else none."""
    return [RewardKl(kl.coefficient, credit)] if kl.in_reward else []


class RewardKl(AuxiliaryObjective):
    """Adds the penalties, and computes advantages again with them, unless the credit waits for values as well.

    Raises:
        TrainError: kind `train_setup`: the credit method takes no penalties.
    """

    def __init__(self, coefficient: float, credit: CreditMethod | None) -> None:
        if credit is None or not credit.takes_penalties:
            raise TrainError(
                "`train.kl.in: reward`: the credit method takes no penalties of tokens; use `train.kl.in: loss`, or a credit "
                "method of the engine",
                kind="train_setup",
            )
        self._coefficient = coefficient
        self._credit = credit

    def columns(
        self, columns: Sequence[LossColumns], learner: Learner, step: int
    ) -> tuple[Sequence[LossColumns], Mapping[str, float]]:
        """See `AuxiliaryObjective`. The metric is the mean of k1 over trained tokens."""
        policy = learner.per_token(columns, lambda pack: learner.policy.forward(pack, entropy=False)[0])
        reference = learner.per_token(columns, learner.policy.reference)
        k1 = [
            np.maximum(a, LEAST_LOGPROB) - np.maximum(b, LEAST_LOGPROB) for a, b in zip(policy, reference, strict=True)
        ]
        penalties = [self._coefficient * of_row.astype(np.float64) for of_row in k1]
        metrics = {"policy/kl_ref": float(np.concatenate(k1).mean(dtype=np.float64))}
        if self._credit.needs_values:
            added = zip(columns, penalties, strict=True)
            return [replace(of_row, extra={**of_row.extra, PENALTIES: paid}) for of_row, paid in added], metrics
        return credited_columns([of_row.row for of_row in columns], self._credit, penalties=penalties), metrics
