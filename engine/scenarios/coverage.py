"""Which transitions of a machine scenarios take.

Invariant: transitions with the same state, event and destination are counted separately, by evaluating their conditions on the
values that the machine had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.actions.facts import FAILED, LIMIT, may_be_limited
from engine.checks.context import CheckContext
from engine.errors import EngineError
from engine.machine.guards import Guard
from engine.machine.presets import ResolvedMachine, ResolvedTransition

if TYPE_CHECKING:
    from engine.episode import Episode
    from engine.spec.load import LoadedSpec

Edge = tuple[str, str, str, str | None]
"""(source, trigger, dest, conditions): what a transition is, whatever its place in a list."""


def edge_of(transition: ResolvedTransition) -> Edge:
    """A transition without its place."""
    return transition.source, transition.trigger, transition.dest, transition.conditions


def show_edge(edge: Edge) -> str:
    """`GENERATING --answered--> DONE  [turns.user < limits.user_turns]`."""
    source, trigger, dest, conditions = edge
    return f"{source} --{trigger}--> {dest}" + (f"  [{conditions}]" if conditions else "")


class Watcher:
    """Told of each transition as it is taken; counts them."""

    def __init__(self, machine: ResolvedMachine) -> None:
        self.taken: list[Edge] = []
        self._machine = machine
        self._guards = {text: Guard(text) for t in machine.transitions if (text := t.conditions) is not None}

    def __call__(self, episode: Episode, state: str, event: str) -> None:
        """See `Executor`: the episode has just moved, and nothing that a guard reads has changed since."""
        for trigger in dict.fromkeys((event, FAILED)):  # an event that cannot be handled is a failure
            found = self._first(episode, state, trigger)
            if found is not None:
                self.taken.append(edge_of(found))
                return

    def _first(self, episode: Episode, state: str, trigger: str) -> ResolvedTransition | None:
        for transition in self._machine.leaving(state, trigger):
            if transition.conditions is None:
                return transition
            guard = self._guards[transition.conditions]
            try:
                if guard.evaluate(episode.context(guard.names)):
                    return transition
            except EngineError:
                return None
        return None


@dataclass(frozen=True)
class Coverage:
    """What a suite takes of a machine."""

    taken: dict[Edge, int]
    """How often each transition that can be taken was; 0 where it was not."""
    impossible: list[Edge] = field(default_factory=list)
    """Transitions that no episode can take: no action says their event there, or no limit is set."""

    @property
    def missing(self) -> list[Edge]:
        """Transitions that no scenario takes, in the machine's order."""
        return [edge for edge, count in self.taken.items() if not count]

    @property
    def percent(self) -> float:
        """The part that was taken, from 0 to 100; 100 where nothing can be."""
        return 100.0 * (len(self.taken) - len(self.missing)) / len(self.taken) if self.taken else 100.0


def coverage_of(loaded: LoadedSpec, taken: Sequence[Edge]) -> Coverage:
    """Hold what scenarios took to the machine of the spec as it is written."""
    context = CheckContext(loaded)
    live = [
        t
        for t in context.live
        if t.source in context.reachable
        and not (t.trigger == LIMIT and not may_be_limited(context.states[t.source].action, loaded.spec))
    ]
    counts = Counter(taken)
    possible = dict.fromkeys(map(edge_of, live))
    every = dict.fromkeys(map(edge_of, context.machine.transitions))
    return Coverage({edge: counts[edge] for edge in possible}, [edge for edge in every if edge not in possible])
