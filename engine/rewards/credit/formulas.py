"""The formulas of the credit methods: pure functions of a group, which give an advantage for each turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.errors import LedgerError
from engine.rewards.credit.base import Member, Values, compare_episodes, compare_turns, returns_to_go
from engine.schemas.credit import EntryCredit, GigpoCredit, OutcomeCredit, TurnReturnCredit
from engine.spec.code.entry import load_entry


def outcome(spec: OutcomeCredit, group: Sequence[Member]) -> list[Values]:
    """GRPO with outcome supervision (arXiv 2402.03300, section 4.1.2).

        A_i,t = (R_i - mean(R)) / std(R)    for every turn t of episode i

    R_i is the sum of episode i's rewards over turns and names, less the penalties of its tokens. The formula is that of
    `baseline: mean, scale: std`. The default, `leave_one_out` without scaling, is RLOO (arXiv 2402.14740, section 3.2):
    A_i = R_i - mean over j != i of R_j.

    The result holds one array, float64 [turns], for each episode of the group.
    """
    advantages = compare_episodes(spec, [member.total() for member in group])
    return [np.full(member.ledger.turns, value) for member, value in zip(group, advantages, strict=True)]


def turn_return(spec: TurnReturnCredit, group: Sequence[Member]) -> list[Values]:
    """The return from each turn on (Sutton & Barto, equation 3.8), compared with the group turn by turn.

        G_i,t = sum over k >= t of gamma^(k - t) * r_i,k
        A_i,t = (G_i,t - b_t) / std_t

    r_i,k is the reward of turn k less the penalties of its tokens. b_t and std_t are over all n episodes of the group;
    an episode that has ended before turn t counts with G_i,t = 0.

    With `baseline: mean` an episode's own return is part of b_t, which scales the expected policy gradient by (n - 1) /
    n, equally at every turn. A mean over only the m episodes that are still running would scale it by (m - 1) / m,
    which differs between turns; and because the policy decides which episodes run on, that gradient would point in
    another direction than that of the return. With `leave_one_out` the gradient is not scaled. With gamma 1 the first
    turn's advantage is that of `outcome`.

    The result holds one array, float64 [turns], for each episode of the group.
    """
    return compare_turns(spec, [returns_to_go(member.rewards(), spec.gamma) for member in group])


def gigpo(spec: GigpoCredit, group: Sequence[Member]) -> list[Values]:
    """GiGPO (arXiv 2505.10978, equations 3 and 6 to 8).

        A^E_i   = (R_i - mean(R)) / F(R)                                        R_i: the episode's reward
        G(s)    = {(turn t of episode i, G_i,t) : the turn began in state s}
        G_i,t   = sum over k >= t of gamma^(k-t) r_k
        A^S_i,t = (G_i,t - mean over G(s)) / F over G(s)
        A_i,t   = A^E_i + weight * A^S_i,t

    Both comparisons count the penalties of tokens, as parts of r_k and R_i: verl-agent's GiGPO counts them in A^E only.
    F is the standard deviation (`scale: std`) or 1 (`scale: none`, the paper's alternative). A turn whose state occurs
    only once in the group has A^S = 0. An episode that returns to a state is in that state's group once per visit, as
    in the paper; in A^E it counts once.

    The result holds one array, float64 [turns], for each episode of the group.

    Raises:
        LedgerError: the states were not stored when the episodes ran.
    """
    by_episode = compare_episodes(spec, [member.total() for member in group])
    returns = [returns_to_go(member.rewards(), spec.gamma) for member in group]
    by_state = same_state(group, returns, spec)
    return [of_episode + spec.weight * turns for of_episode, turns in zip(by_episode.tolist(), by_state, strict=True)]


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
    keys_by_member: list[Sequence[str]] = []
    for member in group:
        turns = member.ledger.turns
        if member.state_keys is not None and len(member.state_keys) != turns:
            raise LedgerError(f"{len(member.state_keys)} states for {turns} turns; give one for each")
        keys = [key for key in member.state_keys or () if key is not None]
        if len(keys) != turns:
            raise LedgerError(
                f"`method: {method}` needs the state in which each turn began, and these episodes were run without "
                "states; `engine rescore` with a spec of this method adds them"
            )
        keys_by_member.append(keys)
    return keys_by_member


def entry(spec: EntryCredit, group: Sequence[Member], base: Path | None = None) -> list[Values]:
    """Call `package.module:function(group, **with)` and check that it returns float64 [turns] for each episode.

    Raises:
        EntryError: there is no such function.
        LedgerError: a member has penalties of tokens, or the function raised, or did not return one finite number for
            each turn.
    """
    if any(member.penalties is not None for member in group):
        raise LedgerError(
            f"`{spec.use}` gets no penalties of tokens; use `train.kl.in: loss`, or a method of the engine"
        )
    function = load_entry(spec.use, base)
    try:
        answer = function(list(group), **spec.with_)
        advantages = [np.asarray(values, np.float64) for values in answer]
    except Exception as error:  # the user's code
        raise LedgerError(f"`{spec.use}` failed: {type(error).__name__}: {error}") from error
    if len(advantages) != len(group):
        raise LedgerError(f"`{spec.use}` returned arrays for {len(advantages)} episodes; the group has {len(group)}")
    for number, (member, values) in enumerate(zip(group, advantages, strict=True)):
        if values.shape != (member.ledger.turns,) or not np.isfinite(values).all():
            raise LedgerError(
                f"`{spec.use}` must return {member.ledger.turns} finite numbers for episode {number} of the group, "
                f"one for each turn; it returned {values.tolist()}"
            )
    return advantages
