"""Generalized advantage estimation over tokens, over turns, and over both, from a critic's values of the states before
them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.plugins.critic.spec import BilevelGaeCredit, GaeCredit, TurnPpoCredit
from engine.rewards.credit.formulas import Member, Values


def gae(rewards: Values, values: Values, gamma: float, lam: float, after: float = 0.0) -> Values:
    """Generalized advantage estimation (arXiv 1506.02438, equation 16, for a finite episode); float64 [steps].

        delta_t = r_t + gamma * V_t+1 - V_t
        A_t     = delta_t + gamma * lam * A_t+1

    Args:
        rewards: The reward of each step, float64 [steps].
        values: The value before each step, float64 [steps].
        gamma: Discount per step.
        lam: Weight of longer estimates; with 1 the advantage is the discounted return minus the value.
        after: The value after the last step: 0 if the episode ended there, and a critic's value if it was only cut
            there (arXiv 1712.00378).
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
    """PPO (arXiv 1707.06347, equation 11) with one token as one action. For each episode, for each turn, float64
    [sampled tokens].

    The actions are the sampled tokens of all turns in order; what users and tools write between them is part of the
    next state. A turn's reward is on its last token; penalties are subtracted where they are. The reward of a turn
    without sampled tokens is on the token before it.

    Raises:
        LedgerError: there are no values, or not one for each sampled token.
    """
    by_turn = []
    for member in group:
        values, slices = member.valued(spec.method)
        rewards = np.zeros(len(values))
        for place, reward in zip(slices, member.ledger.totals.tolist(), strict=True):
            if place.stop:
                rewards[place.stop - 1] += reward
        if member.penalties is not None:
            rewards -= member.penalties
        advantages = gae(rewards, values, spec.gamma, spec.lam, member.after)
        by_turn.append([advantages[place] for place in slices])
    return by_turn


def first_token_gae(spec: GaeCredit, group: Sequence[Member]) -> list[Values]:
    """The advantage of each turn's first token, float64 [turns]; 0 for a turn without sampled tokens.

    Raises:
        LedgerError: as in `token_gae`.
    """
    return [np.array([turn[0] if len(turn) else 0.0 for turn in turns]) for turns in token_gae(spec, group)]


def turn_ppo(spec: TurnPpoCredit, group: Sequence[Member]) -> list[Values]:
    """Turn-PPO (arXiv 2512.17008): PPO's GAE, where a state is the conversation before a turn and an action is a whole
    turn.

        delta_t = r_t + gamma * V_t+1 - V_t,    V after the last turn = `Member.after`
        A_t     = delta_t + gamma * lam * A_t+1,    every token of turn t

    r_t is the reward of turn t less the penalties of its tokens. V_t is the critic's value before the first sampled
    token of turn t. The caller gives the ends of turns, because most turns have no reward.

    The result holds one array, float64 [turns], for each episode of the group.

    Raises:
        LedgerError: there are no values, or not one for each sampled token.
    """
    advantages = []
    for member in group:
        values, slices = member.valued(spec.method)
        # A turn without sampled tokens has the value of the next token, or of the state after the last one.
        starts = np.array([values[place.start] if place.start < len(values) else member.after for place in slices])
        advantages.append(gae(member.rewards(), starts, spec.gamma, spec.lam, member.after))
    return advantages


def bilevel_gae(spec: BilevelGaeCredit, group: Sequence[Member]) -> list[Values]:
    """The upper level of VAGEN's bi-level GAE (arXiv 2510.16907, section 3.4): an advantage for each turn.

        delta_t = r_t + gamma * V_t+1 - V_t,    V after the last turn = `Member.after`
        A_t     = delta_t + gamma * lam * A_t+1

    V_t is the critic's value at the last sampled token of turn t. The penalties from there up to the
    last token of turn t+1 belong to this step: r_t has the penalty of turn t's last token subtracted, and gamma times
    those of the other tokens of turn t+1. The caller gives the ends of turns, because a turn without a
    reward is a turn as well.

    The result holds one array, float64 [turns], for each episode of the group.

    Raises:
        LedgerError: there are no values, or not one for each sampled token.
    """
    return [_turns(spec, member)[0] for member in group]


def bilevel_token_gae(spec: BilevelGaeCredit, group: Sequence[Member]) -> list[list[Values]]:
    """Both levels: an advantage for each sampled token. For each episode, for each turn, float64 [sampled tokens].

        A_t,last = A_t                                                          of the upper level
        delta_t,i = token_gamma * V_t,i+1 - V_t,i - p_t,i                       p: the penalties of tokens
        A_t,i     = delta_t,i + token_gamma * token_lam * A_t,i+1               for the tokens before it

    The paper adds its KL penalty per token to delta_t,i, as p is here.

    Raises:
        LedgerError: as in `bilevel_gae`.
    """
    advantages: list[list[Values]] = []
    for member in group:
        upper, by_turn = _turns(spec, member)
        costs = np.zeros(sum(map(len, by_turn))) if member.penalties is None else member.penalties
        of_turns = zip(by_turn, member.slices(), upper.tolist(), strict=True)
        advantages.append([_tokens(spec, values, costs[place], last) for values, place, last in of_turns])
    return advantages


def _turns(spec: BilevelGaeCredit, member: Member) -> tuple[Values, list[Values]]:
    """The advantage of each turn, float64 [turns], and the values of its tokens."""
    values, slices = member.valued(spec.method)
    ends, rewards = np.zeros(len(slices)), member.rewards()
    following, before_last = member.after, 0.0
    for turn in range(len(slices) - 1, -1, -1):
        place = slices[turn]
        if place.stop > place.start:  # a turn without sampled tokens has the value of the next turn
            rewards[turn] -= spec.gamma * before_last
            following = float(values[place.stop - 1])
            before_last = 0.0 if member.penalties is None else float(member.penalties[place][:-1].sum())
            rewards[turn] += before_last
        ends[turn] = following
    return gae(rewards, ends, spec.gamma, spec.lam, member.after), [values[place] for place in slices]


def _tokens(spec: BilevelGaeCredit, values: Values, penalties: Values, last: float) -> Values:
    advantages = np.zeros(len(values))
    advantages[-1:] = last
    for token in range(len(values) - 2, -1, -1):
        delta = spec.token_gamma * values[token + 1] - values[token] - penalties[token]
        advantages[token] = delta + spec.token_gamma * spec.token_lam * advantages[token + 1]
    return advantages
