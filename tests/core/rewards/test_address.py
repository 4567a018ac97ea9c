"""Turn addresses, resolved when an event is written."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import LedgerError
from engine.rewards.ledger import resolve_address


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("first", [(0, 1.0)]),
        ("second", [(1, 1.0)]),
        ("previous", [(2, 1.0)]),
        ("last", [(3, 1.0)]),
        (2, [(2, 1.0)]),
        ("all", [(0, 0.25), (1, 0.25), (2, 0.25), (3, 0.25)]),
        ("each", [(0, 0.125), (1, 0.25), (2, 0.5), (3, 1.0)]),
    ],
)
def test_addresses_at_the_fourth_turn(address: Any, found: list[tuple[int, float]]) -> None:
    assert resolve_address(address, 3, discount=0.5) == found


@pytest.mark.parametrize(
    ("address", "at_turn", "there"),
    [
        ("last", -1, "no turn yet"),
        ("all", -1, "no turn yet"),
        ("each", -1, "no turn yet"),
        (0, -1, "no turn yet"),
        ("previous", 0, "only turn 0"),
        ("second", 0, "only turn 0"),
        (3, 2, "only turns 0 to 2"),
    ],
)
def test_a_turn_that_is_not_there_yet_is_an_error(address: Any, at_turn: int, there: str) -> None:
    with pytest.raises(LedgerError, match=re.escape(f"there is no turn `{address}`: {there}. Write to a turn that is")):
        resolve_address(address, at_turn)


def test_a_discount_may_be_zero_and_may_not_overflow() -> None:
    assert resolve_address("each", 2, discount=0.0) == [(0, 0.0), (1, 0.0), (2, 1.0)]
    with pytest.raises(LedgerError, match=re.escape("`discount: 1e+300` to the power of 2 is not finite")):
        resolve_address("each", 2, discount=1e300)


@given(
    st.integers(0, 6) | st.sampled_from(["first", "second", "previous", "last", "all", "each"]),
    st.integers(-1, 6),
    st.floats(0, 2),
)
def test_addresses_are_those_of_a_list(address: Any, at_turn: int, discount: float) -> None:
    turns = list(range(at_turn + 1))
    position = {"first": 0, "second": 1, "previous": len(turns) - 2, "last": len(turns) - 1}.get(address, address)
    if address == "all":
        expected = [(turn, 1 / len(turns)) for turn in turns]
    elif address == "each":
        expected = [(turn, discount ** (len(turns) - 1 - turn)) for turn in turns]
    else:
        expected = [(turn, 1.0) for turn in turns if turn == position]
    if expected:
        assert resolve_address(address, at_turn, discount) == expected
    else:
        with pytest.raises(LedgerError):
            resolve_address(address, at_turn, discount)
