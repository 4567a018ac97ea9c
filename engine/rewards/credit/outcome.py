"""`outcome`: one number per episode, relative to its group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.rewards.credit.base import Member, Values, compare_episodes
from engine.schemas.credit import OutcomeCredit


def outcome(spec: OutcomeCredit, group: Sequence[Member]) -> list[Values]:
    """GRPO with outcome supervision (arXiv 2402.03300, section 4.1.2).

        A_i,t = (R_i - mean(R)) / std(R)    for every turn t of episode i

    R_i is the sum of episode i's rewards over turns and names, less the penalties of its tokens. The formula is that of `baseline: mean, scale: std`. The default,
    `leave_one_out` without scaling, is RLOO (arXiv 2402.14740, section 3.2): A_i = R_i - mean over j != i of R_j.

    The result holds one array, float64 [turns], for each episode of the group.
    """
    advantages = compare_episodes(spec, [member.total() for member in group])
    return [np.full(member.ledger.turns, value) for member, value in zip(group, advantages, strict=True)]
