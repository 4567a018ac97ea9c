"""A user who asks for another attempt: until one is right (AReaL's retries), or a fixed number of times (SCoRe).

Sources: AReaL's multi-turn math agent, which asks again until the answer is right and discounts by the number of
turns; SCoRe (Kumar et al. 2024, "Training Language Models to Self-Correct via Reinforcement Learning",
arXiv:2409.12917), in which every first attempt is followed by a second, right or wrong.

Invariant: the right answer is never said. Grading reads the newest reply alone.
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
    "There may be a mistake in the solution above. Check each step, put it right where it is wrong, and give your final "
    "answer again."
)


class Attempts:
    """Grades each attempt, and asks for the next.

    Args:
        grade: `number` reads one final number (`engine.environments.answers`), `math` asks math-verify, `exact` compares text.
        answer: The task's field with the right answer.
        until: `right`: asks again until an answer is right. `counted`: asks for `attempts` of them, right or wrong, and
            does not say which they are.
        attempts: With `counted`, how many there are; with `right`, the most, where there is such a number.
        wrong: What it says to ask for another attempt; its own words when left out.
        value: Reward `correct` of an attempt that is right.
        miss: Reward `correct` of one that is not; nothing is written where it is 0.
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
            raise ValueError(f"attempts is {attempts}; an episode has at least one")
        if until == "counted" and attempts is None:
            raise ValueError("`until: counted` needs `attempts`: how many there are")
        self._grade = grade
        self._answer = answer
        self._until = until
        self._attempts = attempts
        self._wrong = wrong or (WRONG if until == "right" else SECOND_LOOK)
        self._value = value
        self._miss = miss

    def respond(self, view: EpisodeView) -> UserTurn:
        """Grade the newest attempt; satisfied when it is right or the last. It keeps nothing between answers."""
        attempt = view.user_turn + 1
        right, found = (False, "cut off") if view.finish == "length" else self._check(view)
        value = self._value if right else self._miss
        cause = f"attempt {attempt}: {found or 'no answer found'}"
        turn = UserTurn(
            solved=right and (self._until == "right" or attempt == self._attempts),
            rewards=[RewardEvent(name="correct", value=value, cause=cause)] if value else [],
            facts={"attempt": attempt, "right": right},
        )
        if attempt == self._attempts or (right and self._until == "right"):
            return turn.model_copy(update={"satisfied": True})
        asked: dict[str, Any] = {"content": self._wrong, "fields": {"found": found or "", "attempt": attempt}}
        if self._until == "right":
            asked["recover"] = "wrong" if found else "no_answer"
        return turn.model_copy(update=asked)

    def _check(self, view: EpisodeView) -> tuple[bool, str | None]:
        """Whether the newest reply is right, and what was found in it; None where no answer was."""
        if self._answer not in view.task.fields:
            raise ValueError(f"task {view.task.id!r} has no field {self._answer!r}; name another with `answer`")
        gold = str(view.task.fields[self._answer])
        if self._grade == "exact":
            said = view.reply.strip()
            return said == gold.strip(), said or None
        if self._grade == "math":
            right, found = check_answer(gold, view.reply)
            return right, None if found == "no answer found" else found
        answer = final_number(view.reply)
        if answer is None:
            return False, None
        task = view.task.model_copy(update={"fields": {"answer": gold}})
        right = answer.value == gold_answer(task)
        return right, f"{answer.text} is {'right' if right else 'wrong'}"
