"""The machine in the form in which `explore` walks it, and the places of an episode in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.actions.action_facts import NO_CALLS
from engine.actions.facts import ACTIONS
from engine.limits import COUNTERS
from engine.validate.logic import Formula

Limits = tuple[int | None, ...]
"""The values of `engine.limits.COUNTERS`, in that order; None if one is not set."""
Counts = tuple[int, ...]
"""The counts of `engine.limits.COUNTERS`, in that order."""

TURNS = next(index for index, limit in enumerate(COUNTERS) if limit.action is not None and ACTIONS[limit.action].calls)
"""The counter of replies: each samples at most the tokens of one turn."""


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
    stoppable: frozenset[str] = frozenset()
    """States whose action may be stopped at any time, by a limit that is not one of the counters."""


class Place(NamedTuple):
    """A state of an episode: the machine's state and the counters."""

    state: str
    counts: Counts
    """The counters; those of tool calls are lower bounds."""
    newest: int = NO_CALLS
    """What is known about the tool calls of the newest reply: `NO_CALLS`, `MAYBE_CALLS` or `SURE_CALLS`."""
    late: bool = False
    """Whether the time limit has passed."""

    @property
    def turns(self) -> int:
        """The number of replies."""
        return self.counts[TURNS]


class WalkStep(NamedTuple):
    """One step from a place."""

    event: str
    dest: Place
    used: tuple[int, ...] = ()
    """The counters that the step increased."""
