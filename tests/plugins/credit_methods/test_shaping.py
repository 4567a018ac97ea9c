"""`score`, `progress`, `redistribute`: turn rewards put in another shape."""

from __future__ import annotations

import math

import numpy as np
import pytest
from credit_kit import advantages, sealed
from hypothesis import given
from hypothesis import strategies as st

from engine.plugins.credit_methods.formulas import spread_back
from engine.rewards.credit import Member

PLAIN = {"baseline": "none", "scale": "none"}
NOW = {"gamma": 0.0, **PLAIN}


def test_score_pays_for_being_better_than_the_attempt_before() -> None:
    # r' = r + 10 (r - the one before): wrong then right, right then wrong, right both times
    group = [sealed(0.0, 1.0), sealed(1.0, 0.0), sealed(1.0, 1.0)]
    assert advantages(group, method="score", alpha=10.0, **NOW) == [[0.0, 11.0], [1.0, -10.0], [1.0, 1.0]]
    assert advantages(group, method="score", alpha=10.0, **PLAIN) == [[11.0, 11.0], [-9.0, -10.0], [2.0, 1.0]]


def test_score_of_three_attempts_and_of_one_reward_alone() -> None:
    assert advantages([sealed(0.2, 0.5, 0.25)], method="score", alpha=2.0, **NOW)[0] == pytest.approx(
        [0.2, 0.5 + 0.6, 0.25 - 0.5]
    )
    group = [sealed({"right": 0.0, "form": 1.0}, {"right": 1.0, "form": 3.0})]
    assert advantages(group, method="score", alpha=1.0, reward="right", **NOW) == [[1.0, 2.0 + 3.0]]


def test_score_against_the_group() -> None:
    group = [sealed(0.0, 1.0), sealed(1.0)]
    # alpha 1: r' [0 2], [1]; returns [2 2], [1 0]; means 1.5, 1
    assert advantages(group, method="score", scale="none") == [[0.5, 1.0], [-0.5]]


def test_progress_pays_the_turns_since_the_last_score() -> None:
    group = [sealed(0.0, {"reward": 0.25}, 0.0, 0.0, {"reward": 1.0})]
    # rises: 0.25 over turns 0 and 1, 0.75 over turns 2 to 4
    assert advantages(group, method="progress", **NOW) == [[0.125, 0.125, 0.25, 0.25, 0.25]]
    assert advantages(group, method="progress", decay=0.0, **NOW) == [[0.0, 0.25, 0.0, 0.0, 0.75]]
    assert advantages(group, method="progress", decay=0.5, **NOW)[0] == pytest.approx(
        [0.25 / 3, 0.5 / 3, 0.75 / 7, 1.5 / 7, 3.0 / 7]
    )


def test_a_score_of_zero_is_a_score_and_what_follows_the_last_is_worth_nothing() -> None:
    group = [sealed({"tests": 0.5}, {"tests": 0.0}, {"tests": 0.75, "form": 1.0}, 0.0)]
    assert advantages(group, method="progress", reward="tests", **NOW) == [[0.5, -0.5, 0.75 + 1.0, 0.0]]
    assert advantages(group, method="progress", reward="absent", **NOW) == [[0.5, 0.0, 1.75, 0.0]]


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=9), st.floats(0, 1), st.data())
def test_progress_conserves_the_last_score(scores: list[float], decay: float, data: st.DataObject) -> None:
    turns = sorted(data.draw(st.sets(st.integers(0, len(scores) - 1))))
    parts = spread_back(np.array(scores), turns, decay)
    last = scores[turns[-1]] if turns else 0.0
    assert math.fsum(parts) == pytest.approx(last, abs=1e-9)
    if turns:
        assert parts[turns[-1] + 1 :].tolist() == [0.0] * (len(scores) - 1 - turns[-1])


def test_redistribute_pays_the_turn_that_changed_what_was_to_be_expected() -> None:
    keys = [("start", "door", "room"), ("start", "door", "pit"), ("start", "wall")]
    rewards = [(0.0, 0.0, 6.0), (0.0, 0.0, 0.0), (0.0, 0.0)]
    group = [Member(ledger=sealed(*r), state_keys=k) for r, k in zip(rewards, keys, strict=True)]
    # expected: start 2, door 3, room 6, pit 0, wall 0
    found = advantages(group, method="redistribute", state_key="place", **PLAIN)
    assert found == [[3.0, 3.0, 0.0], [3.0, -3.0, 0.0], [0.0, 0.0]]
    assert advantages(group, method="redistribute", state_key="place", baseline="mean", scale="none") == [
        [1.0, 3.0, 0.0],
        [1.0, -3.0, 0.0],
        [-2.0, 0.0],
    ]


def test_redistribute_counts_states_by_what_was_earned_where_none_are_declared() -> None:
    group = [sealed(1.0, 4.0), sealed(1.0, 2.0), sealed(0.0, 0.0)]
    # after turn 0: earned 1 -> (5 + 3) / 2 = 4; earned 0 -> 0
    assert advantages(group, method="redistribute", **PLAIN) == [[4.0, 1.0], [4.0, -1.0], [0.0, 0.0]]


def test_a_state_that_nobody_told_leaves_what_was_expected() -> None:
    group = [
        Member(ledger=sealed(0.0, 0.0, 2.0), state_keys=("s", "", "a")),
        Member(ledger=sealed(0.0, 4.0), state_keys=("s", "a")),
    ]
    assert advantages(group, method="redistribute", state_key="x", **PLAIN) == [[0.0, 3.0, -1.0], [3.0, 1.0]]


@given(st.lists(st.lists(st.floats(-5, 5).map(lambda x: x + 0.0), min_size=1, max_size=5), min_size=1, max_size=5))
def test_redistribute_conserves_each_episodes_return(episodes: list[list[float]]) -> None:
    found = advantages([sealed(*rewards) for rewards in episodes], method="redistribute", **PLAIN)
    for values, rewards in zip(found, episodes, strict=True):
        assert math.fsum(values) == pytest.approx(math.fsum(rewards), abs=1e-9)
