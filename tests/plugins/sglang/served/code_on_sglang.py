"""A tool, a user and a reader of calls for a model that says random things: what happens hangs on its exact words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.schemas.environment import EpisodeView, UserTurn
from engine.schemas.message import ToolCall
from engine.schemas.reward import RewardEvent
from engine.tokens.toolcalls import Call, ParsedCalls, ToolCallFormat


class OddsAreCalls(ToolCallFormat):
    """A reply of an odd number of characters calls the tool."""

    def parse(self, text: str, tools: Sequence[dict[str, Any]], prefix: str) -> ParsedCalls:
        """See `ToolCallFormat.parse`."""
        if len(text) % 2 == 0:
            return ParsedCalls(content=text, attempts=[])
        return ParsedCalls(
            content=text, attempts=[ToolCall(id=f"{prefix}_0", name="measure", arguments={"text": text})]
        )

    def write(self, text: str, calls: Sequence[Call]) -> str:
        """See `ToolCallFormat.write`."""
        return text if len(text) % 2 else f"{text}."


async def measure(text: str) -> str:
    """How long a text is.

    Args:
        text: The text.
    """
    return f"{len(text)} characters, {len(text.split())} words."


class Pedant:
    """Is satisfied by the second answer, and says of the first one how long it was."""

    def __init__(self) -> None:
        self._answers = 0

    def respond(self, view: EpisodeView) -> UserTurn:
        """See `User.respond`."""
        self._answers += 1
        if self._answers == 2:
            return UserTurn(satisfied=True, rewards=[RewardEvent(value=1.0)])
        return UserTurn(content=f"{len(view.reply)} characters are not enough. Say more.")


def by_token(row: dict[str, Any]) -> np.ndarray:
    """An advantage for each token that depends on its id alone, so that every episode trains."""
    return (row["input_ids"] % 7 - 3).astype(np.float32)
