"""The messages that the model was shown at each turn of a stored episode: after a condensation the shorter thread, not
the whole conversation."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.schemas.message import Message
    from engine.schemas.trajectory import Trajectory


def reply_numbers(trajectory: Trajectory) -> list[int]:
    """For each turn: the number of its reply in `Trajectory.messages`. Examples of replies in the prompt come before
    all of them."""
    replies = [at for at, message in enumerate(trajectory.messages) if message.role == "assistant"]
    return replies[len(replies) - len(trajectory.turns) :]


def shown_messages(trajectory: Trajectory, turn: int) -> tuple[list[Message], list[int]]:
    """The messages that the model was shown when it sampled a turn, with the reply at the end.

    Returns:
        The messages, and for each its number in `Trajectory.messages`; -1 for one that stands for others.
    """
    replies = reply_numbers(trajectory)
    before = list(takewhile(lambda condensation: condensation.turn < turn, trajectory.condensations))
    thread: list[int | Message] = []
    start = 0
    if before:
        newest = before[-1]
        thread = newest.thread
        start = newest.said if newest.said >= 0 else replies[newest.turn + 1]
    thread = [*thread, *range(start, replies[turn] + 1)]
    messages = [trajectory.messages[entry] if isinstance(entry, int) else entry for entry in thread]
    return messages, [entry if isinstance(entry, int) else -1 for entry in thread]
