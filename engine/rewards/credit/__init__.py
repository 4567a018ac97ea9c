"""The sealed ledgers of a group -> an advantage for each turn or each token.

    advantages = credit(OutcomeCredit(), [ledger, ledger, ledger])          # one array of [turns] for each episode
    by_token = credit_tokens(spec, [Member(ledger, values=values, ends=ends), …])
    token_rewards = place(branch, ledger.totals, "last")

Rewards of turns are in the ledger. Penalties of single tokens, which only a trainer knows, are `Member.penalties`: a
method subtracts them from its rewards before it compares anything. Where an action is a turn, what counts is the sum
over the turn's tokens.

Pure functions, one file for each method; `engine.schemas.credit` has the config class of each method, which names its
formula and declares what it needs. A group is every episode of one task; each counts once, however many branches it
exports. The caller decides which episodes belong to the group: an episode that failed for a reason other than the
policy does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.errors import LedgerError
from engine.rewards.credit.formulas import EPSILON, Member, Values, compare, returns_to_go
from engine.rewards.sealed import PartReward, SealedLedger, TurnPart
from engine.schemas.credit import ComparedCredit, CreditMethod
from engine.schemas.trajectory import Branch

__all__ = ["EPSILON", "Member", "Values", "Where", "credit", "credit_tokens", "place", "returns_to_go"]


def credit(spec: CreditMethod, group: Sequence[SealedLedger | Member], *, base: Path | None = None) -> list[Values]:
    """Compute the advantages of a group's turns.

    Args:
        spec: The method with its keys.
        group: The episodes of one task. A bare ledger is an episode without states and without a critic's values.
        base: The folder of the spec, in which a function of the user's own is looked for.

    Returns:
        For each episode, float64 of shape [turns].

    Raises:
        LedgerError: the method needs a critic's values or states and there are none, or a function of the user's own
            fails or returns something other than one finite number for each turn.
        EntryError: there is no such function.
    """
    members = [episode if isinstance(episode, Member) else Member(ledger=episode) for episode in group]
    folder = (base,) if spec.takes_folder else ()
    advantages: list[Values] = resolve_name(spec.formula)(spec, members, *folder)
    return advantages


def credit_tokens(spec: CreditMethod, group: Sequence[Member], *, base: Path | None = None) -> list[list[Values]]:
    """Compute the advantages of a group's sampled tokens.

    Each token has its turn's advantage, except with a method that has a formula for tokens (`token_formula`), and in
    turns with rewards of parts (`credit_parts`).

    Args:
        spec: As in `credit`.
        group: Members with `ends`, the ends of their turns.
        base: As in `credit`.

    Returns:
        For each episode, for each turn, float64 of shape [sampled tokens of the turn].

    Raises:
        LedgerError: as in `credit`, or a member has no `ends`.
        EntryError: as in `credit`.
    """

    def tokens_of(members: Sequence[Member]) -> list[list[Values]]:
        if spec.token_formula is not None:
            by_token: list[list[Values]] = resolve_name(spec.token_formula)(spec, members)
            return by_token
        by_turn = credit(spec, members, base=base)
        return [member.broadcast(advantages) for member, advantages in zip(members, by_turn, strict=True)]

    if any(member.ledger.parts for member in group):
        return credit_parts(spec, group, tokens_of)
    return tokens_of(group)


Where = Literal["last", "spread"]


def place(
    branch: Branch,
    turn_values: Sequence[float] | Values,
    where: Where = "last",
    parts: Sequence[PartReward] = (),
) -> npt.NDArray[np.float32]:
    """Put each turn's value on its sampled tokens.

    A turn is sampled in one branch only, so over an episode's branches each value appears once. A turn without sampled
    tokens in this branch has no effect on the result.

    Args:
        branch: One token sequence.
        turn_values: A value for each turn of the episode, [turns].
        parts: Rewards of parts of turns, which `turn_values` contain: each is on the tokens of its part.
        where: `last`: on the turn's last sampled token. `spread`: in equal parts on its sampled tokens.

    Returns:
        float32 [tokens]; 0.0 on tokens that were not sampled.

    Raises:
        LedgerError: the branch holds a turn without a value.
    """
    placed = np.zeros(len(branch.input_ids), dtype=np.float64)
    tokens = np.flatnonzero((branch.loss_mask == 1) & (branch.turn_ids >= 0))
    if len(tokens) == 0:
        return placed.astype(np.float32)
    turns = branch.turn_ids[tokens]
    values = np.array(turn_values, dtype=np.float64)
    if turns.max() >= len(values):
        raise LedgerError(
            f"branch {branch.index} holds turn {turns.max()}, but there are values for {len(values)} turns",
            blame="engine",
        )
    for reward in parts:
        part_tokens = tokens[turns == reward.turn][reward.part.start : reward.part.end]
        if len(part_tokens):
            values[reward.turn] -= reward.value
            placed[part_tokens if where == "spread" else part_tokens[-1:]] += reward.value / (
                len(part_tokens) if where == "spread" else 1
            )
    if where == "spread":
        placed[tokens] += (values / np.maximum(np.bincount(turns, minlength=len(values)), 1))[turns]
    else:
        last = np.full(len(values), -1)
        np.maximum.at(last, turns, tokens)
        held = last >= 0
        placed[last[held]] += values[held]
    return placed.astype(np.float32)


ByToken = list[list[Values]]
"""For each episode, for each turn, float64 [sampled tokens]."""


def credit_parts(
    spec: CreditMethod, group: Sequence[Member], tokens_of: Callable[[Sequence[Member]], ByToken]
) -> ByToken:
    """The advantages of a group's sampled tokens, with the rewards of parts on the tokens of their parts.

    With R the rewards of the group, R - P_t the same rewards without those of the parts of turn t, and p_i,j what part
    j of turn t of episode i holds, the advantage of a token of turn t is

        A_i,t(R - P_t)                          if it is in no part
        A_i,t(R - P_t) + sum of B(p_j)_i        over the parts j that contain it

    A is the credit method. B compares p_i,j with the same part of the group's other episodes as the method compares
    episodes (`baseline`, `scale`); an episode without this part counts with 0. A method that compares nothing has B(p)
    = p. All other turns see the rewards of the parts in R, as part of what turn t earned. Parts are the same if they
    are the same call of the turn, or both the k-th of the turn's other parts. If a part is the whole turn, and the
    method is `turn_return`, this is A_i,t(R).

    Args:
        spec: The method.
        group: The members.
        tokens_of: The method for rewards of whole turns.
    """
    credited = tokens_of(group)
    for turn in sorted({reward.turn for member in group for reward in member.ledger.parts}):
        without = tokens_of([replace(member, ledger=without_parts(member.ledger, turn)) for member in group])
        parts_of = [_parts_of(member, turn) for member in group]
        keys = sorted({key for parts in parts_of for key in parts})
        values = np.array([[parts[key][1] if key in parts else 0.0 for key in keys] for parts in parts_of])
        compared = compare(spec, values) if isinstance(spec, ComparedCredit) else values
        for number, parts in enumerate(parts_of):
            if turn >= len(credited[number]):
                continue
            tokens = np.array(without[number][turn], np.float64)
            for column, key in enumerate(keys):
                if key in parts:
                    part = parts[key][0]
                    tokens[part.start : part.end] += compared[number, column]
            credited[number][turn] = tokens
    return credited


def without_parts(ledger: SealedLedger, turn: int) -> SealedLedger:
    """The ledger without the rewards of the parts of a turn."""
    removed = [reward for reward in ledger.parts if reward.turn == turn]
    matrix = dict(ledger.matrix)
    for reward in removed:
        row = matrix[reward.name].copy()
        row[turn] -= reward.value
        matrix[reward.name] = row
    totals = ledger.totals.copy()
    if removed:
        totals[turn] = math.fsum(row[turn] for row in matrix.values())
    parts = tuple(reward for reward in ledger.parts if reward.turn != turn)
    return replace(ledger, matrix=matrix, totals=totals, parts=parts)


def _parts_of(member: Member, turn: int) -> dict[tuple[int, int], tuple[TurnPart, float]]:
    """The parts of a turn with what they hold, by (0, number of the call) or (1, rank among the other parts)."""
    sums: dict[TurnPart, float] = {}
    for reward in member.ledger.parts:
        if reward.turn == turn:
            sums[reward.part] = sums.get(reward.part, 0.0) + reward.value
    others = sorted((part for part in sums if part.call is None), key=lambda part: (part.start, part.end))
    return {
        (1, others.index(part)) if part.call is None else (0, part.call): (part, value) for part, value in sums.items()
    }
