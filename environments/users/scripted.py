"""A user with fixed messages, for tests, fixed curricula, and tasks that contain their own dialogue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from engine.schemas.environment import EpisodeView, UserTurn


class Scripted:
    """Sends its lines in order, independent of the policy's replies.

    The object keeps no state: the number of user turns so far selects the next line, so a resume does not call it
    again.

    Args:
        lines: The messages: texts, or whole turns (`{content: …, rewards: […], satisfied: true}`).
        field: The task's field that contains the lines, if they differ by task.
        after: After the last line: `satisfied` (an empty turn that ends the conversation), `repeat` (the last line
            again) or `cycle` (from the first line).
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
        lines = self._lines
        if self._field is not None:
            written = view.task.fields.get(self._field)
            if not isinstance(written, list | tuple):
                raise ValueError(f"task {view.task.id!r}: the field {self._field!r} must be a list of lines")
            lines = [_turn(line) for line in written]
        at = view.user_turn
        if at < len(lines):
            return lines[at]
        if self._after == "satisfied" or not lines:
            return UserTurn(satisfied=True)
        return lines[-1] if self._after == "repeat" else lines[at % len(lines)]


def _turn(line: str | dict[str, Any]) -> UserTurn:
    return UserTurn(content=line) if isinstance(line, str) else UserTurn.model_validate(line)
