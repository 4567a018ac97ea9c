"""`turn_discount`: rewards are worth less to earlier turns, in three forms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from engine.rewards.credit.base import Member, Values, compare_episodes, compare_turns, returns_to_go
from engine.schemas.credit import TurnDiscountCredit


def turn_discount(spec: TurnDiscountCredit, group: Sequence[Member]) -> list[Values]:
    """Discount by turns, then compare with the group (`baseline: none, scale: none` gives the discounted numbers).

        sum:       R_t = r_t + gamma * R_t+1
        max:       R_t = max over k >= t of gamma^(k - t) * r_k
        attempts:  R   = gamma^(T - 1) * (r_1 + … + r_T)    for every turn of an episode of T turns

    `sum` is AReaL's `apply_reward_discount` (code of arXiv 2505.24298): with gamma 0.9, a final reward of 10 after three turns
    is 8.1, 9, 10. `max` is the alternative that Kevin compares it with (arXiv 2507.11948, section 3.2): a turn is worth the
    best later reward. `attempts` is AReaL's multi-turn workflow: an episode that is right at the t-th attempt has
    r * gamma^(t - 1) for all its turns.

    Penalties of tokens are no attempts: `sum` and `max` subtract P_t = p_t + gamma * P_t+1, and `attempts` the sum of them. An
    episode that has ended counts with 0 in the baseline of later turns.

    The result holds one array, float64 [turns], for each episode of the group.
    """
    ledgers = [member.ledger for member in group]
    penalties = [member.turn_penalties() for member in group]
    if spec.form == "attempts":
        scores = [
            ledger.total * spec.gamma ** max(ledger.turns - 1, 0) - math.fsum(of)
            for ledger, of in zip(ledgers, penalties, strict=True)
        ]
        advantages = compare_episodes(spec, scores)
        return [np.full(ledger.turns, value) for ledger, value in zip(ledgers, advantages, strict=True)]
    discount = returns_to_go if spec.form == "sum" else best_to_come
    rows = [
        discount(ledger.totals, spec.gamma) - returns_to_go(of, spec.gamma)
        for ledger, of in zip(ledgers, penalties, strict=True)
    ]
    return compare_turns(spec, rows)


def best_to_come(rewards: Values, gamma: float) -> Values:
    """R_t = max(r_t, gamma * R_t+1), of shape [turns] as the rewards."""
    best = np.array(rewards, np.float64)
    for turn in range(len(best) - 2, -1, -1):
        best[turn] = max(best[turn], gamma * best[turn + 1])
    return best
