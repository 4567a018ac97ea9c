"""Users that ship: they say what is due, grade the model's words alone, and keep nothing between answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.environments.users.attempts import SECOND_LOOK, WRONG, Attempts
from engine.environments.users.scripted import Scripted
from engine.schemas.environment import EpisodeView, Task, User, UserTurn
from engine.schemas.reward import RewardEvent

View = Callable[..., EpisodeView]
SUM = Task(id="t", index=0, fields={"question": "48 + 24?", "answer": "48 + 24 = <<48+24=72>>\n#### 72"})
HALF = Task(id="h", index=0, fields={"question": "Half?", "answer": r"\frac{1}{2}"})


def test_they_fit_their_protocol() -> None:
    assert isinstance(Scripted(["a"]), User)
    assert isinstance(Attempts(), User)


@pytest.mark.parametrize(
    ("after", "said"), [("satisfied", ["a", "b", "", ""]), ("repeat", ["a", "b", "b", "b"]), ("cycle", ["a", "b", "a", "b"])]
)  # fmt: skip
def test_lines_are_said_in_order(view: View, after: Any, said: list[str]) -> None:
    user = Scripted(["a", {"content": "b", "rewards": [{"value": 0.5}]}], after=after)
    turns = [user.respond(view(SUM, "x", user_turn=at)) for at in range(4)]
    assert [turn.content for turn in turns] == said
    assert [turn.satisfied for turn in turns] == [not words for words in said]
    assert turns[1].rewards == [RewardEvent(value=0.5)]


def test_a_task_may_bring_its_own_lines(view: View) -> None:
    task = Task(id="t", index=0, fields={"lines": ["Hello."]})
    assert Scripted(field="lines").respond(view(task, "x", user_turn=0)) == UserTurn(content="Hello.")
    with pytest.raises(ValueError, match="the field 'lines' must be a list of lines"):
        Scripted(field="lines").respond(view(SUM, "x"))


@pytest.mark.parametrize("arguments", [{}, {"lines": ["a"], "field": "b"}, {"lines": ["a"], "after": "never"}])
def test_a_script_is_given_once(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"lines|after"):
        Scripted(**arguments)


def test_attempts_go_on_until_one_is_right(view: View) -> None:
    user = Attempts()
    assert user.respond(view(SUM, "The answer is 71.")) == UserTurn(
        content=WRONG,
        recover="wrong",
        fields={"found": "71 is wrong", "attempt": 1},
        facts={"attempt": 1, "right": False},
    )
    assert user.respond(view(SUM, "The answer is 71.", "Hm.")).recover == "no_answer"
    assert user.respond(view(SUM, "Hm.", "Hm.", "The answer is 72.")) == UserTurn(
        satisfied=True,
        solved=True,
        rewards=[RewardEvent(name="correct", value=1.0, cause="attempt 3: 72 is right")],
        facts={"attempt": 3, "right": True},
    )


def test_the_last_attempt_is_the_last(view: View) -> None:
    turn = Attempts(attempts=2, miss=-1.0).respond(view(SUM, "Hm.", "The answer is 1."))
    assert (turn.satisfied, turn.solved) == (True, False)
    assert turn.rewards == [RewardEvent(name="correct", value=-1.0, cause="attempt 2: 1 is wrong")]


def test_counted_attempts_do_not_say_which_were_right(view: View) -> None:
    user = Attempts(until="counted", attempts=2)
    first = [user.respond(view(SUM, said)) for said in ("The answer is 72.", "The answer is 1.", "Hm.")]
    assert [turn.content for turn in first] == [SECOND_LOOK] * 3
    assert [(turn.recover, turn.satisfied, turn.solved) for turn in first] == [(None, False, False)] * 3
    assert [sum(event.value or 0.0 for event in turn.rewards) for turn in first] == [1.0, 0.0, 0.0]
    second = user.respond(view(SUM, "The answer is 1.", "The answer is 72."))
    assert (second.satisfied, second.solved, len(second.rewards)) == (True, True, 1)
    spoilt = user.respond(view(SUM, "The answer is 72.", "The answer is 1."))
    assert (spoilt.satisfied, spoilt.solved, spoilt.rewards) == (True, False, [])


@pytest.mark.parametrize(
    ("grade", "task", "right", "wrong"),
    [
        ("number", SUM, "So the answer is 72.", "The answer is 72 or 73."),
        ("math", HALF, r"It is \boxed{0.5}.", r"It is \boxed{\frac{1}{3}}."),
        ("exact", HALF, r" \frac{1}{2} ", "0.5"),
    ],
)
def test_there_are_three_ways_to_grade(view: View, grade: Any, task: Task, right: str, wrong: str) -> None:
    user = Attempts(grade=grade)
    assert user.respond(view(task, right)).solved
    assert not user.respond(view(task, wrong)).solved


def test_a_reply_that_was_cut_off_is_not_right(view: View) -> None:
    assert not Attempts().respond(view(SUM, "The answer is 72.", finish="length")).solved


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"grade": "taste"}, "number, math, exact"),
        ({"until": "never"}, "right or counted"),
        ({"until": "counted"}, "needs `attempts`"),
        ({"attempts": 0}, "at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Attempts(**arguments)
