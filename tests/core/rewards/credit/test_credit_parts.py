"""Rewards of parts of turns: exact numbers, sums that are kept, and nothing changed where no part is addressed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from credit_kit import sealed
from hypothesis import given, settings
from hypothesis import strategies as st
from installed_plugins import needs_plugin

from engine.errors import LedgerError
from engine.rewards.credit import Member, credit, credit_tokens, without_parts
from engine.rewards.credit.formulas import ROUNDING
from engine.rewards.ledger import Ledger
from engine.rewards.sealed import SealedLedger, TurnPart
from engine.schemas.credit import read_credit
from engine.schemas.reward import PartAddress, RewardEvent

CALLS = [TurnPart(start=1, end=3, call=0), TurnPart(start=4, end=6, call=1)]
"""Two calls of a turn of six tokens."""


def locate(turn: int, part: PartAddress) -> TurnPart:
    if part.tokens is not None:
        return TurnPart(start=part.tokens[0], end=part.tokens[1])
    assert isinstance(part.call, int)
    return CALLS[part.call]


PARTS: Any = SimpleNamespace(locate=locate)


def ledger(*events: dict[str, Any], turns: int = 2) -> SealedLedger:
    open_ledger = Ledger()
    for event in events:
        open_ledger.post(RewardEvent.model_validate(event), turns - 1, PARTS)
    return open_ledger.seal(turns)


def tokens(credit: dict[str, Any], *ledgers: SealedLedger) -> list[list[list[float]]]:
    members = [Member(ledger=one, ends=[6 * (turn + 1) for turn in range(one.turns)]) for one in ledgers]
    return [[turn.tolist() for turn in member] for member in credit_tokens(read_credit(credit), members)]


@needs_plugin("credit_methods")
def test_two_parallel_calls_get_opposite_advantages() -> None:
    one = ledger({"turn": 0, "value": 1.0, "part": {"call": 0}}, {"turn": 0, "value": -1.0, "part": {"call": 1}})
    other = ledger()
    for method in ("turn_return", "outcome", "turn_discount", "mt_grpo"):
        found = tokens({"method": method}, one, other)
        assert found[0] == [[0, 1, 1, 0, -1, -1], [0] * 6], method
        assert found[1] == [[0] * 6, [0] * 6], method  # this episode made no calls: no token is in a part
    plain = ledger({"turn": 0, "value": 1.0}, {"turn": 0, "value": -1.0})
    assert (
        tokens({"method": "turn_return"}, plain, other) == [[[0] * 6] * 2] * 2
    )  # without addresses nothing is learned


def test_the_loss_pushes_the_tokens_of_the_two_calls_in_opposite_directions() -> None:
    torch = pytest.importorskip("torch")
    one = ledger(
        {"turn": 0, "value": 1.0, "part": {"call": 0}}, {"turn": 0, "value": -1.0, "part": {"call": 1}}, turns=1
    )
    (advantages,), _ = tokens({"method": "turn_return"}, one, ledger(turns=1))
    logprobs = torch.zeros(6, requires_grad=True)
    (-torch.exp(logprobs - logprobs.detach()) * torch.tensor(advantages)).sum().backward()
    assert logprobs.grad.tolist() == [0, -1, -1, 0, 1, 1]


def test_earlier_turns_see_the_rewards_of_parts_and_other_tokens_of_the_turn_do_not() -> None:
    one = ledger({"turn": 1, "value": 0.5}, {"turn": 1, "value": 2.0, "part": {"call": 1}})
    other = ledger({"turn": 1, "value": 0.25, "part": {"call": 1}})
    found = tokens({"method": "turn_return", "gamma": 0.5}, one, other)
    assert found[0] == [[1.125] * 6, [0.5, 0.5, 0.5, 0.5, 2.25, 2.25]]  # 0.5 * (2.5 - 0.25); 0.5; 0.5 + (2 - 0.25)
    assert found[1] == [[-1.125] * 6, [-0.5, -0.5, -0.5, -0.5, -2.25, -2.25]]
    found = tokens({"method": "outcome", "baseline": "none"}, one, other)
    assert found[0] == [[2.5] * 6, [0.5, 0.5, 0.5, 0.5, 2.5, 2.5]]


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=2), min_size=1, max_size=4),
    st.sampled_from(["mean", "leave_one_out", "none"]),
)
def test_a_part_that_is_the_whole_turn_is_the_turn(rewards: list[list[float]], baseline: str) -> None:
    """`turn_return` is linear in the rewards, so the two addresses give the same numbers."""
    credit = {"method": "turn_return", "gamma": 0.9, "baseline": baseline}
    parts = [[{"turn": t, "value": v, "part": {"tokens": [0, 6]}} for t, v in enumerate(each)] for each in rewards]
    whole = [[{"turn": t, "value": v} for t, v in enumerate(each)] for each in rewards]
    found = tokens(credit, *(ledger(*each) for each in parts))
    assert np.allclose(found, tokens(credit, *(ledger(*each) for each in whole)), rtol=0, atol=100 * ROUNDING)


events = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"turn": st.integers(0, 1), "value": st.floats(-4, 4, width=32), "op": st.sampled_from(["add", "set"])},
            optional={"part": st.sampled_from([{"call": 0}, {"call": 1}, {"tokens": [0, 2]}])},
        ),
        st.fixed_dictionaries(
            {"turn": st.integers(0, 1), "to": st.integers(0, 1), "op": st.just("transfer")},
            optional={
                "share": st.sampled_from([0.0, 0.3, 1.0]),
                "part": st.sampled_from([{"call": 0}, {"call": 1}]),
                "to_part": st.sampled_from([{"call": 0}, {"call": 1}]),
            },
        ),
    ),
    max_size=12,
)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(events)
def test_transfers_keep_the_sum_and_stored_postings_give_the_same_ledger(plain: list[dict[str, Any]]) -> None:
    open_ledger, total = Ledger(), 0.0
    for event in plain:
        read = RewardEvent.model_validate({"share": 0.5} | event if event["op"] == "transfer" else event)
        try:
            posted = open_ledger.post(read, 1, PARTS)
        except LedgerError:
            continue
        if read.op == "transfer":
            assert sum(one.delta for one in posted) == 0.0
            assert sum(open_ledger.totals(2)) == pytest.approx(total, abs=1e-12)
        total = sum(open_ledger.totals(2))
    one = open_ledger.seal(2)
    again = Ledger.of(one.postings).seal(2)
    assert again.totals.tolist() == one.totals.tolist()
    assert {name: row.tolist() for name, row in again.matrix.items()} == {
        name: row.tolist() for name, row in one.matrix.items()
    }
    assert sorted(again.parts, key=repr) == sorted(one.parts, key=repr)
    for turn in (0, 1):
        without = without_parts(one, turn)
        taken = sum(each.value for each in one.parts if each.turn == turn)
        assert without.totals[turn] == pytest.approx(one.totals[turn] - taken, abs=1e-12)


def test_a_set_of_the_whole_turn_replaces_the_rewards_of_its_parts() -> None:
    one = ledger({"turn": 0, "value": 1.0, "part": {"call": 0}}, {"turn": 0, "value": 0.25, "op": "set"})
    assert (one.totals.tolist(), one.parts) == ([0.25, 0.0], ())
    assert one.postings[1].delta == -0.75


@pytest.mark.parametrize("address", ["all", "each"])
def test_a_part_belongs_to_one_turn(address: str) -> None:
    with pytest.raises(ValueError, match="a part belongs to one turn"):
        RewardEvent(turn=address, value=1.0, part=PartAddress(call=0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exactly one of"):
        PartAddress(call=0, text="a")
    with pytest.raises(LedgerError, match="the tokens of the turn are not known here"):
        Ledger().post(RewardEvent(value=1.0, part=PartAddress(call=0)), 0)


def test_without_parts_the_numbers_are_those_of_the_method() -> None:
    group = [Member(ledger=sealed(0.1, 0.2), ends=[6, 12]), Member(ledger=sealed(0.3), ends=[6])]
    spec = read_credit({"method": "turn_return"})
    expected = [member.broadcast(of) for member, of in zip(group, credit(spec, group), strict=True)]
    found = credit_tokens(spec, group)
    assert [[turn.tolist() for turn in of] for of in found] == [[turn.tolist() for turn in of] for of in expected]
