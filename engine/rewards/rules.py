"""The spec's `rewards.reassign`: rules that move or write rewards after the action of a state.

Invariant: rules are applied in the order in which they are written, and each sees the effects of the earlier ones. A rule
whose condition is true and that cannot be applied is an error and is never skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.errors import GuardError, LedgerError
from engine.machine.guards import Guard
from engine.rewards.address import Locate
from engine.rewards.ledger import Ledger
from engine.schemas.base import Struct
from engine.schemas.reward import Posting, RewardEvent
from engine.schemas.reward_spec import ReassignRule

ReadContext = Callable[[frozenset[str]], Mapping[str, Any]]
"""Builds the named guard variables from the present state of the episode and its ledger."""


class _Rule(Struct, frozen=True, kw_only=True):
    index: int
    guard: Guard | None
    event: RewardEvent


class Rules:
    """The rules of one spec, without state: shared by all its episodes."""

    __slots__ = ("_at", "states")

    def __init__(self, at: Mapping[str, Sequence[_Rule]]) -> None:
        self._at = at
        self.states = frozenset(at)
        """States that have rules."""

    def apply(
        self, state: str, ledger: Ledger, at_turn: int, context: ReadContext, locate: Locate | None = None
    ) -> list[Posting]:
        """Apply the rules of a state after its action.

        Args:
            state: The state.
            ledger: The ledger that the rules write to.
            at_turn: The newest assistant turn; -1 before the first.
            context: Called for each rule, so that `rewards.*` includes the effects of earlier rules.
            locate: Finds the tokens of a part of a turn.

        Returns:
            The postings that the rules wrote, in order.

        Raises:
            LedgerError: a rule cannot be applied; blamed on the spec. The postings of earlier rules stay.
            GuardError: a rule's `when` fails on these values.
        """
        postings: list[Posting] = []
        for rule in self._at.get(state, ()):
            where = f"rewards.reassign[{rule.index}]"
            try:
                if rule.guard is None or rule.guard.evaluate(context(rule.guard.names)):
                    postings += ledger.post(rule.event, at_turn, locate)
            except GuardError as error:
                raise GuardError(f"{where}: {error}") from error
            except LedgerError as error:
                raise LedgerError(f"{where} at {state}: {error}", blame=error.blame) from error
        return postings


def compile_rules(rules: Sequence[ReassignRule]) -> Rules:
    """Compile a spec's `rewards.reassign`.

    The postings of rule n, counted from 0, have the source `rule:<n>`, and the cause `rule <n>` unless the rule has one.

    Raises:
        GuardError: a `when` is not valid CEL.
    """
    at: dict[str, list[_Rule]] = {}
    for index, rule in enumerate(rules):
        guard = Guard(rule.when) if rule.when is not None else None
        at.setdefault(rule.at, []).append(_Rule(index=index, guard=guard, event=_event(rule, index)))
    return Rules(at)


def _event(rule: ReassignRule, index: int) -> RewardEvent:
    """The event of a rule: for a transfer `from` pays and `to` receives, otherwise `to` is written."""
    transfer = rule.op == "transfer"
    assert not transfer or rule.from_ is not None  # ReassignRule holds to it
    return RewardEvent(
        turn=rule.from_ if rule.from_ is not None else rule.to,
        to=rule.to if transfer else None,
        name=rule.name,
        op=rule.op,
        value=rule.value,
        share=rule.share,
        part=rule.part,
        to_part=rule.to_part,
        discount=rule.discount,
        cause=rule.cause or f"rule {index}",
        source=f"rule:{index}",
    )
