"""Countdown: make the target number out of the given numbers with + - * / and parentheses.

`problems` makes the tasks. `Countdown` shows the numbers and judges each reply: a wrong expression is answered with its
value, so the model may try again.

Invariant: a problem is a pure function of its arguments and has a solution; values are exact fractions; only the
expression in `<answer>` tags is judged, and only if it uses every number exactly once.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from engine.environments.tools.calculator import evaluate, show
from engine.schemas.environment import EpisodeView, Reset, Step, Task
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent

HELD_OUT = 5
"""One problem in this many is held out."""

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_EXPRESSION = re.compile(r"[0-9+\-*/() \t]{1,200}")
_NUMBER = re.compile(r"[0-9]+")


def problems(
    count: int = 64, seed: int = 0, numbers: int = 4, most: int = 25, held_out: bool = False
) -> Iterator[dict[str, Any]]:
    """Rows with `id`, `numbers`, `target` and `solution`, the same for the same arguments.

    Args:
        count: How many.
        seed: Seeds the numbers.
        numbers: How many numbers each problem has, from 2 to 6.
        most: The largest given number. The target is at most ten times as large.
        held_out: Make problems that are kept from training, instead of the others.
    """
    if not 2 <= numbers <= 6 or most < 4:
        raise ValueError(f"numbers is {numbers} and most is {most}; write numbers from 2 to 6 and most from 4")
    rng = random.Random(f"countdown/{seed}")
    for index in range(count):
        while True:
            given = [rng.randint(1, most) for _ in range(numbers)]
            solution, target = _combine(given, rng)
            reserved = random.Random(f"{sorted(given)}/{target}").randrange(HELD_OUT) == 0
            if target.denominator == 1 and 1 <= target <= 10 * most and target not in given and reserved is held_out:
                break
        kind = "held-out" if held_out else "countdown"
        yield {"id": f"{kind}-{seed}-{index:04d}", "numbers": given, "target": int(target), "solution": solution}


def _combine(given: list[int], rng: random.Random) -> tuple[str, Fraction]:
    """A random expression over all of `given`, and its value; the value is 0 if the expression divides by zero."""
    terms = [(str(number), Fraction(number)) for number in given]
    while len(terms) > 1:
        left, right = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
        sign = rng.choice("+-*/")
        if sign == "/" and right[1] == 0:
            return "", Fraction(0)
        a, b = left[1], right[1]
        value = a + b if sign == "+" else a - b if sign == "-" else a * b if sign == "*" else a / b
        terms.append((f"({left[0]} {sign} {right[0]})", value))
    text, value = terms[0]
    return text[1:-1], value


def judge(reply: str, numbers: list[int], target: int) -> tuple[bool, bool, str]:
    """Judge the last expression in `<answer>` tags. `= 24` after it is ignored.

    Returns:
        Whether it can be read, uses each number exactly once, and has a value; whether it is right; and what is wrong
        with it.
    """
    answers = _ANSWER.findall(reply)
    if not answers:
        return False, False, "There is no <answer>."
    text = answers[-1].strip().split("=")[0].strip()
    if not _EXPRESSION.fullmatch(text) or "**" in text or "//" in text:
        return False, False, "Write one expression with numbers, + - * / and parentheses."
    used, given = Counter(int(part) for part in _NUMBER.findall(text)), Counter(numbers)
    if used != given:
        wrong = min((used - given) or (given - used))
        how = f"used {used[wrong]} times, and given {given[wrong]} times" if used[wrong] else "not used"
        if not given[wrong]:
            how = "not among the numbers"
        return False, False, f"Use each number exactly once: {wrong} is {how}."
    try:
        value = evaluate(text)
    except ValueError as problem:
        return False, False, str(problem)
    return True, value == target, "" if value == target else f"{text} = {show(value)}, not {target}."


class Countdown:
    """Shows a problem and judges each reply until one is right or the tries are used up.

    Args:
        tries: Maximum number of judged replies.
        correct: Reward `correct` of the right expression.
        form: Reward `form` of the first reply whose expression can be read and uses each number once; paid once.
    """

    events = ("retry", "done")

    def __init__(self, tries: int = 3, correct: float = 1.0, form: float = 0.1) -> None:
        if tries < 1:
            raise ValueError(f"tries is {tries}; write at least 1")
        self._tries = tries
        self._correct = correct
        self._form = form

    def reset(self, task: Task, seed: int) -> Reset:
        """The problem, as the user's first message."""
        numbers, target = _fields(task)
        given = ", ".join(map(str, numbers))
        words = f"Make {target} out of {given}. Use each number exactly once, with + - * / and parentheses."
        return Reset(messages=[Message(role="user", content=words)], facts={"tries": 0, "in_form": False})

    def step(self, view: EpisodeView) -> Step:
        """`done` after the right expression or the last try; otherwise `retry`, with what is wrong."""
        readable, right, words = judge(view.reply, *_fields(view.task))
        tries = int(view.facts["tries"]) + 1
        rewards = []
        if readable and not view.facts["in_form"]:
            rewards.append(RewardEvent(name="form", value=self._form, cause="an expression with the given numbers"))
        if right:
            rewards.append(RewardEvent(name="correct", value=self._correct, cause=f"right at try {tries}"))
        facts = {"tries": tries, "in_form": readable or bool(view.facts["in_form"]), "solved": right}
        if right or tries >= self._tries:
            return Step(event="done", rewards=rewards, facts=facts)
        again = Message(role="user", content=f"{words} Try again.")
        return Step(event="retry", messages=[again], rewards=rewards, facts=facts)


def _fields(task: Task) -> tuple[list[int], int]:
    """The task's numbers and target.

    Raises:
        ValueError: They are missing, or are not whole numbers.
    """
    numbers, target = task.fields.get("numbers"), task.fields.get("target")
    valid = isinstance(numbers, list) and numbers and all(type(number) is int and number >= 0 for number in numbers)
    if not valid or type(target) is not int:
        raise ValueError(
            f"task {task.id!r}: `numbers` is {numbers!r} and `target` is {target!r}; write a list of whole "
            "numbers and a whole number, as `engine.environments.countdown:problems` does"
        )
    assert isinstance(numbers, list)
    return numbers, target
