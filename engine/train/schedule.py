"""The learning rate of each step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.schemas.train import TrainSpec


def learning_rate(spec: TrainSpec, step: int) -> float:
    """The policy's learning rate in a step, counted from 0: `optimizer.warmup_steps`, then `optimizer.schedule`."""
    wanted = spec.optimizer
    if step < wanted.warmup_steps:
        return wanted.lr * (step + 1) / wanted.warmup_steps
    if wanted.schedule == "constant":
        return wanted.lr
    over = (step - wanted.warmup_steps) / max(1, spec.steps - wanted.warmup_steps)
    if wanted.schedule == "linear":
        return wanted.lr * (1.0 - over)
    return wanted.lr * 0.5 * (1.0 + math.cos(math.pi * over))
