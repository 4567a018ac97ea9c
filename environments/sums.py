"""Sums with a user who says whether a wrong answer is too high or too low. The first of two tries earns more.

`problems` makes the tasks, `engine.environments.arithmetic:Arithmetic` asks them, `Coach` judges each try. An answer
counts only in `<answer>` tags, so a model learns the format as well as the sum.

Invariant: a problem is a pure function of (count, seed, least, most, held_out), the held-out sums and the other sums
are disjoint, and `Coach` never says the right number.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from engine.environments.answers import final_number
from engine.schemas.environment import EpisodeView, Task, UserTurn
from engine.schemas.reward import RewardEvent

HELD_OUT = 5
"""One sum in this many is held out."""


def problems(
    count: int = 64, seed: int = 0, least: int = 1, most: int = 19, held_out: bool = False
) -> Iterator[dict[str, Any]]:
    """Rows with `id`, `question`, `expression` and `answer`: the sum of two numbers, the same for the same arguments.

    Args:
        count: Number of rows. A sum may occur more than once.
        seed: Seeds the numbers.
        least: The smallest number in a sum.
        most: The largest number in a sum.
        held_out: Make rows of the sums that are kept from training, instead of the others.
    """
    pairs = [
        (one, other)
        for one in range(least, most + 1)
        for other in range(least, most + 1)
        if ((one + 2 * other) % HELD_OUT == 0) is held_out
    ]
    if least < 0 or not pairs:
        raise ValueError(f"there are no sums of numbers from {least} to {most}; write `least` and `most` further apart")
    rng = random.Random(f"sums/{seed}")
    for index in range(count):
        one, other = rng.choice(pairs)
        yield {
            "id": f"{'held-out' if held_out else 'sum'}-{seed}-{index:04d}",
            "question": f"{one} + {other}",
            "expression": f"{one} + {other}",
            "answer": one + other,
        }


class Coach:
    """A user who judges each try, and says of a wrong one whether it is too high or too low.

    Args:
        first: Reward `correct` of a right answer at the first try.
        later: Reward `correct` of a right answer at a later try.
        form: Reward `form` of the first try that has an answer in tags, right or wrong; paid once.
        tries: Maximum number of tries.
    """

    def __init__(self, first: float = 0.9, later: float = 0.4, form: float = 0.1, tries: int = 2) -> None:
        if tries < 1:
            raise ValueError(f"tries is {tries}; write at least 1")
        self._first = first
        self._later = later
        self._form = form
        self._tries = tries

    def respond(self, view: EpisodeView) -> UserTurn:
        """Satisfied with the right answer in `<answer>` tags, and after the last try; help with any other answer."""
        wanted = _answer(view.task)
        answer = final_number(view.reply, ["tags"])
        rewards = []
        if answer is not None and not view.facts.get("in_form"):
            rewards.append(RewardEvent(name="form", value=self._form, cause="an answer in tags"))
        right = answer is not None and answer.value == wanted
        if right:
            value = self._later if view.user_turn else self._first
            rewards.append(RewardEvent(name="correct", value=value, cause=f"right at try {view.user_turn + 1}"))
        words = "Write <answer>number</answer>."
        if answer is not None:
            words = f"{answer.text} is too {'low' if answer.value < wanted else 'high'}."
        facts = {"in_form": answer is not None or bool(view.facts.get("in_form"))}
        if right or view.user_turn + 1 >= self._tries:
            return UserTurn(satisfied=True, solved=right, rewards=rewards, facts=facts)
        return UserTurn(content=words, rewards=rewards, facts=facts)


def _answer(task: Task) -> int:
    """The right number.

    Raises:
        ValueError: The task's `answer` is not a whole number.
    """
    value = task.fields.get("answer")
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(
            f"task {task.id!r}: `answer` is {value!r}; write a whole number, as "
            "`engine.environments.sums:problems` does"
        )
    return value
