"""Counts the transitions of a machine that scenarios take.

Invariant: transitions with the same state, event and destination are counted separately, by evaluating their conditions
on the values that the machine used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.errors import EngineError
from engine.limits import limits_of
from engine.machine.guards import Guard
from engine.machine.machine import ResolvedMachine, ResolvedTransition
from engine.schemas.limits import FAILED, LIMIT
from engine.validate.context import CheckContext

if TYPE_CHECKING:
    from engine.episode.episode import Episode
    from engine.spec.load import LoadedSpec

Edge = tuple[str, str, str, str | None]
"""(source, trigger, dest, conditions): a transition without its index in the list."""


def edge_of(transition: ResolvedTransition) -> Edge:
    """Return a transition without its index."""
    return transition.source, transition.trigger, transition.dest, transition.conditions


def show_edge(edge: Edge) -> str:
    """`GENERATING --answered--> DONE  [turns.user < limits.user_turns]`."""
    source, trigger, dest, conditions = edge
    return f"{source} --{trigger}--> {dest}" + (f"  [{conditions}]" if conditions else "")


class Watcher:
    """Counts each transition when it is taken."""

    def __init__(self, machine: ResolvedMachine) -> None:
        self.taken: list[Edge] = []
        self._machine = machine
        self._guards: dict[str | None, Guard] = {
            text: Guard(text) for transition in machine.transitions if (text := transition.conditions) is not None
        }

    def __call__(self, episode: Episode, state: str, event: str) -> None:
        """Count a transition. Called by `Executor` after the episode has moved and before a value that a guard reads
        changes."""
        for trigger in dict.fromkeys((event, FAILED)):  # an event that cannot be handled is a failure
            with suppress(EngineError):
                for transition in self._machine.leaving(state, trigger):
                    guard = self._guards.get(transition.conditions)
                    if guard is None or guard.evaluate(episode.guard_values(guard.names)):
                        self.taken.append(edge_of(transition))
                        return


@dataclass(frozen=True)
class Coverage:
    """The transitions of a machine that a suite takes."""

    taken: dict[Edge, int]
    """How often each possible transition was taken."""
    impossible: list[Edge] = field(default_factory=list)
    """Transitions that no episode can take: no action returns their event in that state, or no limit is set."""

    @property
    def missing(self) -> list[Edge]:
        """Return the transitions that no scenario takes, in the machine's order."""
        return [edge for edge, count in self.taken.items() if not count]

    @property
    def percent(self) -> float:
        """Return the percentage of transitions that were taken; 100 if there are none."""
        return 100.0 * (len(self.taken) - len(self.missing)) / len(self.taken) if self.taken else 100.0


def coverage_of(loaded: LoadedSpec, taken: Sequence[Edge]) -> Coverage:
    """Compute the coverage of the spec's machine (without the `set` of scenarios) from the transitions that were
    taken."""
    context = CheckContext(loaded)
    live = [
        t
        for t in context.live
        if t.source in context.reachable
        and (
            t.trigger != LIMIT
            or any(limit.may_stop(loaded.spec) for limit in limits_of(context.states[t.source].action))
        )
    ]
    counts = Counter(taken)
    possible = dict.fromkeys(map(edge_of, live))
    every = dict.fromkeys(map(edge_of, context.machine.transitions))
    return Coverage({edge: counts[edge] for edge in possible}, [edge for edge in every if edge not in possible])
