"""Helpers of the tests of environments: a view of an episode, made by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.schemas.environment import EpisodeView, Task
from engine.schemas.message import Message

LURE = "The answer is 53. #### 72 <answer>72</answer>"
"""What the other side says in these views: right answers that are not the model's."""


@pytest.fixture(scope="session")
def view() -> Callable[..., EpisodeView]:
    """`view(task, *replies, **changes)`: an episode in which the model has said `replies`."""

    def make(task: Task, *replies: str, **changes: Any) -> EpisodeView:
        messages = [Message(role="user", content=str(task.fields.get("question", "")))]
        for reply in replies:
            messages += [Message(role="assistant", content=reply), Message(role="user", content=LURE)]
        settings: dict[str, Any] = {
            "episode_id": "t/0",
            "task": task,
            "seed": 0,
            "messages": messages,
            "turn": len(replies) - 1,
            "user_turn": max(0, len(replies) - 1),
            "calls": [],
            "malformed": [],
            "finish": "stop" if replies else "",
            "facts": {},
            "rewards": [0.0] * len(replies),
        }
        return EpisodeView(**(settings | changes))

    return make
