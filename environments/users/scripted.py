"""A user who says what is written down: for tests, for fixed curricula, for tasks that bring their own dialogue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from engine.schemas.environment import EpisodeView, UserTurn


class Scripted:
    """Says its lines in order, whatever the policy says.

    It keeps no place of its own: which line comes next is how many answers the episode has had, so a resume needs
    nothing of it.

    Args:
        lines: What it says: texts, or whole turns (`{content: …, rewards: […], satisfied: true}`).
        field: The task's field that holds the lines, where they differ by task.
        after: What it does when they are used up: `satisfied` with nothing more to say, `repeat` the last one, or begin
            again (`cycle`).
    """

    def __init__(
        self,
        lines: Sequence[str | dict[str, Any]] = (),
        field: str | None = None,
        after: Literal["satisfied", "repeat", "cycle"] = "satisfied",
    ) -> None:
        if bool(lines) == (field is not None):
            raise ValueError("give `lines`, or the task's `field` that holds them")
        if after not in ("satisfied", "repeat", "cycle"):
            raise ValueError(f"after {after!r} is not known; write satisfied, repeat or cycle")
        self._lines = [_turn(line) for line in lines]
        self._field = field
        self._after = after

    def respond(self, view: EpisodeView) -> UserTurn:
        """The next line."""
        lines = self._lines if self._field is None else self._of(view)
        at = view.user_turn
        if at < len(lines):
            return lines[at]
        if self._after == "satisfied" or not lines:
            return UserTurn(satisfied=True)
        return lines[-1] if self._after == "repeat" else lines[at % len(lines)]

    def _of(self, view: EpisodeView) -> list[UserTurn]:
        lines = view.task.fields.get(str(self._field))
        if not isinstance(lines, list | tuple):
            raise ValueError(f"task {view.task.id!r}: the field {self._field!r} must be a list of lines")
        return [_turn(line) for line in lines]


def _turn(line: str | dict[str, Any]) -> UserTurn:
    return UserTurn(content=line) if isinstance(line, str) else UserTurn.model_validate(line)
