"""Guess a number; a wrong guess is answered with "higher" or "lower". An environment as one generator function."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from engine.environments.function import Dialogue, End, Say, environment
from engine.schemas.environment import Task


def problems(count: int = 64, seed: int = 0, most: int = 20) -> Iterator[dict[str, int]]:
    """Rows with a `secret` from 1 to `most`, the same for the same arguments."""
    rng = random.Random(f"guess_number/{seed}")
    return ({"secret": rng.randint(1, most)} for _ in range(count))


@environment
def guess_number(task: Task, most: int = 20) -> Dialogue:
    """The row's `secret` is guessed. Rewards: `won` (1.0), `format` (-0.1) of a reply without a guess. Limits end
    it."""
    secret = int(task.fields["secret"])
    view = yield f"Guess my number, from 1 to {most}. Write <guess>7</guess>."
    while True:
        guess = re.search(r"<guess>\s*(\d{1,9})\s*</guess>", view.reply)
        if guess is None:
            view = yield Say("Write <guess>7</guess> with your number.", rewards={"format": -0.1})
        elif int(guess[1]) == secret:
            return End(rewards={"won": 1.0}, solved=True)
        else:
            view = yield "Higher." if int(guess[1]) < secret else "Lower."
