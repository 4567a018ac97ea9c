"""Credit: exact numbers of the formulas, and what holds for every group."""

from __future__ import annotations

import math

import numpy as np
import pytest
from credit_kit import advantages, sealed
from hypothesis import given
from hypothesis import strategies as st
from installed_plugins import needs_plugin

from engine.rewards.credit import EPSILON, credit, returns_to_go
from engine.rewards.sealed import SealedLedger
from engine.schemas.credit import TurnReturnCredit

GROUP = [sealed(0.0, 3.0), sealed(1.0), sealed(0.0, 0.0, 2.0)]
"""Returns 3, 1, 2: mean 2, sample standard deviation 1."""


def test_outcome_is_the_return_against_its_group() -> None:
    up = 1.0 / (1.0 + EPSILON)
    assert advantages(GROUP) == [[up, up], [-up], [0.0, 0.0, 0.0]]


def test_outcome_without_scale_is_dr_grpo() -> None:
    assert advantages(GROUP, scale="none") == [[1.0, 1.0], [-1.0], [0.0, 0.0, 0.0]]


def test_leave_one_out_takes_off_the_mean_of_the_others() -> None:
    assert advantages(GROUP, scale="none", baseline="leave_one_out") == [[1.5, 1.5], [-1.5], [0.0, 0.0, 0.0]]


def test_without_a_baseline_the_return_stands() -> None:
    assert advantages(GROUP, scale="none", baseline="none") == [[3.0, 3.0], [1.0], [2.0, 2.0, 2.0]]


@needs_plugin("credit_methods")
@pytest.mark.parametrize(("baseline", "left"), [("mean", 0.0), ("leave_one_out", 3.0), ("none", 3.0)])
@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize(
    "method", ["outcome", "turn_return", "turn_discount", "mt_grpo", "score", "progress", "redistribute"]
)
def test_a_group_of_one(method: str, baseline: str, scale: str, left: float) -> None:
    assert advantages([sealed(3.0)], method=method, baseline=baseline, scale=scale) == [[left]]


@needs_plugin("credit_methods")
@pytest.mark.parametrize(
    "method", ["outcome", "turn_return", "turn_discount", "mt_grpo", "score", "progress", "redistribute"]
)
def test_an_empty_group_and_an_episode_without_turns(method: str) -> None:
    assert advantages([], method=method) == []
    assert advantages([sealed(), sealed(2.0)], method=method, scale="none") == [[], [1.0]]


def test_equal_rewards_give_no_advantage_whatever_their_rounding() -> None:
    group = [sealed(0.1, 0.2), sealed(0.3), sealed(0.2, 0.1)]
    assert all(abs(value) < 1e-9 for values in advantages(group) for value in values)


def test_returns_to_go_discount_what_is_still_to_come() -> None:
    assert returns_to_go(np.array([1.0, 2.0, 4.0]), 0.5).tolist() == [3.0, 4.0, 4.0]
    assert returns_to_go(np.array([0.0, 0.0, 10.0]), 0.9).tolist() == pytest.approx([8.1, 9.0, 10.0], abs=1e-12)
    assert returns_to_go(np.zeros(0), 0.9).tolist() == []


def test_an_episode_that_is_over_counts_as_zero_in_later_baselines() -> None:
    group = [sealed(0.0, 0.0, 6.0), sealed(3.0), sealed(0.0, 3.0)]
    # returns to go: [6 6 6], [3 0 0], [3 3 0]; means 4, 3, 2
    assert advantages(group, method="turn_return", scale="none") == [[2.0, 3.0, 4.0], [-1.0], [-1.0, 0.0]]
    assert advantages(group, method="turn_return", scale="none", baseline="leave_one_out") == [
        [3.0, 4.5, 6.0],
        [-1.5],
        [-1.5, 0.0],
    ]


def test_turn_return_is_scaled_turn_by_turn() -> None:
    group = [sealed(0.0, 4.0), sealed(2.0)]
    # returns to go with gamma 0.5: [2 4], [2 0]; means 2, 2; sample deviations 0, sqrt(8)
    assert advantages(group, method="turn_return", gamma=0.5) == [[0.0, 2.0 / (math.sqrt(8.0) + EPSILON)], [0.0]]


groups = st.lists(st.lists(st.floats(-5, 5).map(lambda x: x + 0.0), max_size=5).map(lambda r: sealed(*r)), max_size=6)


@given(groups, st.floats(0, 1), st.sampled_from(["std", "none"]))
def test_against_the_mean_a_turns_advantages_sum_to_zero_with_the_dead_counted(
    group: list[SealedLedger], gamma: float, scale: str
) -> None:
    spec = TurnReturnCredit(gamma=gamma, baseline="mean", scale=scale)  # type: ignore[arg-type]
    found = credit(spec, group)
    assert [len(values) for values in found] == [ledger.turns for ledger in group]
    if scale == "std":
        return
    longest = max((ledger.turns for ledger in group), default=0)
    padded = np.zeros((len(group), longest))
    for row, ledger in zip(padded, group, strict=True):
        row[: ledger.turns] = returns_to_go(ledger.totals, gamma)
    for turn in range(longest):
        of_the_dead = sum(-padded[:, turn].mean() for ledger in group if ledger.turns <= turn)
        assert sum(v[turn] for v in found if len(v) > turn) + of_the_dead == pytest.approx(0.0, abs=1e-9)


@given(groups, st.sampled_from(["mean", "leave_one_out", "none"]), st.sampled_from(["std", "none"]))
def test_with_gamma_one_the_first_turn_has_the_outcomes_advantage(
    group: list[SealedLedger], baseline: str, scale: str
) -> None:
    outcome = advantages(group, method="outcome", baseline=baseline, scale=scale)
    turns = advantages(group, method="turn_return", gamma=1.0, baseline=baseline, scale=scale)
    for of_episode, by_turn in zip(outcome, turns, strict=True):
        assert by_turn[:1] == pytest.approx(of_episode[:1], rel=1e-6, abs=1e-6)
