"""Whether the trainer and the sampler agree: log-probs of rows, recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.train.packing import Row, pack_rows
from engine.train.policy import Policy


class LogprobDifference(NamedTuple):
    """Between the trainer's log-probs and the sampler's, in nats."""

    largest: float
    mean: float
    tokens: int
    """How many were compared: all that are trained."""


def recompute(policy: Policy, rows: Sequence[Row], max_tokens_per_microbatch: int = 8192) -> LogprobDifference:
    """Compute the rows' log-probs again, and compare.

    Zero but for rounding where the policy's weights are those that the rows were sampled with.

    Args:
        policy: Made with the sampler's temperature and vocabulary.
        rows: As `export_rows` gives them.
        max_tokens_per_microbatch: Tokens in one pass.
    """
    apart: list[np.ndarray] = []
    with torch.no_grad():
        for pack in pack_rows(rows, max_tokens_per_microbatch, share_prefixes=policy.can_share_prefixes):
            found = policy.forward(pack, entropy=False)[0].double().cpu().numpy()
            pairs = zip(pack.row.tolist(), pack.token.tolist(), strict=True)
            sampled = np.array([float(rows[row]["logprobs"][token]) for row, token in pairs])
            apart.append(np.abs(found - sampled))
    if not apart:
        return LogprobDifference(0.0, 0.0, 0)
    every = np.concatenate(apart)
    return LogprobDifference(float(every.max()), float(every.mean()), len(every))
