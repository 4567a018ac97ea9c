"""Evaluation: pass@k against enumeration, success by turn, intervals over tasks, runs paired by task."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple
from slow_cases import slow_after

from engine.plugins.evaluation.measures import MeasureDifference, by_task, collect, differences, evaluate, pass_at_k
from engine.plugins.evaluation.spec import powers
from engine.schemas.generation import FinishReason
from engine.schemas.trajectory import Blame, Failure, Outcome, Trajectory, Turn


def between(first: list[Trajectory], second: list[Trajectory]) -> dict[str, MeasureDifference]:
    """The differences over the tasks that both runs have, by measure."""
    left, right = (by_task(collect(run)[0]) for run in (first, second))
    return {row.name: row for row in differences(left, right, [task for task in left if task in right])}


def ends_of(row: MeasureDifference) -> tuple[float, float, float]:
    return row.first, row.second, row.difference


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
    third = pytest.approx
    assert values == {  # means of the two tasks' means: `a` has four episodes, `b` two
        "success": third((2 / 4 + 1 / 2) / 2),
        "reward": third((1.5 / 4 + 1.0 / 2) / 2),
        "reward:form": third(-0.25 / 4 / 2),
        "reward:right": third((1.75 / 4 + 1.0 / 2) / 2),
        "turns": third((8 / 4 + 6 / 2) / 2),
        "tokens": third(10 * (8 / 4 + 6 / 2) / 2),
        "success@turn:0": third((1 / 4 + 0) / 2),
        "success@turn:1": third((1 / 4 + 1 / 2) / 2),
        "success@turn:2": 0.5,
        "pass@1": 0.5,
        "pass@2": third((1 - 1 / 6 + 1.0) / 2),
        "pass@4": 1.0,
    }
    assert {name: estimate.tasks for name, estimate in found.estimates.items() if estimate.tasks != 2} == {"pass@4": 1}
    turns = found.estimates["turns"]
    half = 12.706204736174707 * math.sqrt(0.5) / math.sqrt(2)  # t of one degree of freedom; task means 2 and 3
    assert (turns.low, turns.high) == (third(2.5 - half), third(2.5 + half))
    assert "only 2 tasks" in str(found.warning)


@pytest.mark.parametrize("seed", slow_after(5, range(20)))
def test_eval_and_compare_average_in_one_way(seed: int) -> None:
    """Also where tasks have different numbers of episodes, because some failed through no fault of the policy's."""
    random = np.random.default_rng(seed)

    def run() -> list[Trajectory]:
        return [
            episode(
                f"t{task}",
                int(random.integers(3)) if random.random() < 0.5 else None,
                3,
                float(random.normal()),
                "user" if random.random() < 0.3 and number else None,
                right=float(random.random() < 0.5),
            )
            for task in range(6)
            for number in range(4)
        ]

    first, second = run(), run()
    found = between(first, second)
    for run_, place in ((first, 0), (second, 1)):
        for name, estimate in evaluate(run_).estimates.items():
            if name in found and not name.startswith("pass@"):
                assert ends_of(found[name])[place] == estimate.value, name
    assert {"success", "pass@1", "reward", "reward:right", "turns", "tokens", "success@turn:2"} <= found.keys()


def test_ten_copies_of_each_episode_do_not_narrow_an_interval_much() -> None:
    few = [episode(f"t{n}", 0 if n % 2 else None, reward=math.sin(n)) for n in range(20)]
    one, ten = evaluate(few).estimates, evaluate(few * 10).estimates
    assert astuple(ten["reward"])[:3] == pytest.approx(astuple(one["reward"])[:3])
    assert (ten["success"].low, ten["success"].high) == pytest.approx(
        (one["success"].low, one["success"].high), abs=0.02
    )


def test_of_a_single_task_the_interval_is_over_its_episodes() -> None:
    found = evaluate([episode("a", 0 if n % 2 else None) for n in range(40)])
    assert astuple(found.estimates["success"])[1:3] == (
        pytest.approx(0.3380, abs=1e-4),
        pytest.approx(0.6620, abs=1e-4),
    )
    assert found.estimates["pass@2"].value == pytest.approx(1 - (20 * 19) / (40 * 39))
    assert math.isnan(found.estimates["pass@2"].low)
    assert found.estimates["pass@2"].plain()["low"] is None
    assert "nothing about other tasks" in str(found.warning)
    assert evaluate([episode(f"t{n}") for n in range(10)]).warning is None


def test_a_run_of_nothing_is_told_as_nothing() -> None:
    found = evaluate([episode("a", blame="environment")])
    assert (found.tasks, found.episodes, found.estimates, found.masked.total()) == (0, 0, {}, 1)


def test_runs_are_paired_by_task() -> None:
    hard_and_easy = [0.0 if n % 2 else 10.0 for n in range(40)]
    first = [episode(f"t{n}", reward=base) for n, base in enumerate(hard_and_easy)]
    second = [episode(f"t{n}", reward=base + 1.0 + 0.1 * (n % 3)) for n, base in enumerate(hard_and_easy)]
    found = between([*first, episode("x")], [*second, episode("y"), episode("z"), episode("t0", blame="tool")])
    reward = found["reward"]
    assert (reward.first, reward.second) == (pytest.approx(5.0), pytest.approx(6.0975))
    assert reward.difference == pytest.approx(1.0975)
    assert reward.low == pytest.approx(1.07, abs=0.01)  # unpaired it would be about 1.0975 ± 2.2
    assert reward.high == pytest.approx(1.12, abs=0.01)
    assert ends_of(found["success"]) == (0.0, 0.0, 0.0)


def test_runs_are_held_against_each_other_by_turn_and_by_k_too() -> None:
    first = [episode(f"t{n}", turn) for n in range(2) for turn in (0, None, None)]
    second = [episode(f"t{n}", turn) for n in range(2) for turn in (1, 0, None, None)]
    found = between(first, second)
    assert {name: ends_of(found[name]) for name in found if "@" in name} == {
        "success@turn:0": (pytest.approx(1 / 3), 0.25, pytest.approx(-1 / 12)),
        "success@turn:1": (pytest.approx(1 / 3), 0.5, pytest.approx(1 / 6)),
        "pass@1": (pytest.approx(1 / 3), 0.5, pytest.approx(1 / 6)),
        "pass@2": (pytest.approx(2 / 3), pytest.approx(5 / 6), pytest.approx(1 / 6)),
        "pass@3": (1.0, 1.0, 0.0),
    }


def test_one_task_has_no_interval_and_none_no_measure() -> None:
    first, second = by_task(collect([episode("a")])[0]), by_task(collect([episode("a", 0)])[0])
    success = differences(first, second, ["a"])[0]
    assert (success.name, ends_of(success), success.low) == ("success", (0.0, 1.0, 1.0), None)
    assert differences(first, second, []) == []
