"""Everything that an episode may do, as a finite graph: its states together with what it has used up.

A place is a state, the turns and calls so far, what is known of the newest reply's calls, and whether time is up.
Steps follow the executor: a limit that is used up leaves an action no event but `limit`; once time is up, every
state meets `limit`; anything else may fail; a reply that called tools certainly makes at least one call.

Invariant: whatever an episode can do is a path here. The converse holds too, except that guards of what is not
counted here (facts, texts, rewards) may go either way, and that a graph of more than `MOST_PLACES` places is
replaced by that of smaller limits (`exact` is False then).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from typing import NamedTuple

from engine.checks.logic import ALWAYS, UNKNOWN, Formula, Ranges

MOST_PLACES = 60_000
SMALL = 5
"""What limits are cut to where the graph would grow beyond `MOST_PLACES`."""

MOST_STEPS = 100_000.0
"""No episode takes more steps (the executor ends it): what a count without a limit may come to."""

COUNTED: Mapping[str, str] = {"generate": "assistant_turns", "ask_user": "user_turns", "call_tools": "tool_calls"}
"""Which limit an action uses up."""
_INDEX = {"assistant_turns": 0, "user_turns": 1, "tool_calls": 2}
_VARIABLE = ("turns.assistant", "turns.user", "tools.calls")

NO_CALLS, MAYBE_CALLS, SURE_CALLS = 0, 1, 2
"""What is known of the newest reply: it made no call, perhaps some, certainly one."""
_CALLS = {
    "answered": NO_CALLS,
    "tool_calls": SURE_CALLS,
    "malformed": MAYBE_CALLS,
    "truncated": MAYBE_CALLS,
    "aborted": MAYBE_CALLS,
}


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
    limits: tuple[int | None, int | None, int | None]
    """`assistant_turns`, `user_turns`, `tool_calls`."""
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


@dataclass(slots=True)
class Graph:
    """Every place that can be come to, and the steps between them."""

    chart: Chart
    exact: bool
    limits: tuple[int | None, int | None, int | None]
    """Those that were walked by."""
    walk: _Walk
    walked: bool = True
    """False where even with small limits it was too large: then there are no places in it."""
    steps: dict[Place, list[Step]] = field(default_factory=dict)
    most: tuple[float, float, float] | None = None
    """The most turns, answers and calls on any way through it, once they were asked for."""
    _components: tuple[dict[Place, int], int] | None = None

    @property
    def components(self) -> tuple[dict[Place, int], int]:
        """Strongly connected places by number, and how many numbers there are; steps lead from higher to lower ones."""
        if self._components is None:
            self._components = components(self)
        return self._components

    def of_state(self, state: str) -> Iterator[Place]:
        """The places of one state."""
        return (place for place in self.steps if place.state == state)

    @property
    def states(self) -> frozenset[str]:
        """States that can be come to."""
        return frozenset(place.state for place in self.steps)

    def ranges(self, place: Place) -> Ranges:
        """What guards may read there."""
        return {} if place.late else self.walk.ranges(place)

    def truth(self, guard: Formula, place: Place) -> bool | None:
        """What a guard comes to there."""
        return None if place.late else self.walk.truth(guard, place)

    def at_rest(self) -> frozenset[Place]:
        """Places where nothing is done: time is up, or the action's limit is used up."""
        walk, actions = self.walk, self.walk.actions
        return frozenset(
            place
            for place in self.steps
            if place.late or (place.state in actions and walk.used_up(place, actions[place.state]))
        )

    def moments(self, state: str, event: str | None = None) -> Iterator[Place]:
        """How an episode may stand when a state has done its work (with this event), before it leaves."""
        walk = self.walk
        action = walk.actions.get(state)
        found: dict[Place, None] = {}
        for place in self.of_state(state):
            if action is None or event in ("limit", "failed"):
                found[place] = None
            elif not place.late and not walk.used_up(place, action):
                for own in walk.events.get(state, ()):
                    if event is None or own == event:
                        found.update(dict.fromkeys(after for after, _ in walk.after(place, action, own)))
        yield from found


@lru_cache(maxsize=32)
def explore(chart: Chart) -> Graph:
    """Walk through everything."""
    graph = _walk(chart, chart.limits, exact=True)
    if graph is not None:
        return graph
    cut = tuple(None if limit is None else min(limit, SMALL) for limit in chart.limits)
    graph = _walk(_blind(chart), (cut[0], cut[1], cut[2]), exact=False)
    assert graph is not None
    return graph


def _blind(chart: Chart) -> Chart:
    """The chart with every guard going either way: the limits that guards were read with no longer hold."""
    edges = tuple(
        (key, tuple(Edge(edge.dest, edge.guard if edge.guard is ALWAYS else UNKNOWN) for edge in group))
        for key, group in chart.edges
    )
    return Chart(
        chart.initial, chart.actions, chart.events, edges, chart.limits, chart.timed, most_sampled=chart.most_sampled
    )


def _caps(chart: Chart) -> tuple[int, int, int]:
    """For counters without a limit: one more than any guard compares them with, beyond which all are alike."""
    caps = [0, 0, 0]
    for _, group in chart.edges:
        for edge in group:
            for literal in edge.guard.literals():
                for term, factor in literal.linear:
                    if term in _VARIABLE and isinstance(literal.value, int | float):
                        bound = abs(literal.value / factor)
                        index = _VARIABLE.index(term)
                        caps[index] = max(caps[index], int(bound) + 2 if bound < 1000 else 0)
    return caps[0], caps[1], caps[2]


class _Walk:
    def __init__(self, chart: Chart, limits: tuple[int | None, int | None, int | None]) -> None:
        self.chart = chart
        self.limits = limits
        self.caps = _caps(chart)
        self._ranges: dict[tuple[int, int, int], Ranges] = {}
        self._truths: dict[tuple[int, int, int, int], bool | None] = {}
        self._kept: list[Formula] = []
        self.actions = dict(chart.actions)
        self.events = dict(chart.events)
        self.edges = dict(chart.edges)
        self.late_matters = any(
            edge.guard is not ALWAYS
            for (_, event), group in chart.edges
            if event in ("limit", "failed")
            for edge in group
        )
        self.calling = any(action == "call_tools" for action in self.actions.values())

    def steps(self, place: Place) -> Iterator[Step]:
        """Every step from a place."""
        action = self.actions.get(place.state)
        if action is None:
            return  # a final state, or none at all
        if place.late or self.used_up(place, action):
            yield from self.lead(place, "limit", None)
            return
        for event in self.events.get(place.state, ()):
            for after, counter in self.after(place, action, event):
                yield from self.lead(after, event, counter)
                yield from self.lead(after, "failed", counter)  # a rule or a guard may fail behind the work
        yield from self.lead(place, "failed", None)
        if action == "generate":  # the prompt may fill the context
            yield from self.lead(place, "limit", None)
        if self.chart.timed:
            counts = place.counts if self.late_matters else (0, 0, 0)
            yield from self.lead(Place(place.state, *counts, NO_CALLS, True), "limit", None)

    def used_up(self, place: Place, action: str) -> bool:
        """Whether the action's limit leaves it nothing."""
        used = _INDEX.get(COUNTED.get(action, ""))
        limit = None if used is None else self.limits[used]
        return used is not None and limit is not None and place.counts[used] >= limit

    def after(self, place: Place, action: str, event: str) -> Iterator[tuple[Place, int | None]]:
        """What an action's own event leaves behind, and the counter that it moves."""
        state, turns, user, calls, newest, late = place
        if action == "generate":
            known = _CALLS.get(event, MAYBE_CALLS) if self.calling else NO_CALLS
            yield Place(state, self.more(0, turns), user, calls, known, late), 0
        elif action == "ask_user":
            yield Place(state, turns, self.more(1, user), calls, newest, late), 1
        elif action == "call_tools":
            if newest != SURE_CALLS:
                yield place, None
            if newest != NO_CALLS:
                yield Place(state, turns, user, self.more(2, calls), newest, late), 2
                if (limit := self.limits[2]) is not None:  # all that are left, in one turn
                    yield Place(state, turns, user, limit, newest, late), 2
        else:
            yield place, None

    def more(self, index: int, count: int) -> int:
        limit = self.limits[index]
        return min(count + 1, self.caps[index] if limit is None else limit)

    def ranges(self, place: Place) -> Ranges:
        """What guards may read."""
        counts = place.counts
        found = self._ranges.get(counts)
        if found is None:
            found = self._ranges[counts] = _ranges(self.chart, counts, self.limits, self.caps)
        return found

    def truth(self, guard: Formula, place: Place) -> bool | None:
        """What a guard comes to, asked once for each case."""
        key = (id(guard), place.turns, place.user, place.calls)
        try:
            return self._truths[key]
        except KeyError:
            self._kept.append(guard)  # so that no other guard gets its id
            found = self._truths[key] = guard.truth(self.ranges(place))
            return found

    def lead(self, place: Place, event: str, used: int | None) -> Iterator[Step]:
        """The transitions that an event may take, in their order."""
        unsure = False
        for edge in self.edges.get((place.state, event), ()):
            truth: bool | None = True
            if edge.guard is not ALWAYS:
                truth = self.truth(edge.guard, place)
            if truth is not False:
                yield Step(event, Place(edge.dest, *place[1:]), used)
            if truth is True and not unsure:
                return
            if truth is True:
                break
            unsure = unsure or truth is None
        if event != "failed":  # nothing handles it, no guard held, or one could not be told: that is a failure
            yield from self.lead(place, "failed", used)


def _ranges(
    chart: Chart, counts: Iterable[int], limits: tuple[int | None, int | None, int | None], caps: tuple[int, int, int]
) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for index, (name, count) in enumerate(zip(_VARIABLE, counts, strict=True)):
        limit = limits[index]
        open_end = limit is None and count >= caps[index]
        most = MOST_STEPS if open_end else float(count)
        if index == _INDEX["tool_calls"]:  # calls are counted from below
            most = MOST_STEPS * float(chart.most_sampled) if limit is None else float(limit)
        found[name] = (float(count), most)
    turns = found["turns.assistant"][1]
    found["tokens.sampled"] = (0.0, turns * chart.most_sampled if turns else 0.0)
    found["last.tokens"] = (0.0, float(chart.most_sampled))
    found.update(dict.fromkeys(("tokens.context", "last.calls"), (0.0, inf)))
    found["tools.errors"] = (0.0, inf)
    return found


def _walk(chart: Chart, limits: tuple[int | None, int | None, int | None], *, exact: bool) -> Graph | None:
    """The graph; None where it is too large."""
    walk = _Walk(chart, limits)
    graph = Graph(chart, exact, limits, walk)
    start = Place(chart.initial, 0, 0, 0)
    waiting = [start]
    graph.steps[start] = []
    while waiting:
        place = waiting.pop()
        steps = list(dict.fromkeys(walk.steps(place)))
        graph.steps[place] = steps
        for step in steps:
            if step.dest not in graph.steps:
                graph.steps[step.dest] = []
                waiting.append(step.dest)
        if exact and len(graph.steps) > MOST_PLACES:
            return None
    return graph


def components(graph: Graph) -> tuple[dict[Place, int], int]:
    """Strongly connected places by number, in an order in which steps lead from higher numbers to lower ones.

    Tarjan's algorithm (1972), without recursion.
    """
    number: dict[Place, int] = {}
    low: dict[Place, int] = {}
    component: dict[Place, int] = {}
    stack: list[Place] = []
    found = 0
    for root in graph.steps:
        if root in number:
            continue
        work = [(root, iter(graph.steps[root]))]
        number[root] = low[root] = len(number)
        stack.append(root)
        while work:
            place, steps = work[-1]
            for step in steps:
                dest = step.dest
                if dest not in number:
                    number[dest] = low[dest] = len(number)
                    stack.append(dest)
                    work.append((dest, iter(graph.steps[dest])))
                    break
                if dest not in component:
                    low[place] = min(low[place], number[dest])
            else:
                work.pop()
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[place])
                if low[place] == number[place]:
                    while True:
                        member = stack.pop()
                        component[member] = found
                        if member == place:
                            break
                    found += 1
    return component, found
