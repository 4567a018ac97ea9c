"""Small arithmetic problems with a teacher, easy enough for a model with 100 million parameters.

`problems` makes the tasks, `Arithmetic` asks the question, `Teacher` judges the reply and gives hints. The
model should use a calculator and then write `The answer is N`.

Invariant: a problem's text and answer are a pure function of (count, seed), and the answer is computed from
the expression that the hint shows, so the two cannot disagree.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from engine.environments.answers import STYLES, final_number
from engine.environments.tools.calculator import calculate, evaluate
from engine.schemas.environment import EpisodeView, Reset, Task, UserTurn
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent

_SUMS = (
    ("What is {a} + {b} * {c}?", "{a} + {b} * {c}"),
    ("What is {a} * {b} - {c}?", "{a} * {b} - {c}"),
    ("What is {a} * {b} + {c}?", "{a} * {b} + {c}"),
    ("What is ({a} + {b}) * {c}?", "({a} + {b}) * {c}"),
)
"""Texts with the fields {name}, {thing} and the numbers {a}, {b}, {c}, and the expressions that they ask for."""
_STORIES = (
    ("{name} has {a} {thing} and gets {b} more. How many {thing} are there?", "{a} + {b}"),
    ("{name} has {a} boxes with {b} {thing} in each. How many {thing} are there?", "{a} * {b}"),
    ("{name} has {a} boxes with {b} {thing} in each and {c} more. How many {thing} are there?", "{a} * {b} + {c}"),
    ("{name} has {a} bags of {b} {thing} and gives away {c}. How many {thing} are left?", "{a} * {b} - {c}"),
)
"""The same as stories."""
_NAMES = ("Ann", "Ben", "Cara", "Dan", "Eva", "Finn", "Gita", "Hugo")
_THINGS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps")


def problems(count: int = 32, seed: int = 0, stories: float = 0.5, largest: int = 19) -> Iterator[dict[str, Any]]:
    """Rows with `id`, `question`, `expression` and `answer`, the same for the same arguments.

    Args:
        count: How many.
        seed: Seeds the choice of shapes and numbers.
        stories: The fraction of problems, from 0 to 1, that are stories instead of sums.
        largest: The largest number in a problem, at least 3; the third number is at most 9.
    """
    rng = random.Random(f"arithmetic/{seed}")
    for index in range(count):
        text, asked = rng.choice(_STORIES if rng.random() < stories else _SUMS)
        fields = {
            "a": rng.randint(3, largest),
            "b": rng.randint(3, largest),
            "c": rng.randint(2, min(9, largest)),
            "name": rng.choice(_NAMES),
            "thing": rng.choice(_THINGS),
        }
        expression = asked.format(**fields)
        yield {
            "id": f"sum-{seed}-{index:04d}",
            "question": text.format(**fields),
            "expression": expression,
            "answer": calculate(expression),
        }


class Arithmetic:
    """Asks a task's question. The model sees neither the answer nor, before a hint, the expression."""

    def reset(self, task: Task, seed: int) -> Reset:
        """The question, as the user's first message."""
        for field in ("question", "expression", "answer"):
            if field not in task.fields:
                raise ValueError(
                    f"task {task.id!r} has no field {field!r}; `engine.environments.arithmetic:problems` makes "
                    "rows with all fields"
                )
        return Reset(messages=[Message(role="user", content=str(task.fields["question"]))])


class Teacher:
    """Judges each answer, and shows the expression if the answer is wrong or missing.

    Args:
        correct: Reward `correct` of the turn that gives the right answer.
        unreadable: Reward `format` of a turn in which no answer can be found.
        hints: How many times the expression is shown. Later messages only say that the answer is wrong or missing.
    """

    def __init__(self, correct: float = 1.0, unreadable: float = -0.1, hints: int = 8) -> None:
        self._correct = correct
        self._unreadable = unreadable
        self._hints = hints

    def respond(self, view: EpisodeView) -> UserTurn:
        """Satisfied with the right answer; otherwise a hint. Reads only the model's own text."""
        expression = str(view.task.fields["expression"])
        hint = f"What is {expression}?" if view.user_turn < self._hints else "Try again."
        answer = final_number(view.reply, STYLES)
        if answer is None:
            return UserTurn(
                content=f"I see no answer. {hint}",
                rewards=[RewardEvent(name="format", value=self._unreadable, cause="no readable answer")],
            )
        if answer.value != evaluate(expression):
            return UserTurn(content=f"That is wrong. {hint}")
        return UserTurn(
            satisfied=True,
            solved=True,
            rewards=[RewardEvent(name="correct", value=self._correct, cause="right answer")],
        )
