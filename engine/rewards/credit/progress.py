"""`progress`: a score's rise pays the turns that led to it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from engine.rewards.credit.base import Member, Values, compare_turns, returns_to_go, shaped
from engine.rewards.ledger import SealedLedger
from engine.schemas.credit import ProgressCredit


def progress(spec: ProgressCredit, group: Sequence[Member]) -> list[Values]:
    """Differences of successive scores, spread backwards: potential-based shaping (Ng, Harada & Russell, ICML 1999,
    equation 2, with the score as the potential) in which the turns since the last score share its rise.

        for turns j < k scored one after the other:    d = s_k - s_j,    s before the first score is 0
        r'_t = d * w_t / sum of w,    w_t = decay^(k - t)    for t = j + 1 … k

    so that the sum of r' is the last score, exactly; what comes after it is 0. Then the return from each turn on
    (`gamma`; 0 leaves each turn its own part) against the group's at the same turn, as in `turn_return`.

    A turn is scored when the reward (any, where the spec names none) was written to it, be it with 0.
    """

    def rise(scores: Values, member: Member) -> Values:
        return spread_back(scores, scored(member.ledger, spec.reward), spec.decay)

    return compare_turns(spec, [returns_to_go(row, spec.gamma) for row in shaped(group, spec.reward, rise)])


def scored(ledger: SealedLedger, reward: str | None) -> list[int]:
    """The turns that the reward was written to, in order."""
    return sorted({posting.turn for posting in ledger.postings if reward is None or posting.name == reward})


def spread_back(scores: Values, turns: Sequence[int], decay: float) -> Values:
    """r' of [turns]: the difference at each of `turns`, over it and the turns since the one before it."""
    parts = np.zeros(len(scores))
    before, held = -1, 0.0
    for turn in turns:
        difference = float(scores[turn]) - held
        weights = [decay ** (turn - at) for at in range(before + 1, turn)]
        whole = math.fsum([*weights, 1.0])
        shares = [difference * (weight / whole) for weight in weights]
        parts[before + 1 : turn] = shares
        parts[turn] = difference - math.fsum(shares)  # what is left, so that rounding takes nothing
        before, held = turn, float(scores[turn])
    return parts
