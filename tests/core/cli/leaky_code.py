"""Code that is given a key, and quotes it wherever it fails."""

from __future__ import annotations

import structlog

from engine.schemas.environment import EpisodeView, Reset, Task, UserTurn
from engine.schemas.reward import RewardEvent


def check(key: object) -> None:
    assert key in ("canary-3f9a\"'\\é-secret", 4815162342)


def rows(key: str) -> list[dict[str, str]]:
    """One task for each place that leaks."""
    check(key)
    return [{"id": place} for place in ("none", "reset", "tool", "user", "score", "url")]


def fail(key: str, task: Task, place: str) -> None:
    check(key)
    if task.fields["id"] == place:
        structlog.get_logger().warning("rejected", header=f"Bearer {key}", nested={"key": key})
        raise PermissionError(f"401 for {key!r} ({key})")


class Board:
    def __init__(self, key: str, number: int) -> None:
        self.key, self.number = key, number

    def reset(self, task: Task, seed: int) -> Reset:
        check(self.number)
        fail(self.key, task, "reset")
        if task.id == "url":
            raise ConnectionError("GET https://me:canary-3f9a-password@host/x refused: Bearer canary-3f9a-bearer")
        return Reset()

    def score(self, view: EpisodeView) -> list[RewardEvent]:
        fail(self.key, view.task, "score")
        return [RewardEvent(value=1.0)]


class Look:
    """Look something up."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.__name__ = "look"

    def __call__(self, view: EpisodeView) -> str:
        """Look something up."""
        fail(self.key, view.task, "tool")
        return "nothing"


class Reader:
    def __init__(self, headers: dict[str, str]) -> None:
        self.key = headers["authorization"].removeprefix("Bearer ")

    def respond(self, view: EpisodeView) -> UserTurn:
        fail(self.key, view.task, "user")
        return UserTurn(content="Thanks.", satisfied=True)
