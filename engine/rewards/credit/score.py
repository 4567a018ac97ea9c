"""`score`: a bonus for an attempt that is better than the previous one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.rewards.credit.base import Member, Values, compare_turns, returns_to_go, shaped
from engine.schemas.credit import ScoreCredit


def score(spec: ScoreCredit, group: Sequence[Member]) -> list[Values]:
    """SCoRe's reward shaping (arXiv 2409.12917, section 5.2), for any number of attempts.

        r'_k = r_k + alpha * (r_k - r_k-1),    r'_1 = r_1

    then the return from each turn on (`gamma`), compared with the group at the same turn as in `turn_return`. The paper has two
    attempts, and the second gets the bonus alpha * (r(y_2) - r(y_1)). Every turn is an attempt.

    The result holds one array, float64 [turns], for each episode of the group.
    """
    rewards = shaped(group, spec.reward, lambda chosen, _: bonus(chosen, spec.alpha))
    return compare_turns(spec, [returns_to_go(row, spec.gamma) for row in rewards])


def bonus(rewards: Values, alpha: float) -> Values:
    """r' of the rewards; float64 [turns]."""
    better = np.zeros(len(rewards))
    better[1:] = rewards[1:] - rewards[:-1]
    return rewards + alpha * better
