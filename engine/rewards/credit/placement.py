"""Placement: on which sampled tokens a turn's reward is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.errors import LedgerError
from engine.rewards.credit.base import Values
from engine.rewards.sealed import PartReward
from engine.schemas.trajectory import Branch

Where = Literal["last", "spread"]


def place(
    branch: Branch,
    turn_values: Sequence[float] | Values,
    where: Where = "last",
    parts: Sequence[PartReward] = (),
) -> npt.NDArray[np.float32]:
    """Put each turn's value on its sampled tokens.

    A turn is sampled in one branch only, so over an episode's branches each value appears once. A turn without sampled tokens in
    this branch has no effect on the result.

    Args:
        branch: One token sequence.
        turn_values: A value for each turn of the episode, [turns].
        parts: Rewards of parts of turns, which `turn_values` contain: each is on the tokens of its part.
        where: `last`: on the turn's last sampled token. `spread`: in equal parts on its sampled tokens.

    Returns:
        float32 [tokens]; 0.0 on tokens that were not sampled.

    Raises:
        LedgerError: the branch holds a turn without a value.
    """
    placed = np.zeros(len(branch.input_ids), dtype=np.float64)
    tokens = np.flatnonzero((branch.loss_mask == 1) & (branch.turn_ids >= 0))
    if len(tokens) == 0:
        return placed.astype(np.float32)
    turns = branch.turn_ids[tokens]
    values = np.array(turn_values, dtype=np.float64)
    if turns.max() >= len(values):
        raise LedgerError(
            f"branch {branch.index} holds turn {turns.max()}, but there are values for {len(values)} turns",
            blame="engine",
        )
    for each in parts:
        own = tokens[turns == each.turn][each.part.start : each.part.end]
        if len(own):
            values[each.turn] -= each.value
            placed[own if where == "spread" else own[-1:]] += each.value / (len(own) if where == "spread" else 1)
    if where == "spread":
        placed[tokens] += (values / np.maximum(np.bincount(turns, minlength=len(values)), 1))[turns]
    else:
        last = np.full(len(values), -1)
        np.maximum.at(last, turns, tokens)
        held = last >= 0
        placed[last[held]] += values[held]
    return placed.astype(np.float32)
