"""A machine as it is walked through, and where an episode may stand in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.checks.logic import Formula

Limits = tuple[int | None, int | None, int | None]
"""In the order of `COUNT_LIMITS`; None where one is not set."""

NO_CALLS, MAYBE_CALLS, SURE_CALLS = 0, 1, 2
"""What is known of the newest reply: it made no call, perhaps some, certainly one."""


class Edge(NamedTuple):
    """One transition: where it leads, and when."""

    dest: str
    guard: Formula


@dataclass(frozen=True, slots=True)
class Chart:
    """A machine as it is walked through."""

    initial: str
    actions: tuple[tuple[str, str], ...]
    """(state, action) of every state that is not final."""
    events: tuple[tuple[str, tuple[str, ...]], ...]
    """(state, the events of its action)."""
    edges: tuple[tuple[tuple[str, str], tuple[Edge, ...]], ...]
    """((state, event), the transitions in the order in which they are tried)."""
    limits: Limits
    timed: bool
    """There is a limit of time."""
    most_sampled: int = 1
    """Tokens of one turn."""


class Place(NamedTuple):
    """Where an episode may stand."""

    state: str
    turns: int
    user: int
    calls: int
    """At least so many."""
    newest: int = NO_CALLS
    late: bool = False
    """Time is up."""

    @property
    def counts(self) -> tuple[int, int, int]:
        """By the limits' order."""
        return self.turns, self.user, self.calls


class Step(NamedTuple):
    """One step from a place."""

    event: str
    dest: Place
    used: int | None
    """Which of the three counters went up."""
