"""Code of specs whose episodes are recorded: some of it never answers twice the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from engine.schemas.environment import EpisodeView, Reset, Step, Task, ToolReply, UserTurn
from engine.schemas.message import Message, TextPart
from engine.schemas.reward import RewardEvent

COUNTED: Counter[str] = Counter()
"""Number of calls; what is counted answers otherwise at each call."""


def _next(name: str) -> int:
    COUNTED[name] += 1
    return COUNTED[name]


class Strict:
    """A user who wants the task's word."""

    def __init__(self, value: float = 1.0, words: str = "No.") -> None:
        self._value = value
        self._words = words

    def respond(self, view: EpisodeView) -> UserTurn:
        if view.reply != view.task.fields["word"]:
            return UserTurn(content=self._words, rewards=[RewardEvent(turn="last", name="wrong", value=-0.25)])
        return UserTurn(
            satisfied=True, solved=True, rewards=[RewardEvent(turn="last", name="correct", value=self._value)]
        )


class Counting:
    """A user who counts all calls."""

    def respond(self, view: EpisodeView) -> UserTurn:
        number = _next("user")
        return UserTurn(
            content=f"Call {number}.",
            facts={"number": number},
            rewards=[RewardEvent(turn="last", name="count", value=float(number))],
        )


class Game:
    """An environment that counts all calls."""

    events = ("continue", "done")

    def reset(self, task: Task, seed: int) -> Reset:
        return Reset(
            messages=[Message(role="user", content=f"Game {_next('reset')}.")], facts={"games": COUNTED["reset"]}
        )

    def step(self, view: EpisodeView) -> Step:
        number = _next("step")
        if view.reply == "four" or number > 3:
            raise RuntimeError(f"no step {number}")
        event = "done" if view.reply == "three" and view.turn == 2 and COUNTED["reset"] > 5 else "continue"
        return Step(
            event=event,
            messages=[Message(role="user", content=f"Step {number}.")] if event == "continue" else [],
            rewards=[RewardEvent(turn="last", name="step", value=number / 8)],
        )

    def score(self, view: EpisodeView) -> list[RewardEvent]:
        return [RewardEvent(turn="last", name="final", value=float(_next("score")))]


def add(a: int, b: int) -> str:
    """Add.

    Args:
        a: The one.
        b: The other.
    """
    return f"{a + b} at call {_next('add')}"


def bad(a: int, b: int) -> object:
    """Add.

    Args:
        a: The one.
        b: The other.
    """
    return object()


def broken() -> str:
    """Fail."""
    raise ValueError(f"call {_next('broken')}")


def picture() -> ToolReply:
    """Look."""
    return ToolReply(content=[TextPart(text=f"Call {_next('picture')}: "), TextPart(text="red")])


def writes(x: int = 0) -> ToolReply:
    """Write a fact.

    Args:
        x: Anything.
    """
    number = _next("writes")
    return ToolReply(
        content=f"{number}", facts={"n": number}, rewards=[RewardEvent(turn="last", name="tool", value=float(number))]
    )


def rows() -> Iterator[dict[str, Any]]:
    """Rows with nested fields."""
    for name, word in (("x", "one"), ("y", "two"), ("z", "three")):
        yield {"name": name, "deep": {"word": word}}
