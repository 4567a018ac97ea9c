"""A credit method as a user writes one."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.rewards.credit import Member


def last_takes_all(group: list[Member], factor: float = 1.0) -> list[np.ndarray]:
    """Everything to the last turn."""
    found = []
    for member in group:
        values = np.zeros(member.ledger.turns)
        values[-1:] = factor * member.ledger.total
        found.append(values)
    return found


def raises(group: list[Member]) -> Any:
    """Fails."""
    raise KeyError("no such thing")


def too_few(group: list[Member]) -> Any:
    """One episode short."""
    return [[0.0]] * (len(group) - 1)


def nan(group: list[Member]) -> Any:
    """No numbers."""
    return [[float("nan")] * member.ledger.turns for member in group]
