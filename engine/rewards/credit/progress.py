"""`progress`: an increase of a score is the reward of the turns that led to it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from engine.rewards.credit.base import Member, Values, compare_turns, returns_to_go, shaped
from engine.rewards.sealed import SealedLedger
from engine.schemas.credit import ProgressCredit


def progress(spec: ProgressCredit, group: Sequence[Member]) -> list[Values]:
    """Differences of successive scores, spread backwards: potential-based shaping (Ng, Harada & Russell, ICML 1999, equation
    2, with the score as potential) in which the turns since the previous score share the difference.

        for turns j < k with successive scores:    d = s_k - s_j,    s before the first score is 0
        r'_t = d * w_t / sum of w,    w_t = decay^(k - t)    for t = j + 1 … k

    The sum of r' is the last score, exactly; turns after it have 0. Then the return from each turn on (`gamma`; with 0 each
    turn has its own part only) is compared with the group at the same turn, as in `turn_return`.

    A turn has a score if the reward (any reward, if the spec names none) was written to it, even if it is 0.

    The result holds one array, float64 [turns], for each episode of the group.
    """

    def rise(scores: Values, member: Member) -> Values:
        return spread_back(scores, scored(member.ledger, spec.reward), spec.decay)

    return compare_turns(spec, [returns_to_go(row, spec.gamma) for row in shaped(group, spec.reward, rise)])


def scored(ledger: SealedLedger, reward: str | None) -> list[int]:
    """The turns to which the reward was written, in order."""
    return sorted({posting.turn for posting in ledger.postings if reward is None or posting.name == reward})


def spread_back(scores: Values, turns: Sequence[int], decay: float) -> Values:
    """r', float64 [turns]: each difference is spread over the turns since the previous score."""
    parts = np.zeros(len(scores))
    before, held = -1, 0.0
    for turn in turns:
        difference = float(scores[turn]) - held
        weights = [decay ** (turn - at) for at in range(before + 1, turn)]
        whole = math.fsum([*weights, 1.0])
        shares = [difference * (weight / whole) for weight in weights]
        parts[before + 1 : turn] = shares
        parts[turn] = difference - math.fsum(shares)  # the rest, so that the sum is exact
        before, held = turn, float(scores[turn])
    return parts
