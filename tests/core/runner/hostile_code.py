"""Spec code that answers with whatever a test puts into `ANSWERS`, by task id, in the place that the task names."""

from __future__ import annotations

from typing import Any

from engine.schemas.environment import EpisodeView, Reset, Task, ToolReply, UserTurn
from engine.schemas.message import Message, ToolCall
from engine.schemas.reward import RewardEvent

ANSWERS: dict[str, Any] = {}
"""Task id -> what is answered for it."""


def facts(place: str, task: Task) -> dict[str, Any]:
    """The facts that are returned in `place`."""
    return {"told": ANSWERS[task.id]} if task.fields.get("place") == place else {}


class Board:
    """Tells facts at its reset, and pays at the end."""

    def reset(self, task: Task, seed: int) -> Reset:
        messages = []
        if task.fields.get("place") == "example":
            arguments = {"value": ANSWERS[task.id]}
            messages = [Message(role="assistant", tool_calls=[ToolCall(id="x", name="tell", arguments=arguments)])]
        return Reset(messages=messages, facts=facts("reset", task))

    def score(self, view: EpisodeView) -> list[RewardEvent]:
        place, answer = view.task.fields.get("place"), ANSWERS.get(view.task.id)
        if place == "score error":
            raise ValueError(answer)
        if place == "score":
            return [RewardEvent.model_construct(**{**RewardEvent(value=1.0).__dict__, "cause": answer})]
        return [RewardEvent(value=1.0)]


def tell(view: EpisodeView) -> ToolReply | Any:
    """Tell something."""
    if view.task.fields.get("place") == "tool content":
        return ANSWERS[view.task.id]
    if view.task.fields.get("place") == "tool error":
        raise ValueError(ANSWERS[view.task.id])
    return ToolReply(content="told", facts=facts("tool", view.task))


def take(value: Any) -> str:
    """Take anything.

    Args:
        value: Anything.
    """
    return "taken"


class Listener:
    """Tells facts, or says what is no text."""

    def respond(self, view: EpisodeView) -> UserTurn:
        place, answer = view.task.fields.get("place"), ANSWERS.get(view.task.id)
        if place == "user content":
            return UserTurn.model_construct(**{**UserTurn(content="x").__dict__, "content": answer})
        if place == "user error":
            raise ValueError(answer)
        return UserTurn(content="Thanks.", satisfied=True, facts=facts("user", view.task))


ROWS: list[Any] = []


def rows() -> list[Any]:
    """The rows that a test put there."""
    return ROWS
