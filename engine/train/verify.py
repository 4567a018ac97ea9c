"""Compares the sampler's log-probs with log-probs that the trainer recomputes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.schemas.base import Struct
from engine.train.packing import pack_rows
from engine.train.policy import Policy

if TYPE_CHECKING:
    from engine.store.rows.row import TrainingRow


class LogprobDifference(Struct, frozen=True):
    """Absolute difference between the trainer's and the sampler's log-probs, in nats."""

    largest: float
    mean: float
    tokens: int
    """Number of tokens compared: all trained tokens."""


def recompute(policy: Policy, rows: Sequence[TrainingRow], max_tokens_per_microbatch: int = 8192) -> LogprobDifference:
    """Recompute the log-probs of rows and compare them with those of the sampler.

    If the policy has the weights that the rows were sampled with, the difference is rounding only.

    Args:
        policy: A policy with the sampler's temperature and vocabulary.
        rows: The rows.
        max_tokens_per_microbatch: Maximum tokens in one forward pass.
    """
    apart: list[np.ndarray] = []
    with torch.no_grad():
        for pack in pack_rows(rows, max_tokens_per_microbatch, share_prefixes=policy.can_share_prefixes):
            logprobs = policy.forward(pack, entropy=False)[0].double().cpu().numpy()
            pairs = zip(pack.row.tolist(), pack.token.tolist(), strict=True)
            sampled = np.array([float(rows[row].branch.logprobs[token]) for row, token in pairs])
            apart.append(np.abs(logprobs - sampled))
    if not apart:
        return LogprobDifference(0.0, 0.0, 0)
    every = np.concatenate(apart)
    return LogprobDifference(float(every.max()), float(every.mean()), len(every))
