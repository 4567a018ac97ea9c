"""`turn_discount`: AReaL's and Kevin's numbers."""

from __future__ import annotations

import pytest
from credit_kit import advantages, sealed
from hypothesis import given
from hypothesis import strategies as st

PLAIN = {"method": "turn_discount", "baseline": "none", "scale": "none"}


def test_a_final_ten_after_three_turns_is_worth_8_1_and_9_and_10() -> None:
    assert advantages([sealed(0.0, 0.0, 10.0)], gamma=0.9, **PLAIN)[0] == pytest.approx([8.1, 9.0, 10.0], abs=1e-12)


def test_rewards_on_the_way_are_added() -> None:
    assert advantages([sealed(1.0, 2.0, 4.0)], gamma=0.5, **PLAIN) == [[3.0, 4.0, 4.0]]


def test_max_is_the_best_that_came_of_a_turn() -> None:
    group = [sealed(1.0, 2.0, 8.0, 1.0), sealed(5.0, 4.0, 2.0), sealed(-1.0, -2.0)]
    assert advantages(group, gamma=0.5, form="max", **PLAIN) == [
        [2.0, 4.0, 8.0, 1.0],
        [5.0, 4.0, 2.0],
        [-1.0, -2.0],
    ]


def test_attempts_discount_the_episodes_reward_by_how_many_it_took() -> None:
    group = [sealed(10.0), sealed(0.0, 10.0), sealed(0.0, 0.0, 10.0), sealed()]
    found = advantages(group, gamma=0.9, form="attempts", **PLAIN)
    assert found == [[10.0], [9.0, 9.0], [pytest.approx(8.1, abs=1e-12)] * 3, []]


def test_an_episode_that_is_over_counts_as_zero() -> None:
    group = [sealed(0.0, 4.0), sealed(2.0)]
    assert advantages(group, method="turn_discount", gamma=0.5, scale="none") == [[0.0, 2.0], [0.0]]
    assert advantages(group, method="turn_discount", gamma=0.5, form="attempts", scale="none") == [[0.0, 0.0], [0.0]]


@given(st.lists(st.floats(0, 9), min_size=1, max_size=6), st.floats(0, 1))
def test_the_best_is_at_most_the_sum_where_nothing_is_below_zero(rewards: list[float], gamma: float) -> None:
    (best,) = advantages([sealed(*rewards)], gamma=gamma, form="max", **PLAIN)
    (whole,) = advantages([sealed(*rewards)], gamma=gamma, **PLAIN)
    assert all(a <= b + 1e-9 for a, b in zip(best, whole, strict=True))
    assert best[-1] == whole[-1] == rewards[-1]
