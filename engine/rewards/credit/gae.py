"""`gae`: PPO's generalized advantage estimation over all sampled tokens of an episode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.rewards.credit.base import Member, Values
from engine.schemas.credit import GaeCredit


def gae(rewards: Values, values: Values, gamma: float, lam: float, after: float = 0.0) -> Values:
    """Generalized advantage estimation (arXiv 1506.02438, equation 16, for a finite episode); float64 [steps].

        delta_t = r_t + gamma * V_t+1 - V_t
        A_t     = delta_t + gamma * lam * A_t+1

    Args:
        rewards: The reward of each step, float64 [steps].
        values: The value before each step, float64 [steps].
        gamma: Discount per step.
        lam: Weight of longer estimates; with 1 the advantage is the discounted return minus the value.
        after: The value after the last step: 0 if the episode ended there, and a critic's value if it was only cut there
            (arXiv 1712.00378).
    """
    advantages = np.zeros(len(rewards))
    coming, following = 0.0, after
    for step in range(len(rewards) - 1, -1, -1):
        delta = float(rewards[step]) + gamma * following - float(values[step])
        coming = delta + gamma * lam * coming
        following = float(values[step])
        advantages[step] = coming
    return advantages


def token_gae(spec: GaeCredit, group: Sequence[Member]) -> list[list[Values]]:
    """PPO (arXiv 1707.06347, equation 11) with one token as one action. For each episode, for each turn, float64 [sampled tokens].

    The actions are the sampled tokens of all turns in order; what users and tools write between them is part of the next state. A
    turn's reward is on its last token; penalties are subtracted where they are. The reward of a turn without sampled tokens is on the token before it.

    Raises:
        LedgerError: there are no values, or not one for each sampled token.
    """
    found = []
    for member in group:
        values, slices = member.valued(spec.method)
        rewards = np.zeros(len(values))
        for place, reward in zip(slices, member.ledger.totals.tolist(), strict=True):
            if place.stop:
                rewards[place.stop - 1] += reward
        if member.penalties is not None:
            rewards -= member.penalties
        advantages = gae(rewards, values, spec.gamma, spec.lam, member.after)
        found.append([advantages[place] for place in slices])
    return found


def first_token_gae(spec: GaeCredit, group: Sequence[Member]) -> list[Values]:
    """The advantage of each turn's first token, float64 [turns]; 0 for a turn without sampled tokens.

    Raises:
        LedgerError: as in `token_gae`.
    """
    return [np.array([turn[0] if len(turn) else 0.0 for turn in turns]) for turns in token_gae(spec, group)]
