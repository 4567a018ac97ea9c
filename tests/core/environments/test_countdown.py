"""Countdown: problems can be solved, and only an expression over exactly the given numbers is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.environments.countdown import Countdown, judge, problems
from engine.schemas.environment import Environment, EpisodeView, Step, Task
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent

View = Callable[..., EpisodeView]
TASK = Task(id="t", index=0, fields={"numbers": [4, 20, 12, 5], "target": 192})
FORM = RewardEvent(name="form", value=0.1, cause="an expression with the given numbers")


def test_problems_are_the_same_for_the_same_arguments() -> None:
    assert list(problems(2)) == [
        {"id": "countdown-0-0000", "numbers": [4, 20, 12, 5], "target": 192, "solution": "4 * ((20 * 12) / 5)"},
        {"id": "countdown-0-0001", "numbers": [14, 15, 23, 2], "target": 176, "solution": "((14 / 2) * 23) + 15"},
    ]


@settings(deadline=None, max_examples=examples(25))
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(4, 100), st.booleans())
def test_every_problem_has_a_solution(seed: int, numbers: int, most: int, held_out: bool) -> None:
    for row in problems(3, seed, numbers, most, held_out):
        reply = f"<answer>{row['solution']}</answer>"
        assert judge(reply, row["numbers"], row["target"]) == (True, True, "")


def test_no_problem_is_both_trained_on_and_held_out() -> None:
    def keys(held_out: bool) -> set[tuple[object, ...]]:
        rows = problems(200, numbers=2, most=9, held_out=held_out)
        return {(*sorted(row["numbers"]), row["target"]) for row in rows}

    assert min(len(keys(True)), len(keys(False))) > 10
    assert not keys(True) & keys(False)


@pytest.mark.parametrize(
    ("reply", "readable", "words"),
    [
        ("4 * 20 * 12 / 5", False, "There is no <answer>."),
        ("<answer>4 * 20 + 12 * 5</answer>", True, "4 * 20 + 12 * 5 = 140, not 192."),
        ("<answer>4 * 20 * 12 / 5</answer><answer>4 + 20 + 12 / 5</answer>", True, "4 + 20 + 12 / 5 = 26.4, not 192."),
        ("<answer>192</answer>", False, "Use each number exactly once: 192 is not among the numbers."),
        ("<answer>4 * 20 * 12</answer>", False, "Use each number exactly once: 5 is not used."),
        (
            "<answer>4 * 20 * 12 / 5 + 4 - 4</answer>",
            False,
            "Use each number exactly once: 4 is used 3 times, and given 1 times.",
        ),
        ("<answer>420 * 12 / 5</answer>", False, "Use each number exactly once: 420 is not among the numbers."),
        ("<answer>4 ** 20 * 12 / 5</answer>", False, "Write one expression with numbers, + - * / and parentheses."),
        ("<answer>4 // 20 * 12 / 5</answer>", False, "Write one expression with numbers, + - * / and parentheses."),
        ("<answer>__import__('os')</answer>", False, "Write one expression with numbers, + - * / and parentheses."),
        (f"<answer>{'(' * 300}</answer>", False, "Write one expression with numbers, + - * / and parentheses."),
        ("<answer></answer>", False, "Write one expression with numbers, + - * / and parentheses."),
    ],
)
def test_what_is_said_of_a_wrong_expression(reply: str, readable: bool, words: str) -> None:
    assert judge(reply, [4, 20, 12, 5], 192) == (readable, False, words)


@settings(deadline=None, max_examples=examples(100))
@given(st.text(alphabet="0123456789+-*/() ", max_size=40))
def test_no_text_makes_the_judge_raise(text: str) -> None:
    judge(f"<answer>{text}</answer>", [4, 20, 12, 5], 192)


def test_the_form_is_paid_once(view: View) -> None:
    game = Countdown()
    assert isinstance(game, Environment)
    facts = game.reset(TASK, 0).facts
    one = game.step(view(TASK, "<answer>4 + 20 + 12 + 5</answer>", facts=facts))
    assert one == Step(
        event="retry",
        messages=[Message(role="user", content="4 + 20 + 12 + 5 = 41, not 192. Try again.")],
        rewards=[FORM],
        facts={"tries": 1, "in_form": True, "solved": False},
    )
    assert game.step(view(TASK, "x", "<answer>4 * 12 * 20 / 5</answer>", facts=one.facts)) == Step(
        event="done",
        rewards=[RewardEvent(name="correct", value=1.0, cause="right at try 2")],
        facts={"tries": 2, "in_form": True, "solved": True},
    )


@pytest.mark.parametrize("fields", [{}, {"numbers": [], "target": 1}, {"numbers": [1], "target": True}, {"numbers": [-1], "target": 1}])  # fmt: skip
def test_a_task_without_whole_numbers_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="write a list of whole numbers and a whole number"):
        Countdown().reset(Task(id="t", index=0, fields=fields), 0)


@pytest.mark.parametrize("changes", [{"numbers": 1}, {"numbers": 7}, {"most": 3}])
def test_problems_that_cannot_be_made_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="write numbers from 2 to 6 and most from 4"):
        list(problems(1, **changes))
    with pytest.raises(ValueError, match="tries is 0"):
        Countdown(tries=0)
