"""The math-verify scorer: equal answers are equal however they are written."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.environments.scorers import check_answer, math_verify
from engine.schemas.environment import EpisodeView, Task
from engine.schemas.reward import RewardEvent

View = Callable[..., EpisodeView]
HALF = Task(id="h", index=0, fields={"question": "Half?", "answer": r"\frac{1}{2}"})


@pytest.mark.parametrize(
    ("gold", "reply", "right", "found"),
    [
        ("1/2", r"so \boxed{\frac{1}{2}}", True, r"\frac{1}{2} is right"),
        ("1/2", "The answer is 0.5", True, "0.5 is right"),
        ("48 + 24\n#### 1,200", "It is $1200$", True, "1200 is right"),
        ("72", "I said 71, but <answer>72</answer>", True, "72 is right"),
        (r"(1,2]", r"$(1,2]$", True, "(1,2] is right"),
        (r"(1,2]", r"$(1,2)$", False, "(1,2) is wrong"),
        ("x=3", r"\boxed{3}", True, "3 is right"),
        ("72", "I think 71", False, "71 is wrong"),
        ("72", "no", False, "no answer found"),
    ],
)
def test_answers_are_compared_as_mathematics(gold: str, reply: str, right: bool, found: str) -> None:
    assert check_answer(gold, reply) == (right, found)


def test_a_right_answer_that_cannot_be_read_is_the_tasks_fault() -> None:
    with pytest.raises(ValueError, match="cannot be read as mathematics"):
        check_answer("", "5")


def test_the_last_reply_is_graded_or_each(view: View) -> None:
    seen = view(HALF, r"\boxed{1/3}", r"\boxed{0.5}")
    right = RewardEvent(turn=1, name="correct", value=1.0, cause=r"\frac{1}{2} is right")
    assert math_verify(seen) == [right]
    assert math_verify(seen, turns="each") == [right]
    each = math_verify(seen, turns="each", wrong=-1.0, name="math")
    assert [(event.turn, event.name, event.value) for event in each] == [(0, "math", -1.0), (1, "math", 1.0)]


def test_what_others_said_is_not_graded(view: View) -> None:
    assert math_verify(view(Task(id="t", index=0, fields={"answer": "72"}), "I do not know.")) == []


def test_a_task_needs_the_field(view: View) -> None:
    with pytest.raises(ValueError, match="has no field 'gold'"):
        math_verify(view(HALF, "1"), answer="gold")
