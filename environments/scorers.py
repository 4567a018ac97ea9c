"""Scorers, which grade an episode after it has ended: `rewards: {scorer: {use: math-verify}}`.

Invariant: only the policy's own replies are graded. An answer whose check takes too much CPU time is wrong, and
not a failure: otherwise a policy could avoid a grade by making the check slow.
"""

from __future__ import annotations

from typing import Literal

from engine.environments.math_answers import POOL, SECONDS, TAGS
from engine.schemas.environment import EpisodeView
from engine.schemas.reward import RewardEvent

MAX_CHARACTERS = 20_000
"""Number of characters at the end of a reply that are searched for an answer."""


def check_answer(gold: str, reply: str, seconds: float = SECONDS) -> tuple[bool, str]:
    """Whether the last answer in `reply` is right, and a text that says what was found.

    Args:
        gold: The right answer.
        reply: The reply to check.
        seconds: Limit of CPU time of the check; after it, the answer is wrong.

    Raises:
        ValueError: `gold` cannot be read.
    """
    tagged = TAGS.findall(reply)
    verdict = POOL.ask("compare", seconds, gold=gold, reply=(tagged[-1] if tagged else reply)[-MAX_CHARACTERS:])
    if verdict is None:
        return False, f"not checked within {seconds:g} s of CPU time"
    if "problem" in verdict:
        raise ValueError(verdict["problem"])
    if verdict["answer"] is None:
        return False, f"not readable ({verdict['error']})" if "error" in verdict else "no answer found"
    return verdict["right"], f"{verdict['answer']} is {'right' if verdict['right'] else 'wrong'}"


def math_verify(
    view: EpisodeView,
    answer: str = "answer",
    name: str = "correct",
    value: float = 1.0,
    wrong: float = 0.0,
    turns: Literal["last", "each"] = "last",
    seconds: float = SECONDS,
) -> list[RewardEvent]:
    r"""Reward a right mathematical answer: `\frac{1}{2}`, `0.5`, `\boxed{x=3}`, sets, intervals, …

    Args:
        view: The episode.
        answer: The task's field with the right answer; in a GSM8K solution, the text after `####` counts.
        name: Name of the reward.
        value: Reward of a right answer.
        wrong: Reward of any other answer; if it is 0, no reward is written.
        turns: `last` grades the episode's last reply, `each` grades every reply.
        seconds: Limit of CPU time of the check of one answer; after it, the answer is wrong.

    Raises:
        ValueError: the task has no such field, or it cannot be read.
    """
    if answer not in view.task.fields:
        raise ValueError(f"task {view.task.id!r} has no field {answer!r}; name another with `with: {{answer: …}}`")
    gold = str(view.task.fields[answer])
    graded = list(enumerate(view.replies))
    rewards: list[RewardEvent] = []
    for turn, reply in graded if turns == "each" else graded[-1:]:
        right, verdict = check_answer(gold, reply, seconds)
        if right or wrong:
            rewards.append(RewardEvent(turn=turn, name=name, value=value if right else wrong, cause=verdict))
    return rewards
