"""A user who asks for another attempt: until one is right (AReaL's retries), or a fixed number of times (SCoRe).

Sources: AReaL's multi-turn math agent, which asks again until the answer is right and discounts by the number of
turns; SCoRe (Kumar et al. 2024, "Training Language Models to Self-Correct via Reinforcement Learning",
arXiv:2409.12917), in which every first attempt is followed by a second, right or wrong.

Invariant: the user never says the right answer. Only the newest reply is graded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

from engine.environments.answers import final_number
from engine.environments.gsm8k import gold_answer
from engine.environments.scorers import check_answer
from engine.schemas.environment import EpisodeView, UserTurn
from engine.schemas.reward import RewardEvent

Grade = Literal["number", "math", "exact"]

WRONG = (
    "Your answer is wrong, or I cannot read it. Read the question again, look for a mistake above, and answer again."
)
SECOND_LOOK = (
    "There may be a mistake in the solution above. Check each step, put it right where it is wrong, and "
    "give your final answer again."
)


class Attempts:
    """Grades each attempt, and asks for the next one.

    Args:
        grade: `number` reads one final number (`engine.environments.answers`), `math` asks math-verify, `exact`
            compares text.
        answer: The task's field with the right answer.
        until: `right`: asks again until an answer is right. `counted`: asks for `attempts` attempts in every case, and
            does not say whether they are right.
        attempts: The number of attempts with `counted`, and the maximum with `right`. None: no maximum.
        wrong: The message that asks for another attempt. None: a built-in text.
        value: Reward `correct` of a right attempt.
        miss: Reward `correct` of a wrong attempt; if it is 0, no reward is written.
    """

    recover_fields: ClassVar[Mapping[str, tuple[str, ...]]] = {"wrong": ("found", "attempt"), "no_answer": ("attempt",)}

    def __init__(
        self,
        grade: Grade = "number",
        answer: str = "answer",
        until: Literal["right", "counted"] = "right",
        attempts: int | None = None,
        wrong: str | None = None,
        value: float = 1.0,
        miss: float = 0.0,
    ) -> None:
        if grade not in get_args(Grade):
            raise ValueError(f"grade {grade!r} is not known; write one of {', '.join(get_args(Grade))}")
        if until not in ("right", "counted"):
            raise ValueError(f"until {until!r} is not known; write right or counted")
        if attempts is not None and attempts < 1:
            raise ValueError(f"attempts is {attempts}; write at least 1")
        if until == "counted" and attempts is None:
            raise ValueError("`until: counted` needs `attempts`, the number of attempts")
        self._grade = grade
        self._answer = answer
        self._until = until
        self._attempts = attempts
        self._wrong = wrong or (WRONG if until == "right" else SECOND_LOOK)
        self._value = value
        self._miss = miss

    def respond(self, view: EpisodeView) -> UserTurn:
        """Grade the newest attempt; satisfied if it is right or the last one. No state is kept between calls."""
        attempt = view.user_turn + 1
        right, verdict = (False, "cut off") if view.finish == "length" else self._check(view)
        value = self._value if right else self._miss
        cause = f"attempt {attempt}: {verdict or 'no answer verdict'}"
        turn = UserTurn(
            solved=right and (self._until == "right" or attempt == self._attempts),
            rewards=[RewardEvent(name="correct", value=value, cause=cause)] if value else [],
            facts={"attempt": attempt, "right": right},
        )
        if attempt == self._attempts or (right and self._until == "right"):
            return turn.model_copy(update={"satisfied": True})
        asked: dict[str, Any] = {"content": self._wrong, "fields": {"found": verdict or "", "attempt": attempt}}
        if self._until == "right":
            asked["recover"] = "wrong" if verdict else "no_answer"
        return turn.model_copy(update=asked)

    def _check(self, view: EpisodeView) -> tuple[bool, str | None]:
        """Whether the newest reply is right, and the answer found in it; None if there is no answer."""
        if self._answer not in view.task.fields:
            raise ValueError(f"task {view.task.id!r} has no field {self._answer!r}; name another with `answer`")
        gold = str(view.task.fields[self._answer])
        if self._grade == "exact":
            said = view.reply.strip()
            return said == gold.strip(), said or None
        if self._grade == "math":
            right, verdict = check_answer(gold, view.reply)
            return right, None if verdict == "no answer found" else verdict
        answer = final_number(view.reply)
        if answer is None:
            return False, None
        task = view.task.model_copy(update={"fields": {"answer": gold}})
        right = answer.value == gold_answer(task)
        return right, f"{answer.text} is {'right' if right else 'wrong'}"
