"""The machine of a spec, as rules see it: what is reached, what an episode may do, and its endless cycles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from engine.actions.facts import ACTIONS
from engine.limits import COUNTERS, EPISODE_SECONDS, limit_values, limits_of
from engine.machine.machine import ResolvedMachine, ResolvedTransition, resolved_machine
from engine.machine.presets import PRESETS
from engine.schemas.limits import ALWAYS, OVERFLOW, UNBOUNDED, LimitsSpec
from engine.schemas.machine import ANY, StateSpec
from engine.spec.text.diagnostic import DataPath
from engine.validate.code.code_context import CodeContext
from engine.validate.explore import Chart, Edge, Graph, Place, WalkStep, explore
from engine.validate.logic import ALWAYS as ALWAYS_TRUE
from engine.validate.logic import UNKNOWN, Formula, Ranges, formula
from engine.validate.work import Work, WorkLimitError

MAX_TRANSITIONS = 10_000
"""Maximum number of transitions of a machine that is checked, with every list and `"*"` expanded."""
MAX_WORK = 200_000
"""Work units of one rule."""
MAX_READ = 100_000
"""Maximum number of characters of all conditions that are analysed."""
PRESETS_STATES = frozenset(name for preset in PRESETS.values() for name in preset.machine.states)


@dataclass
class MachineContext(CodeContext):
    """A spec, its code and its machine."""

    _read: dict[str, bool] = field(default_factory=dict)
    """Whether each condition is analysed."""
    _characters: int = 0

    @cached_property
    def written_out(self) -> int:
        """Number of the spec's own transitions with every list and `"*"` expanded."""
        most = len({*self.spec.machine.states, *PRESETS_STATES})
        return sum(
            len(item.triggers) * (most if ANY in item.sources else len(item.sources))
            for item in self.spec.machine.transitions
        )

    @cached_property
    def machine(self) -> ResolvedMachine:
        """The machine with its preset, and with `"*"` expanded; names are not checked.

        Raises:
            WorkLimitError: it would have more than `MAX_TRANSITIONS` transitions.
        """
        if self.written_out > MAX_TRANSITIONS:
            raise WorkLimitError(
                f"the machine has more than {MAX_TRANSITIONS:,} transitions, with lists and `*` expanded"
            )
        return resolved_machine(self.spec)

    @property
    def states(self) -> dict[str, StateSpec]:
        """All states, including those of the preset."""
        return self.machine.states

    @cached_property
    def working(self) -> list[str]:
        """The states that are not final."""
        return [name for name, state in self.states.items() if not state.final]

    def events_of(self, state: StateSpec) -> tuple[str, ...] | None:
        """Return the events that a state's action declares; None if they are not known."""
        if state.action is None:
            return ()
        if (facts := ACTIONS.get(state.action)) is not None:
            if facts.events is not None:
                return facts.events
            return self.declared(self.spec.environment.entry.use) if self.spec.environment else None
        if ":" in state.action:
            return self.declared(state.action)
        return None  # `machine.unknown-action` reports it

    def events_in(self, name: str) -> tuple[str, ...] | None:
        """Return the events of a state's action there: `overflow` is one only where a transition handles it."""
        events = self.events_of(self.states[name])
        facts = ACTIONS.get(str(self.states[name].action))
        if events is None or facts is None or not facts.overflows or not self.machine.leaving(name, OVERFLOW):
            return events
        return (*events, OVERFLOW)

    def performing(self, action: str) -> list[str]:
        """The reachable states with an action."""
        return [name for name, state in self.states.items() if name in self.reachable and state.action == action]

    @cached_property
    def calling(self) -> list[str]:
        """The reachable states whose action adds messages of role `tool`."""
        return [
            name
            for name, state in self.states.items()
            if name in self.reachable and (facts := ACTIONS.get(str(state.action))) and facts.speaks == "tool"
        ]

    @cached_property
    def may_happen(self) -> Mapping[str, frozenset[str] | None]:
        """All events that may occur in each state that is not final; None if those of its action are not known."""
        events = {name: self.events_in(name) for name in self.working}
        return {name: None if known is None else frozenset((*known, *ALWAYS)) for name, known in events.items()}

    @cached_property
    def reachable(self) -> frozenset[str]:
        """States that can be reached if guards are ignored; all states if `initial` does not exist."""
        if self.machine.initial not in self.states:
            return frozenset(self.states)
        return closure([self.machine.initial], [(edge.source, edge.dest) for edge in self.live])

    @cached_property
    def ending(self) -> frozenset[str]:
        """States from which a final state can be reached, including the final states."""
        final = [name for name, state in self.states.items() if state.final]
        return closure(final, [(edge.dest, edge.source) for edge in self.live])

    @cached_property
    def live(self) -> list[ResolvedTransition]:
        """The transitions that can be taken: their event can occur, and no unconditional transition precedes them."""
        settled: set[tuple[str, str]] = set()
        live: list[ResolvedTransition] = []
        for edge in self.machine.transitions:
            group = (edge.source, edge.trigger)
            events = self.may_happen.get(edge.source, ())  # none: it is final, or does not exist
            if group not in settled and (events is None or edge.trigger in events):
                live.append(edge)
                if edge.conditions is None:
                    settled.add(group)
        return live

    def formula(self, expression: str) -> Formula:
        """Return a guard as a function of its quantities, under the spec's limits."""
        return self._formula(expression, self.limit_values)

    def _formula(self, expression: str, values: tuple[tuple[str, float], ...]) -> Formula:
        """Conditions beyond the first `MAX_READ` characters are not analysed: they may have any result."""
        is_read = self._read.get(expression)
        if is_read is None:
            is_read = self._read[expression] = self._characters + len(expression) <= MAX_READ
            self._characters += len(expression)
        return formula(expression, values if "limits" in expression else ()) if is_read else UNKNOWN

    def chart(self, limits: LimitsSpec | None = None) -> Chart:
        """Return the machine in the form that `explore` takes, with the spec's limits or others."""
        within = limits or self.spec.limits
        values = _values(within)
        groups: dict[tuple[str, str], list[Edge]] = {}
        for edge in self.machine.transitions:
            guard = ALWAYS_TRUE if edge.conditions is None else self._formula(edge.conditions, values)
            groups.setdefault((edge.source, edge.trigger), []).append(Edge(edge.dest, guard))
        triggers: dict[str, list[str]] = {}
        for source, trigger in groups:
            triggers.setdefault(source, []).append(trigger)
        working = [name for name in self.working if self.states[name].action is not None]
        declared = {name: self.events_in(name) for name in working}
        events = {name: triggers.get(name, []) if known is None else known for name, known in declared.items()}
        sampled = self.spec.sampling.max_new_tokens
        spec = self.spec.model_copy(update={"limits": within})
        counted = [limit.value(spec) for limit in COUNTERS]
        stoppable = [
            name
            for name in working
            for limit in limits_of(self.states[name].action)
            if limit.per_use is None and limit is not EPISODE_SECONDS and limit.may_stop(spec)
        ]
        return Chart(
            self.machine.initial,
            tuple((name, str(self.states[name].action)) for name in working),
            tuple((name, tuple(event for event in events[name] if event not in ALWAYS)) for name in working),
            tuple((key, tuple(group)) for key, group in groups.items()),
            tuple(None if value is None else int(min(value, UNBOUNDED)) for value in counted),
            EPISODE_SECONDS.may_stop(spec),
            min(within.turn_tokens, UNBOUNDED if sampled is None else sampled, UNBOUNDED),
            frozenset(stoppable),
        )

    @cached_property
    def cycles(self) -> Cycles:
        """Cycles that nothing bounds."""
        return cycles_of(self.graph, Work(MAX_WORK))

    @cached_property
    def graph(self) -> Graph:
        """Everything that an episode may do within the spec's limits."""
        return explore(self.chart())

    @cached_property
    def limit_values(self) -> tuple[tuple[str, float], ...]:
        """The values of `limits.*` in guards."""
        return _values(self.spec.limits)

    @cached_property
    def hull(self) -> Ranges:
        """The range of each quantity over all reachable places."""
        hull: dict[str, tuple[float, float]] = {}
        for counts in {place.counts for place in self.graph.steps if not place.late}:
            for name, (low, high) in self.graph.walk.ranges(counts).items():
                least, most = hull.get(name, (low, high))
                hull[name] = (min(low, least), max(high, most))
        return hull

    @cached_property
    def own_actions(self) -> list[tuple[str, StateSpec]]:
        """States whose action is an entry point of the spec."""
        return [(name, state) for name, state in self.states.items() if state.action and ":" in state.action]

    def state_path(self, name: str) -> DataPath:
        """Return the position of a state; that of the machine if the state comes from the preset."""
        return ("machine", "states", name) if name in self.spec.machine.states else ("machine",)


def _values(limits: LimitsSpec) -> tuple[tuple[str, float], ...]:
    return tuple((name, float(min(value, UNBOUNDED))) for name, value in limit_values(limits).items())


def closure(starts: Iterable[str], steps: Iterable[tuple[str, str]]) -> frozenset[str]:
    """The states that can be reached from some states, including these."""
    ahead: dict[str, set[str]] = {}
    for source, dest in steps:
        ahead.setdefault(source, set()).add(dest)
    reached = set(starts)
    waiting = list(reached)
    while waiting:
        new = ahead.get(waiting.pop(), set()) - reached
        reached |= new
        waiting += new
    return frozenset(reached)


SHOWN = 12
"""Steps of a cycle that a message shows."""


class Cycle(NamedTuple):
    """A cycle that an episode may repeat without bound."""

    steps: tuple[tuple[str, str], ...]
    """(state, event) of each step, in order."""
    bounds: tuple[str, ...]
    """Limits that would bound it and are not set."""
    late: bool
    """Whether it continues after the time limit."""

    def __str__(self) -> str:
        first = self.steps[0][0]
        shown = [f"`{state}` -{event}->" for state, event in self.steps]
        if len(shown) > SHOWN:
            shown[SHOWN // 2 : -SHOWN // 2] = [f"… ({len(shown) - SHOWN} more states) …"]
        return " ".join(shown) + f" `{first}`"


class Cycles(NamedTuple):
    """The cycles, and whether all were found."""

    found: list[Cycle]
    complete: bool


def cycles_of(graph: Graph, work: Work | None = None) -> Cycles:
    """Return the shortest cycle through each step that lies on one; each set of states once."""
    work = work or Work()
    cycles: dict[tuple[frozenset[str], bool], list[Cycle]] = {}
    complete = True
    try:
        for cycle in _each_cycle(graph, work):
            cycles.setdefault((frozenset(state for state, _ in cycle.steps), cycle.late), []).append(cycle)
    except WorkLimitError:
        complete = False
    return Cycles([_merged(alike) for alike in cycles.values()], complete)


def _each_cycle(graph: Graph, work: Work) -> Iterator[Cycle]:
    component, _ = graph.components
    seen: set[tuple[str, bool, str, str, tuple[int, ...]]] = set()
    for place, number in component.items():
        for step in graph.again(place):
            if component[step.dest] != number:
                continue
            alike = (place.state, place.late, step.event, step.dest.state, step.used)
            if alike not in seen:
                seen.add(alike)
                yield _cycle(place, _shortest(graph, place, step, component, work))


def _merged(alike: list[Cycle]) -> Cycle:
    """Of cycles through the same states, the one that the fewest limits bound; it names one that bounds all."""
    hardest = min(alike, key=lambda cycle: (len(cycle.bounds), len(cycle.steps), cycle.steps))
    common = set(hardest.bounds).intersection(*(cycle.bounds for cycle in alike))
    return hardest._replace(bounds=tuple(name for name in hardest.bounds if not common or name in common))


def _shortest(
    graph: Graph, start: Place, first: WalkStep, component: dict[Place, int], work: Work
) -> list[tuple[Place, WalkStep]]:
    """The shortest path from a place back to itself that begins with the given step."""
    came: dict[Place, tuple[Place, WalkStep]] = {first.dest: (start, first)}
    waiting = [first.dest] if first.dest != start else []
    for place in waiting:
        steps = graph.again(place)
        work.spend(len(steps))
        for step in steps:
            if step.dest not in came and component[step.dest] == component[start]:
                came[step.dest] = (place, step)
                waiting.append(step.dest)
        if start in came:
            break
    way = [came[start]]
    while way[-1][0] != start:
        way.append(came[way[-1][0]])
    return way[::-1]


def _cycle(start: Place, way: list[tuple[Place, WalkStep]]) -> Cycle:
    used = {index for _, step in way for index in step.used}
    steps = [(place.state, step.event) for place, step in way]
    first = steps.index(min(steps))  # the same cycle is shown in the same way, wherever it was entered
    return Cycle((*steps[first:], *steps[:first]), tuple(COUNTERS[index].name for index in sorted(used)), start.late)
