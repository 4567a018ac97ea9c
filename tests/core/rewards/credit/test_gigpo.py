"""`gigpo`: turns from the same state are compared with one another."""

from __future__ import annotations

import pytest
from credit_kit import advantages, sealed
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import LedgerError
from engine.rewards.credit import EPSILON, Member


def member(rewards: tuple[float, ...], *keys: str | None) -> Member:
    return Member(ledger=sealed(*rewards), state_keys=keys)


def test_turns_of_one_state_are_compared_and_a_lonely_one_is_not() -> None:
    group = [member((0.0, 0.0, 4.0), "hall", "kitchen", "hall"), member((0.0, 2.0), "hall", "cellar")]
    # episodes: 4, 2, mean 3. gamma 0.5, returns: [1 2 4], [1 2]; hall: 1, 4, 1, mean 2
    found = advantages(group, method="gigpo", gamma=0.5, scale="none", weight=2.0)
    assert found == [[1.0 - 2.0, 1.0, 1.0 + 4.0], [-1.0 - 2.0, -1.0]]


def test_both_parts_are_scaled_each_by_its_own_group() -> None:
    group = [member((0.0, 3.0), "s", "a"), member((0.0, 1.0), "s", "b")]
    up = 1.0 / (2.0**0.5 + EPSILON)  # 3 and 1 for the episodes, and again for both turns in s
    assert advantages(group, method="gigpo") == [pytest.approx([2 * up, up]), pytest.approx([-2 * up, -up])]


def test_a_state_that_nobody_told_is_like_no_other() -> None:
    group = [member((1.0,), ""), member((3.0,), "")]
    assert advantages(group, method="gigpo", scale="none") == [[-1.0], [1.0]]


def test_without_states_it_says_how_to_get_them() -> None:
    for group in ([sealed(1.0), sealed(2.0)], [member((1.0,), None)]):
        with pytest.raises(LedgerError, match=r"`method: gigpo` needs the state .* `engine rescore` with a spec"):
            advantages(group, method="gigpo")
    with pytest.raises(LedgerError, match="1 states for 2 turns"):
        advantages([member((1.0, 2.0), "s")], method="gigpo")


@given(
    st.lists(
        st.lists(st.tuples(st.floats(-5, 5).map(lambda x: x + 0.0), st.sampled_from("abc")), max_size=5), max_size=5
    )
)
def test_inside_a_state_advantages_sum_to_zero(episodes: list[list[tuple[float, str]]]) -> None:
    group = [Member(ledger=sealed(*(r for r, _ in each)), state_keys=[key for _, key in each]) for each in episodes]
    both = advantages(group, method="gigpo", scale="none")
    whole = advantages(group, method="outcome", scale="none")
    sums = dict.fromkeys("abc", 0.0)
    for each, a, b in zip(group, both, whole, strict=True):
        for key, x, y in zip(each.state_keys or (), a, b, strict=True):
            sums[str(key)] += x - y
    assert list(sums.values()) == pytest.approx([0.0] * 3, abs=1e-9)
