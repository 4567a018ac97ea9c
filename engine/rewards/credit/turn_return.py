"""`turn_return`: the discounted return from each turn on, against the group's at the same turn."""

from __future__ import annotations

from collections.abc import Sequence

from engine.rewards.credit.base import Member, Values, compare_turns, returns_to_go
from engine.schemas.credit import TurnReturnCredit


def turn_return(spec: TurnReturnCredit, group: Sequence[Member]) -> list[Values]:
    """The return from each turn on (Sutton & Barto, equation 3.8), normalised turn by turn over the group.

        G_i,t = sum over k >= t of gamma^(k - t) * r_i,k
        A_i,t = (G_i,t - b_t) / std_t

    b_t and std_t are over all n episodes of the group, and an episode that is over by turn t counts with G_i,t = 0:
    there is nothing more to come. An episode's own return is part of the mean, which shrinks the expected policy
    gradient: by (n - 1) / n here, alike for every turn. A mean over only the m episodes that are still going would
    shrink it by (m - 1) / m: the later the turn the more, to nothing for the last one going; and since the policy
    decides who goes on, that gradient points elsewhere than the return's. With `leave_one_out` nothing is shrunk.
    With gamma 1 the first turn's advantage is `outcome`'s.
    """
    return compare_turns(spec, [returns_to_go(member.ledger.totals, spec.gamma) for member in group])
