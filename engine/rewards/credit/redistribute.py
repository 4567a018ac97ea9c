"""`redistribute`: a turn earns by how much it changed the return that was to be expected."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from engine.rewards.credit.base import Member, Values, compare_turns
from engine.rewards.credit.gigpo import keys_of
from engine.schemas.credit import RedistributeCredit

State = tuple[str | int | float, ...]


def redistribute(spec: RedistributeCredit, group: Sequence[Member]) -> list[Values]:
    """RUDDER's reward redistribution (arXiv 1806.07857, section 2: R_t+1 = g_t - g_t-1), with the group as predictor.

        g_t = the mean return of the group's episodes that were ever in the state that turn t led to
        g_T = the episode's own return,    g_before the first turn = 0
        r'_t = g_t - g_t-1

    The sum of r' is the episode's return. RUDDER predicts g with an LSTM; here it is counted, over states that the spec
    declares (`state_key`) or, where it declares none, over (turns taken, what they have earned). An episode counts once
    in a state, however often it was there. What is still to be expected is no turn's own: so a turn's advantage is its
    r' alone, against the group's at the same turn, and the first turn's g_before does not matter.

    Raises:
        LedgerError: the spec declares states, and they were not written down when the episodes ran.
    """
    states = _states(spec, group)
    found: dict[State, list[float]] = defaultdict(list)
    for member, passed in zip(group, states, strict=True):
        for state in {each for each in passed if each is not None}:
            found[state].append(member.ledger.total)
    expected = {state: math.fsum(returns) / len(returns) for state, returns in found.items()}
    rows = []
    for member, passed in zip(group, states, strict=True):
        if member.ledger.turns == 0:
            rows.append(np.zeros(0))
            continue
        held, guesses = 0.0, []
        for led_to in passed[1:]:  # a state that is like no other changes nothing that was expected
            held = held if led_to is None else expected[led_to]
            guesses.append(held)
        rows.append(np.diff([0.0, *guesses, member.ledger.total]))
    return compare_turns(spec, rows)


def _states(spec: RedistributeCredit, group: Sequence[Member]) -> list[list[State | None]]:
    """The state that each turn began in, by turn."""
    if spec.state_key is not None:
        keys = keys_of(group, spec.method)
        return [[(key,) if key else None for key in of_episode] for of_episode in keys]
    states: list[list[State | None]] = []
    for member in group:
        totals = member.ledger.totals
        states.append([(turn, math.fsum(totals[:turn])) for turn in range(member.ledger.turns)])
    return states
