"""The machine in the form in which `explore` walks it, and the places of an episode in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.checks.logic import Formula

Limits = tuple[int | None, int | None, int | None]
"""In the order of `COUNT_LIMITS`; None where one is not set."""

NO_CALLS, MAYBE_CALLS, SURE_CALLS = 0, 1, 2
"""What is known about the newest reply: it made no call, may have made some, made at least one."""


class Edge(NamedTuple):
    """One transition: its destination and its guard."""

    dest: str
    guard: Formula


@dataclass(frozen=True, slots=True)
class Chart:
    """A machine in the form in which `explore` walks it."""

    initial: str
    actions: tuple[tuple[str, str], ...]
    """(state, action) of every state that is not final."""
    events: tuple[tuple[str, tuple[str, ...]], ...]
    """(state, the events of its action)."""
    edges: tuple[tuple[tuple[str, str], tuple[Edge, ...]], ...]
    """((state, event), its transitions in the order in which they are tried)."""
    limits: Limits
    timed: bool
    """Whether `limits.episode_seconds` is set."""
    most_sampled: int = 1
    """Maximum number of tokens of one turn."""


class Place(NamedTuple):
    """A state of an episode: the machine's state and the counters."""

    state: str
    turns: int
    user: int
    calls: int
    """Lower bound of the number of tool calls."""
    newest: int = NO_CALLS
    late: bool = False
    """Whether the time limit has passed."""

    @property
    def counts(self) -> tuple[int, int, int]:
        """The counters, in the order of `Limits`."""
        return self.turns, self.user, self.calls


class WalkStep(NamedTuple):
    """One step from a place."""

    event: str
    dest: Place
    used: int | None
    """Which of the three counters the step increased."""
