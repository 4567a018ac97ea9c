"""Sums with a coach: kept apart from held-out ones, judged in one form, helped without the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.environments.sums import Coach, problems
from engine.schemas.environment import EpisodeView, Task, User, UserTurn
from engine.schemas.reward import RewardEvent

View = Callable[..., EpisodeView]
SUM = Task(id="sum", index=0, fields={"question": "7 + 8", "expression": "7 + 8", "answer": 15})


def test_problems_are_the_same_for_the_same_arguments() -> None:
    assert list(problems(2, seed=3)) == [
        {"id": "sum-3-0000", "question": "1 + 19", "expression": "1 + 19", "answer": 20},
        {"id": "sum-3-0001", "question": "17 + 13", "expression": "17 + 13", "answer": 30},
    ]


def test_no_sum_is_both_trained_on_and_held_out() -> None:
    trained = {row["question"] for row in problems(4000, most=9)}
    held_out = {row["question"] for row in problems(1000, most=9, held_out=True)}
    assert (len(trained), len(held_out), trained & held_out) == (64, 17, set())


@given(st.integers(0, 20), st.integers(5, 20), st.booleans())
def test_numbers_are_in_their_bounds_and_answers_are_right(least: int, more: int, held_out: bool) -> None:
    for row in problems(20, least=least, most=least + more, held_out=held_out):
        one, other = map(int, row["question"].split(" + "))
        assert least <= min(one, other) <= max(one, other) <= least + more
        assert row["answer"] == one + other


@pytest.mark.parametrize(("least", "most"), [(-1, 9), (9, 1)])
def test_bounds_without_a_sum_are_refused(least: int, most: int) -> None:
    with pytest.raises(ValueError, match=f"no sums of numbers from {least} to {most}"):
        list(problems(1, least=least, most=most))


def reward(name: str, value: float, cause: str) -> RewardEvent:
    return RewardEvent(name=name, value=value, cause=cause)


FORM = reward("form", 0.1, "an answer in tags")


@pytest.mark.parametrize(
    ("replies", "changes", "answer"),
    [
        (
            ["<answer>15</answer>"],
            {},
            UserTurn(
                satisfied=True,
                solved=True,
                rewards=[FORM, reward("correct", 0.9, "right at try 1")],
                facts={"in_form": True},
            ),
        ),
        (
            ["<answer>9</answer>"],
            {},
            UserTurn(content="9 is too low.", rewards=[FORM], facts={"in_form": True}),
        ),
        (
            ["<answer>15.5</answer>"],
            {},
            UserTurn(content="15.5 is too high.", rewards=[FORM], facts={"in_form": True}),
        ),
        (
            ["The answer is 15."],
            {},
            UserTurn(content="Write <answer>number</answer>.", facts={"in_form": False}),
        ),
        (
            ["15", "<answer>7 + 8 = 15</answer>"],
            {"facts": {"in_form": False}},
            UserTurn(
                satisfied=True,
                solved=True,
                rewards=[FORM, reward("correct", 0.4, "right at try 2")],
                facts={"in_form": True},
            ),
        ),
        (
            ["<answer>9</answer>", "<answer>10</answer>"],
            {"facts": {"in_form": True}},
            UserTurn(satisfied=True, content="10 is too low.", facts={"in_form": True}),
        ),
    ],
    ids=["right", "too low", "too high", "another form", "right at last", "wrong at last"],
)
def test_what_the_coach_says_and_pays(
    view: View, replies: list[str], changes: dict[str, Any], answer: UserTurn
) -> None:
    said = Coach().respond(view(SUM, *replies, **changes))
    assert said == (answer if not answer.satisfied else answer.model_copy(update={"content": said.content}))
    assert "15" not in said.content.replace("15.5", "")


def test_it_is_a_user_with_at_least_one_try() -> None:
    assert isinstance(Coach(), User)
    with pytest.raises(ValueError, match="tries is 0"):
        Coach(tries=0)


@pytest.mark.parametrize("answer", [None, "15", True, 15.0])
def test_a_task_must_have_a_whole_number(view: View, answer: object) -> None:
    with pytest.raises(ValueError, match=r"write a whole number, as `engine.environments.sums:problems` does"):
        Coach().respond(view(Task(id="t", index=0, fields={"answer": answer}), "15"))
