"""`redistribute`: how much a turn changed the expected return."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from engine.rewards.credit.base import Member, Values, compare_turns, returns_to_go
from engine.rewards.credit.gigpo import keys_of
from engine.schemas.credit import RedistributeCredit

State = tuple[str | int | float, ...]


def redistribute(spec: RedistributeCredit, group: Sequence[Member]) -> list[Values]:
    """RUDDER's reward redistribution (arXiv 1806.07857, section 2: R_t+1 = g_t - g_t-1), with the group as predictor.

        g_t = the mean return of the group's episodes that were in the state to which turn t led
        g_T = the episode's own return,    g before the first turn = 0
        r'_t = g_t - g_t-1

    The sum of r' is the episode's return. RUDDER predicts g with an LSTM; here g is a mean over equal states: those of
    `state_key`, or by default (number of turns, sum of their rewards). An episode counts once in a state, however often it was
    there. Penalties of tokens are no part of the states and are not redistributed: a turn has those of its own and of later tokens
    subtracted from its r'. The advantage of a turn is its r' relative to the group's at the same turn, so g before the first turn cancels.

    The result holds one array, float64 [turns], for each episode of the group.

    Raises:
        LedgerError: the spec has a `state_key`, and the states were not stored when the episodes ran.
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
        for led_to in passed[1:]:  # a state like no other does not change the expected return
            held = held if led_to is None else expected[led_to]
            guesses.append(held)
        of_tokens = returns_to_go(member.turn_penalties(), 1.0)
        rows.append(np.diff([0.0, *guesses, member.ledger.total]) - of_tokens)
    return compare_turns(spec, rows)


def _states(spec: RedistributeCredit, group: Sequence[Member]) -> list[list[State | None]]:
    """The state in which each turn began; None for a state like no other."""
    if spec.state_key is not None:
        keys = keys_of(group, spec.method)
        return [[(key,) if key else None for key in of_episode] for of_episode in keys]
    states: list[list[State | None]] = []
    for member in group:
        totals = member.ledger.totals
        states.append([(turn, math.fsum(totals[:turn])) for turn in range(member.ledger.turns)])
    return states
