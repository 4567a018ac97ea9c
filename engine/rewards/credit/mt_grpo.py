"""`mt_grpo`: the outcome relative to the group's, and each turn's own reward relative to the group's at that turn."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from engine.rewards.credit.base import Member, Values, compare_episodes, compare_turns
from engine.schemas.credit import MtGrpoCredit


def mt_grpo(spec: MtGrpoCredit, group: Sequence[Member]) -> list[Values]:
    """MT-GRPO (arXiv 2505.11821v1, section 4.2), for any number K_i of turns.

        A_i,k = A^O_i + weight * A^T_i,k    for k < K_i
        A_i,k = A^O_i                       for k = K_i
        A^O_i = (R^O_i - mean(R^O)) / std(R^O),    A^T_i,k = (R^T_i,k - mean(R^T_k)) / std(R^T_k)

    R^O is the sum of the outcome's rewards: the rewards that the spec names, at any turn, or by default all rewards of the last
    turn. R^T_i,k is the rest of what turn k holds. The paper has two turns, of which the first has its own reward. An episode
    without a turn k counts with R^T_i,k = 0. The penalties of all tokens are subtracted from R^O, because R^T reaches no earlier turn.

    The result holds one array, float64 [turns], for each episode of the group.
    """
    outcomes, own = [], []
    for member in group:
        judged = _judged(spec, member)
        outcomes.append(float(judged.sum()) - math.fsum(member.turn_penalties()))
        own.append((member.ledger.totals - judged)[:-1])
    by_episode = compare_episodes(spec, outcomes)
    by_turn = compare_turns(spec, own)
    advantages = []
    for member, whole, turns in zip(group, by_episode, by_turn, strict=True):
        values = np.full(member.ledger.turns, whole)
        values[: len(turns)] += spec.weight * turns
        advantages.append(values)
    return advantages


def _judged(spec: MtGrpoCredit, member: Member) -> Values:
    """The outcome's part of each turn's reward, float64 [turns]."""
    ledger = member.ledger
    judged = np.zeros(ledger.turns)
    if spec.outcome is None:
        judged[-1:] = ledger.totals[-1:]
    else:
        for name in dict.fromkeys(spec.outcome):
            judged += ledger.matrix.get(name, 0.0)
    return judged
