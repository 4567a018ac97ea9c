"""Grade-school word problems (GSM8K) with a grader who gives feedback.

Tasks have `question` and `answer`; the answer has GSM8K's form: a solution with `<<48/2=24>>` marks, then `#### 72`.
Source: Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems", arXiv:2110.14168.

Invariant: neither the environment nor a hint shows the right answer to the model. Only the model's own text
(`view.reply`) is graded, so no text of a tool or the user can earn a reward.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar, Literal, get_args

from engine.environments.answers import STYLES, Answer, Style, final_number, one_number
from engine.environments.tools.calculator import evaluate
from engine.schemas.environment import EpisodeView, Reset, Task, UserTurn
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent

Hint = Literal["none", "direction", "step"]

_CALCULATION = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
_NUMERAL = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?|\.\d+")
_FORMATS: dict[Style, str] = {
    "hashes": "#### <number>",
    "tags": "<answer><number></answer>",
    "sentence": "The answer is <number>.",
    "last_number": "<number>",
}


def gold_answer(task: Task) -> Fraction:
    """The right answer of a task: the number after `####`, or the whole field `answer` if it is one number.

    Raises:
        ValueError: The task has no such answer.
    """
    written = task.fields.get("answer")
    if written is None:
        raise ValueError(f"task {task.id!r} has no field `answer`; name it in `tasks.map`")
    value = one_number(str(written).rsplit("####", 1)[-1])
    if value is None:
        raise ValueError(f"task {task.id!r}: {written!r} ends with no number; GSM8K answers end with `#### 42`")
    return value


def calculations(task: Task) -> list[tuple[str, str]]:
    """Expression and result of each marked step of the reference solution, in order; empty if the answer is only a
    number."""
    marked = _CALCULATION.findall(str(task.fields["answer"]))
    return [(expression.strip(), result.strip()) for expression, result in marked]


class Gsm8k:
    """Asks a task's question.

    Args:
        instruction: Text on its own line after the question.
        correct: Reward `correct` for a right last answer that no user has judged (see `score`).
        styles: How an answer may be given; see `engine.environments.answers.final_number`.
    """

    def __init__(self, instruction: str = "", correct: float = 1.0, styles: Sequence[Style] = STYLES) -> None:
        self._instruction = instruction
        self._correct = correct
        self._styles = _known_styles(styles)

    def reset(self, task: Task, seed: int) -> Reset:
        """The question; the fact `steps` is the number of steps of the reference solution."""
        gold_answer(task)  # a task that cannot be graded fails before any token is sampled
        question = str(task.fields["question"]).strip()
        content = f"{question}\n{self._instruction}" if self._instruction else question
        return Reset(messages=[Message(role="user", content=content)], facts={"steps": len(calculations(task))})

    def score(self, view: EpisodeView) -> list[RewardEvent]:
        """Grade the last answer if no user judged it, for example because `limits.user_turns` was reached.

        `Grader` sets the fact `graded` to the newest turn that it has judged.
        """
        if view.facts.get("graded") == view.turn or view.finish != "stop" or view.calls or view.malformed:
            return []
        answer = final_number(view.reply, self._styles)
        if answer is None or answer.value != gold_answer(view.task):
            return []
        return [RewardEvent(name="correct", value=self._correct, cause="right answer")]


class Grader:
    """A user who asks for the right number and gives hints.

    The message after a wrong answer is the spec's `recover.wrong`, and after a reply without an answer
    `recover.no_answer`; the texts here are used if the spec has none. Fields: `tries` (answers so far, this one
    included), `question`, and for `wrong` also `answer` (as it was written) and `advice` (the hint, with "Try again.").

    Args:
        correct: Reward `correct` of the turn that gives the right answer.
        retry: Factor on `correct` for each earlier wrong answer.
        format: Reward `format` of the first turn whose answer can be read, right or wrong. Paid once, so
            that repeating wrong answers earns nothing.
        hint: The message after a wrong answer. `none`: that it is wrong; `direction`: also whether it is too high or
            too low; `step`: also the next step of the reference solution, never a step that shows the right answer.
        max_hints: How many wrong answers get a hint.
        styles: How an answer may be given; see `engine.environments.answers.final_number`.
    """

    recover_fields: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "wrong": ("answer", "advice", "tries", "question"),
        "no_answer": ("tries", "question"),
    }

    def __init__(
        self,
        correct: float = 1.0,
        retry: float = 1.0,
        format: float = 0.1,
        hint: Hint = "direction",
        max_hints: int = 2,
        styles: Sequence[Style] = STYLES,
    ) -> None:
        if hint not in get_args(Hint):
            raise ValueError(f"hint {hint!r} is not known; write one of {', '.join(get_args(Hint))}")
        if max_hints < 0:
            raise ValueError(f"max_hints is {max_hints}; write 0 or more")
        self._correct = correct
        self._retry = retry
        self._format = format
        self._hint = hint
        self._max_hints = max_hints
        self._styles = _known_styles(styles)

    def respond(self, view: EpisodeView) -> UserTurn:
        """Judge the newest answer. The object keeps no state, so the same view always gives the same result."""
        facts = {"graded": view.turn}
        earlier = [final for reply in view.replies[:-1] if (final := final_number(reply, self._styles)) is not None]
        fields: dict[str, Any] = {"tries": len(earlier), "question": str(view.task.fields["question"]).strip()}
        answer = None if view.finish == "length" else final_number(view.reply, self._styles)
        if answer is None:
            cut = view.finish == "length"
            problem = "Your reply was cut off. Be shorter, and end" if cut else "I cannot find your answer. End"
            content = f"{problem} with: {_FORMATS[self._styles[0]]}"
            return UserTurn(content=content, recover="no_answer", fields=fields, facts=facts)
        rewards: list[RewardEvent] = []
        if not earlier and self._format:
            rewards.append(RewardEvent(name="format", value=self._format, cause=f"answer readable as {answer.style}"))
        gold = gold_answer(view.task)
        if answer.value == gold:
            value = self._correct * self._retry ** len(earlier)
            rewards.append(RewardEvent(name="correct", value=value, cause="right answer"))
            return UserTurn(satisfied=True, solved=True, rewards=rewards, facts=facts)
        advice = self._advice(view.task, answer, gold, len(earlier))
        fields |= {"answer": answer.text, "advice": advice, "tries": len(earlier) + 1}
        content = f"{answer.text} is not right. {advice}"
        return UserTurn(content=content, recover="wrong", fields=fields, rewards=rewards, facts=facts)

    def _advice(self, task: Task, answer: Answer, gold: Fraction, earlier: int) -> str:
        """The text after `42 is not right.`; `earlier` is the number of earlier answers."""
        if earlier >= self._max_hints or self._hint == "none":
            return "Try again."
        if self._hint == "step":
            steps = [step for step in calculations(task) if not _shows(*step, gold)]
            if earlier < len(steps):
                return f"A step that helps: {' = '.join(steps[earlier])}. Try again."
        return f"It is too {'high' if answer.value > gold else 'low'}. Try again."


def _shows(expression: str, result: str, gold: Fraction) -> bool:
    """Whether a step shows the right answer: as one of its numbers, or as the value of its expression."""
    numbers = [one_number(numeral) for numeral in _NUMERAL.findall(f"{expression} {result}")]
    if abs(gold) in numbers:
        return True
    try:
        return evaluate(expression) == gold
    except ValueError:
        return False  # not plain arithmetic; its numbers were checked above


def _known_styles(styles: Sequence[Style]) -> tuple[Style, ...]:
    unknown = [style for style in styles if style not in get_args(Style)]
    if unknown or not styles:
        raise ValueError(f"styles {list(styles)!r} must be some of {', '.join(get_args(Style))}")
    return tuple(styles)
