"""`mt_grpo`: turns' own rewards beside the outcome's."""

from __future__ import annotations

import pytest
from credit_kit import advantages, sealed

from engine.rewards.credit import EPSILON


def test_two_turns_as_in_the_paper() -> None:
    # outcomes 1, 0; own rewards of the first turn 0.2, 0.6: sample deviations sqrt(1/2), sqrt(0.08)
    group = [sealed(0.2, 1.0), sealed(0.6, 0.0)]
    by_outcome = 0.5 / (0.5**0.5 + EPSILON)
    by_turn = 0.2 / (0.08**0.5 + EPSILON)
    first, second = advantages(group, method="mt_grpo", weight=0.5)
    assert first == pytest.approx([by_outcome - 0.5 * by_turn, by_outcome], rel=1e-12)
    assert second == pytest.approx([-by_outcome + 0.5 * by_turn, -by_outcome], rel=1e-12)


def test_an_episode_without_such_a_turn_counts_as_zero_there() -> None:
    group = [sealed(0.0, 3.0, 1.0), sealed(1.0)]
    # outcomes 1, 1; own rewards [0 3] and none: means 0, 1.5
    assert advantages(group, method="mt_grpo", scale="none") == [[0.0, 1.5, 0.0], [0.0]]


def test_the_outcomes_rewards_may_be_named_wherever_they_lie() -> None:
    group = [sealed({"right": 2.0, "call": 1.0}, {"form": 4.0}), sealed({"call": 3.0}, 0.0)]
    named = advantages(group, method="mt_grpo", outcome=["right", "right", "absent"], scale="none")
    # outcomes 2, 0; own rewards of turn 0: 1, 3; what the last turn holds besides is nobody's
    assert named == [[1.0 - 1.0, 1.0], [-1.0 + 1.0, -1.0]]
    assert advantages(group, method="mt_grpo", scale="none") == [[2.0 + 0.0, 2.0], [-2.0 + 0.0, -2.0]]


def test_weight_zero_is_the_outcome_alone() -> None:
    group = [sealed(0.5, 1.0), sealed(0.0, 3.0)]
    assert advantages(group, method="mt_grpo", weight=0.0, scale="none") == [[-1.0, -1.0], [1.0, 1.0]]
