"""`turn_return`: the discounted return from each turn on, relative to the group's at the same turn."""

from __future__ import annotations

from collections.abc import Sequence

from engine.rewards.credit.base import Member, Values, compare_turns, returns_to_go
from engine.schemas.credit import TurnReturnCredit


def turn_return(spec: TurnReturnCredit, group: Sequence[Member]) -> list[Values]:
    """The return from each turn on (Sutton & Barto, equation 3.8), compared with the group turn by turn.

        G_i,t = sum over k >= t of gamma^(k - t) * r_i,k
        A_i,t = (G_i,t - b_t) / std_t

    r_i,k is the reward of turn k less the penalties of its tokens. b_t and std_t are over all n episodes of the group; an episode that has ended before turn t counts with G_i,t = 0.

    With `baseline: mean` an episode's own return is part of b_t, which scales the expected policy gradient by (n - 1) / n,
    equally at every turn. A mean over only the m episodes that are still running would scale it by (m - 1) / m, which differs
    between turns; and because the policy decides which episodes run on, that gradient would point in another direction than
    that of the return. With `leave_one_out` the gradient is not scaled. With gamma 1 the first turn's advantage is that of
    `outcome`.

    The result holds one array, float64 [turns], for each episode of the group.
    """
    return compare_turns(spec, [returns_to_go(member.rewards(), spec.gamma) for member in group])
