"""The environment and the tools of an episode."""

from __future__ import annotations

from engine.schemas.base import Seconds
from engine.schemas.entry import Effects, Entry, IsolationSpec


class EnvironmentSpec(Entry):
    """The environment of each episode."""

    effects: Effects = "replayable"
    timeout: Seconds = 60.0
    """Deadline for each of its calls."""
    isolation: IsolationSpec | None = None
    """Where it runs; the spec's `isolation` when left out."""


class ToolSpec(Entry):
    """One tool: a typed function, or a class that is built with `with` and then called."""

    name: str | None = None
    """Its name for the model; the function's own when left out."""
    timeout: Seconds | None = None
    """Deadline for one call; `limits.tool_seconds` when left out."""
    effects: Effects = "pure"
    isolation: IsolationSpec | None = None
    """Where it runs; the spec's `isolation` when left out."""
