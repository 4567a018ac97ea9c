"""Which events each built-in action may end with. Pure data: the static checks read it.

Two more events may come in every state that is not final: `limit`, when a limit was reached before its
action began, and `failed`, when its action could not be carried out.
"""

from __future__ import annotations

ACTION_EVENTS: dict[str, tuple[str, ...]] = {
    "reset": ("ready",),
    "generate": ("tool_calls", "answered", "truncated", "malformed", "aborted"),
    "call_tools": ("results",),
    "ask_user": ("feedback", "satisfied"),
    "score": (),
}
"""`step` and actions of a spec's own are not here: their `events` attribute says."""

ALWAYS: tuple[str, ...] = ("limit", "failed")
"""Events that any state may meet."""

SCORERS = {"math-verify": "engine.environments.scorers:math_verify"}
"""Scorers that have a name of their own, and their entry points."""
