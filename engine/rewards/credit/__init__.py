"""The sealed ledgers of a group -> an advantage for each turn or each token.

    advantages = credit(OutcomeCredit(), [ledger, ledger, ledger])          # one array of [turns] for each episode
    by_token = credit_tokens(spec, [Member(ledger, values=values, ends=ends), …])
    token_rewards = place(branch, ledger.totals, "last")

Rewards of turns are in the ledger. Penalties of single tokens, which only a trainer knows, are `Member.penalties`: a method subtracts them
from its rewards before it compares anything. Where an action is a turn, what counts is the sum over the turn's tokens.

Pure functions, one file for each method; `engine.schemas.credit` has the config class of each method, which names its
formula and declares what it needs. A group is every episode of one task; each counts once, however many branches it exports.
The caller decides which episodes belong to the group: an episode that failed for a reason other than the policy does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name

from engine.rewards.credit.base import EPSILON, Member, Values, returns_to_go
from engine.rewards.credit.tokens import Where, credit_parts, place
from engine.rewards.sealed import SealedLedger
from engine.schemas.credit import CreditMethod

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

    Each token has its turn's advantage, except with a method that has a formula for tokens (`token_formula`), and in turns with
    rewards of parts (`tokens.py`).

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
