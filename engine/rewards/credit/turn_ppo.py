"""`turn_ppo`: GAE in which a turn is one action."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.rewards.credit.base import Member, Values
from engine.schemas.credit import TurnPpoCredit


def turn_ppo(spec: TurnPpoCredit, group: Sequence[Member]) -> list[Values]:
    """Turn-PPO (arXiv 2512.17008): PPO's GAE, where a state is the conversation before a turn and an action is a whole turn.

        delta_t = r_t + gamma * V_t+1 - V_t,    V after the last turn = 0
        A_t     = delta_t + gamma * lam * A_t+1,    every token of turn t

    V_t is the critic's value before the first sampled token of turn t. The caller gives the ends of turns, because most turns
    have no reward.

    The result holds one array, float64 [turns], for each episode of the group.

    Raises:
        LedgerError: there are no values, or not one for each sampled token.
    """
    found = []
    for member in group:
        values, slices = member.valued(spec.method)
        # A turn without sampled tokens has the value of the next token; after the last token it is 0.
        starts = np.array([values[place.start] if place.start < len(values) else 0.0 for place in slices])
        found.append(gae(member.ledger.totals, starts, spec.gamma, spec.lam))
    return found


def gae(rewards: Values, values: Values, gamma: float, lam: float) -> Values:
    """Generalized advantage estimation (arXiv 1506.02438, equation 16, for a finished episode); float64 [steps]."""
    advantages = np.zeros(len(rewards))
    coming = following = 0.0
    for step in range(len(rewards) - 1, -1, -1):
        delta = float(rewards[step]) + gamma * following - float(values[step])
        coming = delta + gamma * lam * coming
        following = float(values[step])
        advantages[step] = coming
    return advantages
