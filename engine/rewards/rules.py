"""Rules of the spec that move or write rewards when a state has done its work.

Invariant: rules are tried in the order in which they are written, and each sees what the ones before it did. A rule
that holds and cannot be carried out is an error, never skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import GuardError, LedgerError
from engine.machine.guards import Guard
from engine.rewards.ledger import Ledger
from engine.schemas.reward import Posting, RewardEvent
from engine.schemas.reward_spec import ReassignRule

ReadContext = Callable[[frozenset[str]], Mapping[str, Any]]
"""Builds the guard variables that are asked for, from the episode and the ledger as they are now."""


@dataclass(frozen=True, slots=True)
class _Rule:
    index: int
    guard: Guard | None
    event: RewardEvent


class Rules:
    """The rules of one spec. Shared by all its episodes: it holds nothing of any one."""

    __slots__ = ("_at", "states")

    def __init__(self, at: Mapping[str, Sequence[_Rule]]) -> None:
        self._at = at
        self.states = frozenset(at)
        """Those with rules."""

    def apply(self, state: str, ledger: Ledger, at_turn: int, context: ReadContext) -> list[Posting]:
        """Try the rules of a state whose action is done.

        Args:
            state: Where the episode stands.
            ledger: What they write to.
            at_turn: The newest assistant turn; -1 before the first.
            context: Called anew for each rule, so that `rewards.*` is what the rules before it left.

        Returns:
            What they wrote, in order.

        Raises:
            LedgerError: a rule cannot be carried out; blamed on the spec. What the rules before it wrote stands.
            GuardError: a rule's `when` cannot be told on these values.
        """
        postings: list[Posting] = []
        for rule in self._at.get(state, ()):
            where = f"rewards.reassign[{rule.index}]"
            try:
                if rule.guard is None or rule.guard.evaluate(context(rule.guard.names)):
                    postings += ledger.post(rule.event, at_turn)
            except GuardError as error:
                raise GuardError(f"{where}: {error}") from error
            except LedgerError as error:
                raise LedgerError(f"{where} at {state}: {error}", blame=error.blame) from error
        return postings


def compile_rules(rules: Sequence[ReassignRule]) -> Rules:
    """Compile a spec's `rewards.reassign`.

    What a rule writes has the source `rule:<n>`, with n its position from 0, and the cause `rule <n>` unless it
    gives one.

    Raises:
        GuardError: a `when` is not CEL.
    """
    at: dict[str, list[_Rule]] = {}
    for index, rule in enumerate(rules):
        guard = Guard(rule.when) if rule.when is not None else None
        at.setdefault(rule.at, []).append(_Rule(index, guard, _event(rule, index)))
    return Rules(at)


def _event(rule: ReassignRule, index: int) -> RewardEvent:
    """What a rule writes when it holds: for a transfer `from` pays and `to` receives, otherwise `to` is written."""
    transfer = rule.op == "transfer"
    assert not transfer or rule.from_ is not None  # ReassignRule holds to it
    return RewardEvent(
        turn=rule.from_ if rule.from_ is not None else rule.to,
        to=rule.to if transfer else None,
        name=rule.name,
        op=rule.op,
        value=rule.value,
        share=rule.share,
        discount=rule.discount,
        cause=rule.cause or f"rule {index}",
        source=f"rule:{index}",
    )
