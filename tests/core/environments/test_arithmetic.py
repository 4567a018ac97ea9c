"""The arithmetic environment: problems are a pure function of their seed, and the teacher reads only the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.environments.arithmetic import Arithmetic, Teacher, problems
from engine.environments.tools.calculator import calculate
from engine.schemas.environment import Environment, EpisodeView, Task, User, UserTurn
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent

TASK = Task(id="t", index=0, fields={"question": "What is 6 * 8 + 5?", "expression": "6 * 8 + 5", "answer": "53"})


View = Callable[..., EpisodeView]

EXPECTED = [
    ("sum-0-0000", "What is 15 * 8 + 5?", "15 * 8 + 5", "125"),
    ("sum-0-0001", "What is 7 + 11 * 6?", "7 + 11 * 6", "73"),
    ("sum-0-0002", "What is 11 * 5 - 4?", "11 * 5 - 4", "51"),
]


def test_they_fit_their_protocols() -> None:
    assert isinstance(Arithmetic(), Environment)
    assert isinstance(Teacher(), User)


def test_the_first_problems_of_seed_0_stay_what_they_are() -> None:
    assert [(row["id"], row["question"], row["expression"], row["answer"]) for row in problems(3, seed=0)] == EXPECTED


@given(st.integers(0, 10**9), st.integers(0, 30), st.floats(0, 1))
def test_problems_depend_on_their_arguments_alone(seed: int, count: int, stories: float) -> None:
    rows = list(problems(count, seed, stories))
    assert rows == list(problems(count, seed, stories))
    assert rows == list(problems(count + 5, seed, stories))[:count]
    assert len({row["id"] for row in rows}) == count
    for row in rows:
        assert calculate(row["expression"]) == row["answer"]
        assert "{" not in row["question"]


@given(st.integers(0, 10**6))
def test_a_question_names_every_number_of_its_expression(seed: int) -> None:
    for row in problems(5, seed):
        numbers = Counter("".join(c if c.isdigit() else " " for c in row["expression"]).split())
        asked = Counter("".join(c if c.isdigit() else " " for c in row["question"]).split())
        assert numbers == asked


def test_stories_sets_the_part_that_is_told() -> None:
    assert all(row["question"].startswith("What is ") for row in problems(50, stories=0.0))
    assert not any(row["question"].startswith("What is ") for row in problems(50, stories=1.0))


def test_the_environment_asks_the_question_and_keeps_the_rest() -> None:
    reset = Arithmetic().reset(TASK, seed=0)
    assert reset.messages == [Message(role="user", content="What is 6 * 8 + 5?")]
    assert reset.facts == {}


@pytest.mark.parametrize("field", ["question", "expression", "answer"])
def test_a_task_without_a_field_is_refused_by_name(field: str) -> None:
    fields = {key: value for key, value in TASK.fields.items() if key != field}
    with pytest.raises(ValueError, match=f"task 'x' has no field '{field}'"):
        Arithmetic().reset(Task(id="x", index=0, fields=fields), seed=0)


def test_the_right_answer_satisfies(view: View) -> None:
    assert Teacher().respond(view(TASK, "The answer is 53.")) == UserTurn(
        satisfied=True, solved=True, rewards=[RewardEvent(name="correct", value=1.0, cause="right answer")]
    )


def test_a_wrong_answer_is_told_the_sum(view: View) -> None:
    assert Teacher().respond(view(TASK, "The answer is 48.")) == UserTurn(content="That is wrong. What is 6 * 8 + 5?")


def test_hints_run_out(view: View) -> None:
    assert Teacher(hints=1).respond(view(TASK, "The answer is 1.", "The answer is 48.")) == UserTurn(
        content="That is wrong. Try again."
    )


def test_a_reply_without_an_answer_costs(view: View) -> None:
    assert Teacher(unreadable=-0.5).respond(view(TASK, "Let me think.")) == UserTurn(
        content="I see no answer. What is 6 * 8 + 5?",
        rewards=[RewardEvent(name="format", value=-0.5, cause="no readable answer")],
    )


@given(words=st.text(alphabet=st.characters(exclude_characters="35"), max_size=80))
def test_only_the_models_own_words_can_solve(view: View, words: str) -> None:
    assert not Teacher().respond(view(TASK, words, words)).solved
