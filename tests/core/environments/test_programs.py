"""Questions that need a program: answers are those of the stated numbers, and only the model's own words are graded."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from engine.environments.programs import Programs, problems
from engine.schemas.environment import Environment, EpisodeView, Task

View = Callable[..., EpisodeView]
TASK = Task(id="t", index=0, fields={"question": "How many?", "answer": 25})


def test_problems_are_the_same_for_the_same_arguments() -> None:
    assert list(problems(40)) == list(problems(40))
    trained, held_out = ({row["question"] for row in problems(100, most=200, held_out=kept)} for kept in (False, True))
    assert min(len(trained), len(held_out)) > 30
    assert not trained & held_out


@pytest.mark.parametrize(
    ("beginning", "solve"),
    [
        ("How many whole numbers from 1", lambda _, n, a, b: len([x for x in range(1, n + 1) if bool(x % a) != bool(x % b)])),
        ("What is the sum of the decimal", lambda a, _, b: sum(map(int, str(a**20 * a**b)))),
        ("How many prime", lambda n: len(set(range(2, n)) - {x * y for x in range(2, n) for y in range(2, n // x + 1)})),
        ("In how many ways", lambda n, _, a, __, b: sum((n - a * b * big) // a + 1 for big in range(n // (a * b) + 1))),
        ("What is the sum of x", lambda a, _, n: sum(x**2 % a for x in range(n + 1))),
    ],
)  # fmt: skip
def test_answers_are_those_of_the_stated_numbers(beginning: str, solve: Callable[..., int]) -> None:
    rows = [row for row in problems(80, most=300) if row["question"].startswith(beginning)]
    assert rows
    for row in rows:
        numbers = [int(number) for number in re.findall(r"\d+", row["question"])]
        assert row["answer"] == solve(*numbers), row


@pytest.mark.parametrize(
    ("reply", "rewards", "solved"),
    [
        ("<answer>25</answer>", ["form", "correct"], True),
        ("<answer>24</answer>", ["form"], False),
        ("<answer>24 or 25</answer>", [], False),
        ("25", [], False),
    ],
)
def test_the_number_in_tags_is_graded(view: View, reply: str, rewards: list[str], solved: bool) -> None:
    env = Programs()
    assert isinstance(env, Environment)
    step = env.step(view(TASK, reply))
    assert ([reward.name for reward in step.rewards], step.facts) == (rewards, {"solved": solved})


@pytest.mark.parametrize(
    "fields", [{}, {"question": "a"}, {"question": "a", "answer": "25"}, {"question": 1, "answer": 1}]
)
def test_a_task_that_is_not_whole_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="write a text and a whole number"):
        Programs().reset(Task(id="t", index=0, fields=fields), 0)
    with pytest.raises(ValueError, match="most is 99"):
        list(problems(1, most=99))
