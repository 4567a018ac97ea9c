"""Rules of a spec, tried in order, each seeing what the ones before it did."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from engine.errors import GuardError, LedgerError
from engine.rewards.ledger import Ledger, Rules
from engine.rewards.sealed import TurnPart
from engine.schemas.credit import ReassignRule
from engine.schemas.reward import PartAddress, RewardEvent, TurnChoice

USER = "AWAITING_USER_FEEDBACK"


def rules(*written: dict[str, Any]) -> Rules:
    return Rules([ReassignRule.model_validate({"at": USER, **rule}) for rule in written])


class Target:
    """What rules see of an episode whose ledger this is."""

    def __init__(self, ledger: Ledger, turns: int, state: str = USER, **facts: Any) -> None:
        self.ledger = ledger
        self.turn = turns - 1
        self.state = state
        self.facts = {"solved": False, "satisfied": False, "malformed": False} | facts
        self.asked: list[frozenset[str]] = []

    def guard_values(self, names: frozenset[str]) -> Mapping[str, Any]:
        self.asked.append(names)
        turns = self.turn + 1
        totals = self.ledger.totals(turns)
        values = {
            "rewards": {"total": sum(totals), "last": totals[-1], "previous": totals[-2] if turns > 1 else 0.0},
            "turns": {"assistant": turns, "user": 1},
            "feedback": self.facts,
        }
        return {name: values[name] for name in names}

    def find(self, choice: TurnChoice) -> int | None:
        kinds = ["DRAFTING", "REVISING", "REVISING", "DRAFTING"][: self.turn + 1]
        turns = [turn for turn, kind in enumerate(kinds) if kind == choice.name]
        return None if not turns else turns[0] if choice.first else turns[-1]

    def locate(self, turn: int, part: PartAddress) -> TurnPart:
        assert part.tokens is not None
        return TurnPart(start=part.tokens[0], end=part.tokens[1])


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        ({"from": "last", "to": "previous", "share": 0.5}, {"turn": "last", "to": "previous", "share": 0.5}),
        ({"from": 1, "share": 0.5}, {"turn": 1, "to": "last", "share": 0.5}),
        ({"op": "add", "to": "first", "value": 1}, {"op": "add", "turn": "first", "value": 1}),
        ({"op": "set", "from": None, "to": "all", "value": 1}, {"op": "set", "turn": "all", "value": 1}),
        ({"op": "add", "value": 1}, {"op": "add", "turn": "last", "value": 1}),
    ],
)
def test_a_rule_of_an_earlier_spec_names_its_turns_otherwise(earlier: dict[str, Any], now: dict[str, Any]) -> None:
    rule = ReassignRule.model_validate({"at": USER, **earlier})
    assert rule == ReassignRule.model_validate({"at": USER, **now})
    assert ReassignRule.model_validate(rule.model_dump(mode="json")) == rule
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        ReassignRule.model_validate({"at": USER, "turn": "last", **earlier, "from": "last"})


def paid(*amounts: float) -> Ledger:
    ledger = Ledger()
    for turn, amount in enumerate(amounts):
        ledger.post(RewardEvent(turn=turn, value=amount), len(amounts) - 1)
    return ledger


@pytest.mark.parametrize(
    ("choice", "turns", "found"),
    [
        ({"first": "REVISING"}, 4, 1),
        ({"last": "REVISING"}, 4, 2),
        ({"last": "REVISING"}, 2, 1),
        ({"last": "DRAFTING"}, 4, 3),
        ({"first": "DRAFTING"}, 4, 0),
    ],
)
def test_a_turn_by_its_state_is_paid_by_number(choice: dict[str, str], turns: int, found: int) -> None:
    ledger = paid(*[0.0] * turns)
    (posting,) = rules({"op": "add", "turn": choice, "value": 0.5}).apply(Target(ledger, turns))
    assert (posting.turn, posting.delta, posting.at_turn) == (found, 0.5, turns - 1)


def test_a_transfer_between_turns_by_state_conserves_the_sum() -> None:
    ledger = paid(0.0, 0.0, 0.0, 2.0)
    rules({"turn": "last", "to": {"last": "REVISING"}, "share": 0.25}).apply(Target(ledger, 4))
    assert ledger.totals(4) == [0.0, 0.0, 0.5, 1.5]
    rules({"turn": {"last": "REVISING"}, "to": {"first": "REVISING"}, "share": 0.5}).apply(Target(ledger, 4))
    assert ledger.totals(4) == [0.0, 0.25, 0.25, 1.5]
    itself = rules({"turn": "last", "to": {"last": "DRAFTING"}, "share": 0.5})
    with pytest.raises(LedgerError, match=re.escape("a transfer from turn 3 to itself (`last` to `{last: DRAFTING}`)")):
        itself.apply(Target(ledger, 4))
    assert ledger.totals(4) == [0.0, 0.25, 0.25, 1.5]


def test_a_turn_by_state_that_is_not_there_yet_is_an_error() -> None:
    rule = rules({"op": "add", "turn": {"last": "REVISING"}, "value": 1.0})
    with pytest.raises(LedgerError) as caught:
        rule.apply(Target(paid(0.0), 1))
    assert str(caught.value) == (
        "rewards.reassign[0] at AWAITING_USER_FEEDBACK: rule:0: there is no turn `{last: REVISING}`: none was sampled in or "
        "ended with `REVISING`. Write to a turn that is there, or let the rule wait (`when: turns.assistant > 1`)"
    )
    assert caught.value.blame == "spec"
    with pytest.raises(ValidationError, match="write one of `first` and `last`"):
        RewardEvent.model_validate({"turn": {"first": "A", "last": "B"}, "value": 1.0})


SHARE = {"when": "feedback.solved && turns.assistant > 1", "turn": "last", "to": "previous", "share": 0.25}


def test_a_rule_pays_the_turn_that_led_to_the_answer() -> None:
    ledger = paid(0.0, 1.0)
    written = rules(SHARE).apply(Target(ledger, 2, solved=True))
    assert [(p.turn, p.delta, p.cause, p.source) for p in written] == [
        (1, -0.25, "rule 0", "rule:0"),
        (0, 0.25, "rule 0", "rule:0"),
    ]
    assert ledger.totals(2) == [0.25, 0.75]


@pytest.mark.parametrize(("state", "turns", "solved"), [("DONE", 2, True), (USER, 1, True), (USER, 2, False)])
def test_a_rule_waits_for_its_state_and_its_condition(state: str, turns: int, solved: bool) -> None:
    ledger = paid(*[1.0] * turns)
    assert rules(SHARE).apply(Target(ledger, turns, state, solved=solved)) == []
    assert ledger.totals(turns) == [1.0] * turns


def test_each_rule_sees_what_the_ones_before_it_did() -> None:
    ledger = paid(0.0, 1.0)
    written = rules(
        {"op": "add", "turn": "last", "value": 1.0},
        {"when": "rewards.last == 2.0", "op": "add", "turn": "last", "name": "bonus", "value": 0.5, "cause": "both"},
        {"when": "rewards.last == 1.0", "op": "set", "turn": "all", "value": 9.0},
        {"when": "rewards.total > 2.0", "turn": "last", "to": "first", "value": 0.25, "name": "bonus"},
    ).apply(Target(ledger, 2))
    assert [(p.op, p.turn, p.name, p.delta, p.source, p.cause) for p in written] == [
        ("add", 1, "reward", 1.0, "rule:0", "rule 0"),
        ("add", 1, "bonus", 0.5, "rule:1", "both"),
        ("transfer", 1, "bonus", -0.25, "rule:3", "rule 3"),
        ("transfer", 0, "bonus", 0.25, "rule:3", "rule 3"),
    ]


def test_a_discount_reaches_back() -> None:
    ledger = paid(0.0, 0.0, 0.0)
    rules({"op": "add", "turn": "each", "value": 8.0, "discount": 0.5}).apply(Target(ledger, 3))
    assert ledger.totals(3) == [2.0, 4.0, 8.0]


def test_a_rule_that_cannot_be_carried_out_is_the_specs_failure() -> None:
    ledger = paid(1.0)
    with pytest.raises(LedgerError) as caught:
        rules({"op": "add", "value": 1.0}, {"turn": "last", "to": "previous", "share": 0.5, "cause": "earned"}).apply(
            Target(ledger, 1)
        )
    assert str(caught.value) == (
        "rewards.reassign[1] at AWAITING_USER_FEEDBACK: rule:1: there is no turn `previous`: only turn 0. "
        "Write to a turn that is there, or let the rule wait (`when: turns.assistant > 1`)"
    )
    assert caught.value.blame == "spec"
    assert ledger.totals(1) == [2.0]


def test_a_condition_that_cannot_be_told_names_its_rule() -> None:
    ledger = paid(1.0)
    with pytest.raises(GuardError) as caught:
        rules({"op": "add", "value": 1.0, "when": "feedback.helpful"}).apply(Target(ledger, 1))
    assert str(caught.value) == (
        "rewards.reassign[0]: guard `feedback.helpful`: `feedback.helpful` does not exist; "
        "write `has(feedback.helpful) && feedback.helpful`"
    )


def test_a_when_that_is_not_cel_is_refused() -> None:
    with pytest.raises(GuardError, match="guard `1 <`"):
        rules({"op": "add", "value": 1.0, "when": "1 <"})


def test_only_the_variables_that_a_rule_reads_are_asked_for() -> None:
    target = Target(paid(1.0), 1)
    rules({"op": "add", "value": 1.0}, {"op": "add", "value": 1.0, "when": "turns.user > 0"}).apply(target)
    assert target.asked == [frozenset({"turns"})]
    assert target.ledger.totals(1) == [3.0]


def test_a_rule_of_a_part_asks_the_target_for_its_tokens() -> None:
    written = rules({"op": "add", "turn": "last", "value": 1.0, "part": {"tokens": [2, 5]}}).apply(Target(paid(0.0), 1))
    assert [(p.turn, p.delta, p.start, p.end) for p in written] == [(0, 1.0, 2, 5)]
