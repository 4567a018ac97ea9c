"""Evaluation: pass@k against enumeration, success by turn, intervals that are seeded, runs paired by task."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.runner.evaluate import bootstrap, compare, evaluate, pass_at_k, powers
from engine.schemas.generation import FinishReason
from engine.schemas.trajectory import Blame, Failure, Outcome, Trajectory, Turn


def episode(
    task: str,
    solved_at: int | None = None,
    turns: int = 1,
    reward: float = 0.0,
    blame: Blame | None = None,
    **names: float,
) -> Trajectory:
    failure = Failure(kind="broke", blame=blame, message="") if blame else None
    return Trajectory(
        run_id="r",
        episode_id=f"{task}/0",
        task_id=task,
        sample_index=0,
        seed=0,
        history="branch",
        outcome=Outcome(
            state="DONE",
            event="",
            solved=solved_at is not None,
            solved_turn=solved_at,
            reward=reward,
            rewards=names,
            failure=failure,
        ),
        messages=[],
        turns=[
            Turn(index=turn, branch=0, start=0, end=1, finish=FinishReason(type="stop"), event="answered")
            for turn in range(turns)
        ],
        branches=[],
        counts={"sampled_tokens": 10 * turns},
    )


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_solved_one(n: int, data: st.DataObject) -> None:
    solved, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([True] * solved + [False] * (n - solved), k))
    share = Fraction(sum(any(subset) for subset in subsets), len(subsets))
    assert pass_at_k(n, solved, k) == pytest.approx(float(share), abs=1e-12)
    assert share == 1 - Fraction(math.comb(n - solved, k), math.comb(n, k))


def test_pass_at_k_of_many_episodes_and_of_too_few() -> None:
    assert pass_at_k(10_000, 10, 1) == pytest.approx(0.001, rel=1e-12)
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5, rel=1e-9)
    assert math.isnan(pass_at_k(3, 1, 4))
    with pytest.raises(ValueError, match="4 solved of 3"):
        pass_at_k(3, 4, 1)
    assert [powers(most) for most in (0, 1, 4, 6)] == [[], [1], [1, 2, 4], [1, 2, 4, 6]]


TWO = [
    episode("a", 0, 1, 1.0, right=1.0),
    episode("a", 2, 3, 0.5, right=0.75, form=-0.25),
    episode("a", None, 2),
    episode("a", None, 2),
    episode("b", 1, 2, 1.0, right=1.0),
    episode("b", blame="user"),
    episode("b", blame="policy", turns=4),
]


def test_everything_that_an_evaluation_tells() -> None:
    found = evaluate(TWO)
    assert (found.tasks, found.episodes, dict(found.masked)) == (2, 6, {"failed: broke (user)": 1})
    values = {name: estimate.value for name, estimate in found.estimates.items()}
    assert values == {
        "success": 0.5,
        "reward": pytest.approx(2.5 / 6),
        "reward:form": pytest.approx(-0.25 / 6),
        "reward:right": pytest.approx(2.75 / 6),
        "turns": pytest.approx(14 / 6),
        "tokens": pytest.approx(140 / 6),
        "success@turn:0": pytest.approx(1 / 6),
        "success@turn:1": pytest.approx(2 / 6),
        "success@turn:2": 0.5,
        "pass@1": 0.5,
        "pass@2": pytest.approx((1 - 1 / 6 + 1.0) / 2),
        "pass@4": 1.0,
    }
    assert {name: estimate.tasks for name, estimate in found.estimates.items() if estimate.tasks != 2} == {"pass@4": 1}
    assert found.estimates["success"][1:3] == (0.5, 0.5)  # both tasks are solved half of the time
    assert found.estimates["pass@2"][1:3] == (pytest.approx(1 - 1 / 6), 1.0)


def test_intervals_are_the_same_for_the_same_seed_and_cover_what_they_say() -> None:
    many = [episode(f"t{n}", 0 if n % 4 else None, reward=math.sin(n)) for n in range(100)]
    first, same, other = (evaluate(many, seed=seed).estimates for seed in (1, 1, 2))
    assert first == same
    assert first["reward"] != other["reward"]
    one = first["success"]
    # 75 of 100: the normal interval is 0.75 ± 1.96 * sqrt(0.75 * 0.25 / 100)
    half = 1.96 * math.sqrt(0.75 * 0.25 / 100)
    assert one[1:3] == (pytest.approx(0.75 - half, abs=0.02), pytest.approx(0.75 + half, abs=0.02))


def test_a_tasks_episodes_are_resampled_together() -> None:
    """Ten copies of each episode tell no more than one."""
    few = [episode(f"t{n}", 0 if n % 2 else None) for n in range(20)]
    one, ten = evaluate(few).estimates["success"], evaluate(few * 10).estimates["success"]
    assert (ten.low, ten.high) == (one.low, one.high)


def test_of_a_single_task_its_episodes_are_resampled() -> None:
    found = evaluate([episode("a", 0 if n % 2 else None) for n in range(40)]).estimates
    assert found["success"].low == pytest.approx(0.35, abs=0.05)
    assert found["pass@2"].value == pytest.approx(1 - (20 * 19) / (40 * 39))
    assert math.isnan(found["pass@2"].low)
    assert found["pass@2"].plain()["low"] is None


def test_a_run_of_nothing_is_told_as_nothing() -> None:
    found = evaluate([episode("a", blame="environment")])
    assert (found.tasks, found.episodes, found.estimates, found.masked.total()) == (0, 0, {}, 1)


def test_resamples_without_anything_below_the_line_do_not_count() -> None:
    top, bottom = np.array([[1.0], [0.0]]), np.array([[1.0], [0.0]])
    assert [ends.tolist() for ends in bootstrap(top, bottom, seed=0, resamples=100)] == [[1.0], [1.0]]
    assert np.isnan(bootstrap(top, np.zeros((2, 1)), seed=0, resamples=100)).all()


def test_runs_are_paired_by_task() -> None:
    hard_and_easy = [0.0 if n % 2 else 10.0 for n in range(40)]
    first = [episode(f"t{n}", reward=base) for n, base in enumerate(hard_and_easy)]
    second = [episode(f"t{n}", reward=base + 1.0 + 0.1 * (n % 3)) for n, base in enumerate(hard_and_easy)]
    found = compare([*first, episode("x")], [*second, episode("y"), episode("z"), episode("t0", blame="tool")])
    assert (found.tasks, found.only_first, found.only_second, found.changed, found.masked) == (40, 1, 2, 0, (0, 1))
    reward = found.differences["reward"]
    assert (reward.first, reward.second) == (pytest.approx(5.0), pytest.approx(6.0975))
    assert reward.difference == pytest.approx(1.0975)
    assert reward.low == pytest.approx(1.07, abs=0.01)  # unpaired it would be about 1.0975 ± 2.2
    assert reward.high == pytest.approx(1.12, abs=0.01)
    assert found.differences["success"][:3] == (0.0, 0.0, 0.0)


def test_runs_are_held_against_each_other_by_turn_and_by_k_too() -> None:
    first = [episode(f"t{n}", turn) for n in range(2) for turn in (0, None, None)]
    second = [episode(f"t{n}", turn) for n in range(2) for turn in (1, 0, None, None)]
    found = compare(first, second).differences
    assert {name: found[name][:3] for name in found if "@" in name} == {
        "success@turn:0": (pytest.approx(1 / 3), 0.25, pytest.approx(-1 / 12)),
        "success@turn:1": (pytest.approx(1 / 3), 0.5, pytest.approx(1 / 6)),
        "pass@2": (pytest.approx(2 / 3), pytest.approx(5 / 6), pytest.approx(1 / 6)),
        "pass@3": (1.0, 1.0, 0.0),
    }


def test_tasks_that_are_not_the_same_are_left_out() -> None:
    runs: Sequence[list[Trajectory]] = ([episode("a"), episode("b", 0)], [episode("a", 0), episode("b", 0)])
    found = compare(*runs, lambda task: task != "b")
    assert (found.tasks, found.changed) == (1, 1)
    assert found.differences["success"][:3] == (0.0, 1.0, 1.0)
    assert found.differences["success"].plain()["low"] is None
    assert compare(*runs, lambda task: False).differences == {}


async def test_the_turn_that_solved_it_is_written_down(
    make_spec: Callable[..., Path], run_spec: Callable[..., Any]
) -> None:
    ran = await run_spec(make_spec(["It is 40.", "It is 41.", "It is 42."]))
    assert (ran.only.outcome.solved, ran.only.outcome.solved_turn) == (True, 2)
    never = await run_spec(make_spec(["It is 40."] * 3, limits={"user_turns": 2}))
    assert (never.only.outcome.solved, never.only.outcome.solved_turn) == (False, None)
