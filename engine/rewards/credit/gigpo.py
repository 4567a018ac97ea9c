"""`gigpo`: the episode relative to its group, and each turn relative to the group's turns that began in the same state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.errors import LedgerError
from engine.rewards.credit.base import Member, Values, compare_episodes, returns_to_go
from engine.schemas.credit import GigpoCredit


def gigpo(spec: GigpoCredit, group: Sequence[Member]) -> list[Values]:
    """GiGPO (arXiv 2505.10978, equations 3 and 6 to 8).

        A^E_i   = (R_i - mean(R)) / F(R)                                        R_i: the episode's reward
        G(s)    = {(turn t of episode i, G_i,t) : the turn began in state s}    G_i,t = sum over k >= t of gamma^(k-t) r_k
        A^S_i,t = (G_i,t - mean over G(s)) / F over G(s)
        A_i,t   = A^E_i + weight * A^S_i,t

    Both comparisons count the penalties of tokens, as parts of r_k and R_i: verl-agent's GiGPO counts them in A^E only. F is the standard deviation (`scale: std`) or 1 (`scale: none`, the paper's alternative). A turn whose state occurs only once
    in the group has A^S = 0. An episode that returns to a state is in that state's group once per visit, as in the paper; in
    A^E it counts once.

    The result holds one array, float64 [turns], for each episode of the group.

    Raises:
        LedgerError: the states were not stored when the episodes ran.
    """
    by_episode = compare_episodes(spec, [member.total() for member in group])
    returns = [returns_to_go(member.rewards(), spec.gamma) for member in group]
    by_state = same_state(group, returns, spec)
    return [whole + spec.weight * turns for whole, turns in zip(by_episode.tolist(), by_state, strict=True)]


def same_state(group: Sequence[Member], returns: Sequence[Values], spec: GigpoCredit) -> list[Values]:
    """A^S: each turn's return relative to the turns that began in the same state. For each episode, float64 [turns]."""
    visits: dict[str, list[tuple[int, int]]] = {}
    for number, keys in enumerate(keys_of(group, spec.method)):
        for turn, key in enumerate(keys):
            if key:
                visits.setdefault(key, []).append((number, turn))
    advantages = [np.zeros(len(row)) for row in returns]
    for places in visits.values():
        if len(places) == 1:
            continue
        compared = compare_episodes(spec, [float(returns[number][turn]) for number, turn in places])
        for (number, turn), value in zip(places, compared, strict=True):
            advantages[number][turn] = value
    return advantages


def keys_of(group: Sequence[Member], method: str) -> list[Sequence[str]]:
    """The state in which each turn began, for each member; an empty text for a state that is not known.

    Raises:
        LedgerError: a member has no states, or not one for each turn.
    """
    found: list[Sequence[str]] = []
    for member in group:
        turns = member.ledger.turns
        if member.state_keys is not None and len(member.state_keys) != turns:
            raise LedgerError(f"{len(member.state_keys)} states for {turns} turns; give one for each")
        keys = [key for key in member.state_keys or () if key is not None]
        if len(keys) != turns:
            raise LedgerError(
                f"`method: {method}` needs the state in which each turn began, and these episodes were run without states; "
                "`engine rescore` with a spec of this method adds them"
            )
        found.append(keys)
    return found
