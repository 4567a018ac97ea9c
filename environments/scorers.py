"""Scorers: what judges an episode when it is over. `rewards: {scorer: {use: math-verify}}`.

Invariant: only the policy's own replies are graded. An answer that takes too much CPU time to check is a wrong
answer, not a failure: a policy that could stop the checking would otherwise choose not to be graded.
"""

from __future__ import annotations

import re
from typing import Literal

from engine.environments.math_pool import POOL, SECONDS
from engine.schemas.environment import EpisodeView
from engine.schemas.reward import RewardEvent

MAX_CHARACTERS = 20_000
"""Of a reply, from its end, that are read for an answer."""
_TAGS = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)


def check_answer(gold: str, reply: str, seconds: float = SECONDS) -> tuple[bool, str]:
    """Whether `reply` gives the right answer last, and in words what was found.

    Args:
        gold: The right answer.
        reply: What was said.
        seconds: CPU time that checking may take; past it, the answer is wrong.

    Raises:
        ValueError: the right answer itself cannot be read.
    """
    tagged = _TAGS.findall(reply)
    told = POOL.ask("compare", seconds, gold=gold, reply=(tagged[-1] if tagged else reply)[-MAX_CHARACTERS:])
    if told is None:
        return False, f"not checked within {seconds:g} s of CPU time"
    if "problem" in told:
        raise ValueError(told["problem"])
    if told["answer"] is None:
        return False, f"not readable ({told['error']})" if "error" in told else "no answer found"
    return told["right"], f"{told['answer']} is {'right' if told['right'] else 'wrong'}"


def math_verify(
    view: EpisodeView,
    answer: str = "answer",
    name: str = "correct",
    value: float = 1.0,
    wrong: float = 0.0,
    turns: Literal["last", "each"] = "last",
    seconds: float = SECONDS,
) -> list[RewardEvent]:
    r"""Reward the right mathematical answer: `\frac{1}{2}`, `0.5`, `\boxed{x=3}`, sets, intervals, …

    Args:
        view: The episode.
        answer: The task's field with the right answer; of a GSM8K solution, what follows `####` counts.
        name: Of the reward.
        value: For a right answer.
        wrong: For anything else; nothing is written where it is 0.
        turns: Whether the episode's last reply is graded, or each.
        seconds: CPU time that checking one answer may take; past it, it is wrong.

    Raises:
        ValueError: the task has no such field, or it cannot be read.
    """
    if answer not in view.task.fields:
        raise ValueError(f"task {view.task.id!r} has no field {answer!r}; name another with `with: {{answer: …}}`")
    gold = str(view.task.fields[answer])
    graded = list(enumerate(view.replies))
    rewards: list[RewardEvent] = []
    for turn, reply in graded if turns == "each" else graded[-1:]:
        right, found = check_answer(gold, reply, seconds)
        if right or wrong:
            rewards.append(RewardEvent(turn=turn, name=name, value=value if right else wrong, cause=found))
    return rewards
