"""`turn_ppo`: GAE in which a turn is one action."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.rewards.credit.base import Member, Values
from engine.rewards.credit.gae import gae
from engine.schemas.credit import TurnPpoCredit


def turn_ppo(spec: TurnPpoCredit, group: Sequence[Member]) -> list[Values]:
    """Turn-PPO (arXiv 2512.17008): PPO's GAE, where a state is the conversation before a turn and an action is a whole turn.

        delta_t = r_t + gamma * V_t+1 - V_t,    V after the last turn = `Member.after`
        A_t     = delta_t + gamma * lam * A_t+1,    every token of turn t

    r_t is the reward of turn t less the penalties of its tokens. V_t is the critic's value before the first sampled token of turn t. The caller gives the ends of turns, because most turns
    have no reward.

    The result holds one array, float64 [turns], for each episode of the group.

    Raises:
        LedgerError: there are no values, or not one for each sampled token.
    """
    found = []
    for member in group:
        values, slices = member.valued(spec.method)
        # A turn without sampled tokens has the value of the next token, or of the state after the last one.
        starts = np.array([values[place.start] if place.start < len(values) else member.after for place in slices])
        found.append(gae(member.rewards(), starts, spec.gamma, spec.lam, member.after))
    return found
