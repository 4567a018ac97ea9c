"""Spec code that records when it is asked, so that a test sees who answered."""

from __future__ import annotations

import asyncio
from collections import Counter

from engine.schemas.environment import EpisodeView, Reset, Step, Task, UserTurn, action
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent

ASKED: Counter[str] = Counter()
"""How often each was asked, since a test cleared it."""


class Board:
    """An environment with steps, a score and a tool of its own."""

    events = ("moved", "won")

    def __init__(self) -> None:
        ASKED["built"] += 1

    def reset(self, task: Task, seed: int) -> Reset:
        ASKED["reset"] += 1
        return Reset(messages=[Message(role="user", content=f"Board {task.id}.")])

    def step(self, view: EpisodeView) -> Step:
        ASKED["step"] += 1
        return Step(event="moved", messages=[Message(role="user", content="Really moved.")])

    def score(self, view: EpisodeView) -> list[RewardEvent]:
        ASKED["score"] += 1
        return [RewardEvent(name="final", value=0.25)]

    def tools(self) -> list[object]:
        return [self.peek]

    def peek(self, row: int) -> str:
        """Look at a row.

        Args:
            row: Which.
        """
        ASKED["peek"] += 1
        return f"row {row}"

    def close(self) -> None:
        ASKED["closed"] += 1


class Unbuildable:
    """An environment that cannot be built."""

    def __init__(self) -> None:
        raise RuntimeError("no board")

    def reset(self, task: Task, seed: int) -> Reset:
        return Reset()


class Patient:
    """A user whose answer is awaited."""

    async def respond(self, view: EpisodeView) -> UserTurn:
        await asyncio.sleep(0)
        ASKED["user"] += 1
        return UserTurn(content=f"Really: {view.reply}?")

    def close(self) -> None:
        ASKED["user closed"] += 1


def add(a: int, b: int) -> str:
    """Add.

    Args:
        a: The one.
        b: The other.
    """
    ASKED["add"] += 1
    return str(a + b)


async def echo(view: EpisodeView, word: str) -> str:
    """Say it again.

    Args:
        word: What.
    """
    ASKED["echo"] += 1
    return f"{word} at {view.turn}"


@action("short", "long")
def measure(view: EpisodeView) -> Step:
    """An action of a spec's own."""
    ASKED["measured"] += 1
    return Step(event="long")
