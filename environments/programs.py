"""Questions whose answer needs a program: the model runs Python with a tool and answers with a number in `<answer>`
tags.

`problems` makes the tasks, `Programs` asks and grades. The tool is `engine.plugins.confinement.sandbox:Python`, which
the spec names beside it.

Invariant: a problem is a pure function of its arguments, and its answer is computed here, from the numbers that the
question states.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from engine.environments.answers import final_number
from engine.schemas.environment import EpisodeView, Reset, Step, Task
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent

HELD_OUT = 5
"""One question in this many is held out."""


def _collatz(n: int, a: int, b: int) -> int:
    steps = 0
    while n != 1:
        n, steps = n // 2 if n % 2 == 0 else 3 * n + 1, steps + 1
    return steps


def _coins(n: int, a: int, b: int) -> int:
    ways = [1] + [0] * n
    for coin in (1, a, a * b):
        for amount in range(coin, n + 1):
            ways[amount] += ways[amount - coin]
    return ways[n]


_QUESTIONS: tuple[tuple[str, Callable[[int, int, int], int]], ...] = (
    (
        "How many whole numbers from 1 to {n} are divisible by {a} or by {b}, but not by both?",
        lambda n, a, b: sum((number % a == 0) != (number % b == 0) for number in range(1, n + 1)),
    ),
    (
        "What is the sum of the decimal digits of {a} to the power of 20 + {b}?",
        lambda n, a, b: sum(int(digit) for digit in str(a ** (20 + b))),
    ),
    (
        "How many prime numbers are smaller than {n}?",
        lambda n, a, b: sum(
            all(number % divisor for divisor in range(2, int(number**0.5) + 1)) for number in range(2, n)
        ),
    ),
    (
        "Start with {n}. Halve an even number; replace an odd number x by 3x + 1. After how many steps is it "
        "1 for the first time?",
        _collatz,
    ),
    ("In how many ways can {n} cents be paid with coins of 1, {a} and {a} times {b} cents?", _coins),
    (
        "What is the sum of x * x mod {a} for all whole numbers x from 1 to {n}?",
        lambda n, a, b: sum(number * number % a for number in range(1, n + 1)),
    ),
)
"""Each question, and the function that computes its answer."""


def problems(count: int = 64, seed: int = 0, most: int = 2000, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Rows with `id`, `question` and `answer`, the same for the same arguments.

    Args:
        count: How many.
        seed: Seeds the questions.
        most: The largest number in a question, from 100.
        held_out: Ask questions that are kept from training, instead of the others.
    """
    if most < 100:
        raise ValueError(f"most is {most}; write at least 100")
    rng = random.Random(f"programs/{seed}")
    for index in range(count):
        while True:
            words, solve = rng.choice(_QUESTIONS)
            n, (a, b) = rng.randint(50, most), rng.sample(range(3, 20), 2)
            question = words.format(n=n, a=a, b=b)
            if (random.Random(question).randrange(HELD_OUT) == 0) is held_out:
                break
        kind = "held-out" if held_out else "program"
        yield {"id": f"{kind}-{seed}-{index:04d}", "question": question, "answer": solve(n, a, b)}


class Programs:
    """Asks a question and grades the one answer.

    Args:
        correct: Reward `correct` of the right number.
        form: Reward `form` of any number in tags.
    """

    events = ("graded",)

    def __init__(self, correct: float = 1.0, form: float = 0.1) -> None:
        self._correct = correct
        self._form = form

    def reset(self, task: Task, seed: int) -> Reset:
        """The question, as the user's first message."""
        _answer(task)
        words = f"{task.fields['question']}\nWrite a Python program, then <answer>number</answer>."
        return Reset(messages=[Message(role="user", content=words)])

    def step(self, view: EpisodeView) -> Step:
        """Grade the number in tags. Only the model's own text counts, not the output of a program."""
        answer = final_number(view.reply, ["tags"])
        right = answer is not None and answer.value == _answer(view.task)
        rewards = [RewardEvent(name="form", value=self._form, cause="a number in tags")] if answer else []
        if right:
            rewards.append(RewardEvent(name="correct", value=self._correct, cause="the right number"))
        return Step(event="graded", rewards=rewards, facts={"solved": right})


def _answer(task: Task) -> int:
    """The right number of a task.

    Raises:
        ValueError: The task has no answer or no question.
    """
    question, answer = task.fields.get("question"), task.fields.get("answer")
    if not isinstance(question, str) or type(answer) is not int:
        raise ValueError(
            f"task {task.id!r}: `question` is {question!r} and `answer` is {answer!r}; write a text and a "
            "whole number, as `engine.environments.programs:problems` does"
        )
    return answer
