"""Everything that an episode may do, as a finite graph.

A node (`Place`) is a state of the machine with the turns and calls so far, what is known about the newest reply's calls,
and whether the time limit has passed.

Every episode is a path in this graph. Every path is a possible episode, except that guards on values that are not counted
here (facts, texts, rewards) may have either result. If the graph would take more than `MAX_WORK`, an approximate one
replaces it (`exact` is False): it knows of each counter only whether its limit is reached. A machine that is too large
even for that has an empty graph (`walked` is False).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from engine.limit import ALWAYS as ALWAYS_EVENTS
from engine.validate.chart import Chart, Edge, Limits, Place, WalkStep
from engine.validate.logic import Formula, Ranges
from engine.validate.walk import START, Walk
from engine.validate.work import Work, WorkLimitError

MAX_WORK = 150_000
"""Steps and comparisons that computing one graph may take."""


@dataclass(slots=True)
class Graph:
    """The reachable places, and the steps between them."""

    walk: Walk
    exact: bool
    walked: bool = True
    """False if even the approximate graph takes too much work: then it is empty."""
    steps: dict[Place, list[WalkStep]] = field(default_factory=dict)
    most: tuple[float, ...] | None = None
    """The maximum of each counter on any path; computed by `most_counts`."""
    _components: tuple[dict[Place, int], int] | None = None
    _of_state: dict[str, list[Place]] | None = None
    _moments: dict[tuple[str, str | None], tuple[Place, ...]] = field(default_factory=dict)

    @property
    def chart(self) -> Chart:
        """The machine."""
        return self.walk.chart

    @property
    def limits(self) -> Limits:
        """The limits of the counters in this graph."""
        return self.walk.limits

    @property
    def components(self) -> tuple[dict[Place, int], int]:
        """The strongly connected component of each place, and how many there are; steps lead from higher to lower numbers."""
        if self._components is None:
            self._components = components(self)
        return self._components

    def again(self, place: Place) -> list[WalkStep]:
        """The steps that may be taken any number of times: in an approximate graph, those that no limit counts."""
        steps = self.steps[place]
        if self.exact:
            return steps
        return [step for step in steps if all(self.limits[index] is None for index in step.used)]

    def of_state(self, state: str) -> list[Place]:
        """The places of one state."""
        if self._of_state is None:
            self._of_state = {}
            for place in self.steps:
                self._of_state.setdefault(place.state, []).append(place)
        return self._of_state.get(state, [])

    @property
    def states(self) -> frozenset[str]:
        """The reachable states."""
        return frozenset(place.state for place in self.steps)

    def ranges(self, place: Place) -> Ranges:
        """The ranges of the quantities that guards read at a place."""
        return {} if place.late else self.walk.ranges(place.counts)

    def truth(self, guard: Formula, place: Place, work: Work) -> bool | None:
        """The result of a guard at a place; None if it may be either."""
        work.spend()
        return None if place.late else self.walk.truth(guard, place.counts, work)

    def at_rest(self) -> frozenset[Place]:
        """Places where the action does not run: the time limit or the action's own limit is reached."""
        walk, actions = self.walk, self.walk.actions
        return frozenset(
            place
            for place in self.steps
            if place.late or (place.state in actions and walk.used_up(place, actions[place.state]))
        )

    def moments(self, state: str, event: str | None = None) -> tuple[Place, ...]:
        """The places after a state's action has run (with this event), before the transition."""
        found = self._moments.get((state, event))
        if found is None:
            found = self._moments[state, event] = tuple(dict.fromkeys(self._stand(state, event)))
        return found

    def _stand(self, state: str, event: str | None) -> Iterator[Place]:
        walk = self.walk
        action = walk.actions.get(state)
        for place in self.of_state(state):
            if action is None or event in ALWAYS_EVENTS:
                yield place
            elif not place.late and not walk.used_up(place, action):
                for own in walk.events.get(state, ()):
                    if event is None or own == event:
                        yield from (after for after, _ in walk.after(place, action, own))


@lru_cache(maxsize=32)
def explore(chart: Chart) -> Graph:
    """Compute the graph of a chart."""
    for rough in (False, True):
        graph = Graph(Walk(chart, Work(MAX_WORK), rough=rough), exact=not rough)
        try:
            _walk(graph)
        except WorkLimitError:
            continue
        graph.walk.work = Work()
        return graph
    return Graph(Walk(chart, Work(), rough=True), exact=False, walked=False)


def _walk(graph: Graph) -> None:
    """Add every reachable place to a graph.

    Raises:
        WorkLimitError: the graph takes more work than allowed.
    """
    start = Place(graph.chart.initial, START)
    steps = graph.steps
    steps[start] = []
    waiting = [start]
    while waiting:
        place = waiting.pop()
        steps[place] = found = graph.walk.steps(place)
        for step in found:
            if step.dest not in steps:
                steps[step.dest] = []
                waiting.append(step.dest)


def components(graph: Graph) -> tuple[dict[Place, int], int]:
    """Number the strongly connected components, so that steps lead from higher to lower numbers.

    Only steps that may be taken any number of times count. Tarjan's algorithm (1972), without recursion.
    """
    number: dict[Place, int] = {}
    low: dict[Place, int] = {}
    component: dict[Place, int] = {}
    stack: list[Place] = []
    found = 0
    for root in graph.steps:
        if root in number:
            continue
        work = [(root, iter(graph.again(root)))]
        number[root] = low[root] = len(number)
        stack.append(root)
        while work:
            place, steps = work[-1]
            for step in steps:
                dest = step.dest
                if dest not in number:
                    number[dest] = low[dest] = len(number)
                    stack.append(dest)
                    work.append((dest, iter(graph.again(dest))))
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


__all__ = ["Chart", "Edge", "Graph", "Place", "WalkStep", "components", "explore"]
