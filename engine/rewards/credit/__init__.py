"""Credit assignment: from the sealed ledgers of a group to an advantage for each turn, or each token.

    advantages = credit(OutcomeCredit(), [ledger, ledger, ledger])          # one array of [turns] for each episode
    by_token = credit_tokens(spec, [Member(ledger, values=values, ends=ends), …])
    token_rewards = place(branch, ledger.totals, "last")

Pure functions, one file a method. A group is every episode of one task; each counts once, however many branches it
exports. Which episodes belong to it (a failed simulator's does not) is for the caller to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.rewards.credit.base import EPSILON, Member, Values, returns_to_go
from engine.rewards.credit.bilevel_gae import bilevel_gae, bilevel_token_gae
from engine.rewards.credit.entry import own
from engine.rewards.credit.gigpo import gigpo
from engine.rewards.credit.mt_grpo import mt_grpo
from engine.rewards.credit.outcome import outcome
from engine.rewards.credit.placement import Where, place
from engine.rewards.credit.progress import progress
from engine.rewards.credit.redistribute import redistribute
from engine.rewards.credit.score import score
from engine.rewards.credit.turn_discount import turn_discount
from engine.rewards.credit.turn_ppo import turn_ppo
from engine.rewards.credit.turn_return import turn_return
from engine.rewards.ledger import SealedLedger
from engine.schemas.credit import BilevelGaeCredit, CreditSpec, EntryCredit

__all__ = [
    "EPSILON",
    "METHODS",
    "NEEDS_VALUES",
    "Member",
    "Values",
    "Where",
    "credit",
    "credit_tokens",
    "place",
    "returns_to_go",
]

METHODS: Mapping[str, Callable[[Any, Sequence[Member]], list[Values]]] = {
    "outcome": outcome,
    "turn_return": turn_return,
    "turn_discount": turn_discount,
    "mt_grpo": mt_grpo,
    "gigpo": gigpo,
    "score": score,
    "progress": progress,
    "redistribute": redistribute,
    "bilevel_gae": bilevel_gae,
    "turn_ppo": turn_ppo,
}
"""By the spec's `rewards.credit.method`; `entry` is the one that is not here."""

NEEDS_VALUES = frozenset({"bilevel_gae", "turn_ppo"})
"""Methods that need a critic's values."""


def credit(spec: CreditSpec, group: Sequence[SealedLedger | Member], *, base: Path | None = None) -> list[Values]:
    """The advantages of a group's turns, by the spec's method.

    Args:
        spec: The method and what it is given.
        group: The episodes of one task; a bare ledger is one without states and without a critic's values.
        base: The spec's folder, for a method by entry point.

    Returns:
        For each episode, float64 of shape [turns].

    Raises:
        LedgerError: the method needs a critic's values and there are none, or a method of one's own answers nonsense.
        EntryError: a method of one's own cannot be had.
    """
    members = _members(group)
    if isinstance(spec, EntryCredit):
        return own(spec, members, base)
    return METHODS[spec.method](spec, members)


def credit_tokens(spec: CreditSpec, group: Sequence[Member], *, base: Path | None = None) -> list[list[Values]]:
    """The advantages of a group's sampled tokens.

    `bilevel_gae` tells a turn's tokens apart; with every other method a turn's advantage is each of its tokens'.

    Args:
        spec: As in `credit`.
        group: Members that say where their turns end.
        base: As in `credit`.

    Returns:
        For each episode, for each turn, float64 of shape [sampled tokens of the turn].

    Raises:
        LedgerError: as in `credit`, or a member does not say where its turns end.
    """
    if isinstance(spec, BilevelGaeCredit):
        return bilevel_token_gae(spec, group)
    return [
        member.broadcast(advantages) for member, advantages in zip(group, credit(spec, group, base=base), strict=True)
    ]


def _members(group: Sequence[SealedLedger | Member]) -> list[Member]:
    return [each if isinstance(each, Member) else Member(each) for each in group]
