"""Placement: a turn's value on its sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.errors import LedgerError
from engine.rewards.credit.base import Values
from engine.schemas.trajectory import Branch

Where = Literal["last", "spread"]


def place(branch: Branch, turn_values: Sequence[float] | Values, where: Where = "last") -> npt.NDArray[np.float32]:
    """Put each turn's value on its sampled tokens.

    A turn is sampled in one branch alone, so over an episode's branches each value appears once. A turn of which this
    branch holds no sampled token leaves no trace here.

    Args:
        branch: One exact sequence.
        turn_values: A value for each of the episode's turns.
        where: `last`: all of it on the turn's last sampled token. `spread`: an equal part on each of them.

    Returns:
        float32 of shape [tokens]; 0.0 on what was not sampled.

    Raises:
        LedgerError: the branch holds a turn that has no value.
    """
    placed = np.zeros(len(branch.input_ids), dtype=np.float64)
    tokens = np.flatnonzero((branch.loss_mask == 1) & (branch.turn_ids >= 0))
    if len(tokens) == 0:
        return placed.astype(np.float32)
    turns = branch.turn_ids[tokens]
    values = np.asarray(turn_values, dtype=np.float64)
    if turns.max() >= len(values):
        raise LedgerError(
            f"branch {branch.index} holds turn {turns.max()}, but there are values for {len(values)} turns",
            blame="engine",
        )
    if where == "spread":
        placed[tokens] = (values / np.maximum(np.bincount(turns, minlength=len(values)), 1))[turns]
    else:
        last = np.full(len(values), -1)
        np.maximum.at(last, turns, tokens)
        held = last >= 0
        placed[last[held]] = values[held]
    return placed.astype(np.float32)
