"""Everything that an episode may do, as a finite graph.

A node (`Place`) is a state of the machine with the turns and calls so far, what is known about the newest reply's
calls, and whether the time limit has passed.

Every episode is a path in this graph. Every path is a possible episode, except that guards on values that are not
counted here (facts, texts, rewards) may have either result. If the graph would take more than `MAX_WORK`, an
approximate one replaces it (`exact` is False): it knows of each counter only whether its limit is reached. A machine
that is too large even for that has an empty graph (`walked` is False).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import inf
from typing import NamedTuple

from engine.actions.action_facts import MAYBE_CALLS, NO_CALLS, SURE_CALLS
from engine.actions.facts import ACTIONS
from engine.limits import COUNTERS, COUNTERS_OF
from engine.machine.operators import NUMBERS
from engine.schemas.limits import ALWAYS as ALWAYS_EVENTS
from engine.schemas.limits import FAILED, LIMIT, MAX_STEPS, OVERFLOW
from engine.validate.logic import ALWAYS, UNKNOWN, Formula, Ranges
from engine.validate.work import Work, WorkLimitError

Limits = tuple[int | None, ...]
"""The values of `engine.limits.COUNTERS`, in that order; None if one is not set."""
Edge = tuple[str, Formula]
"""One transition: its destination and its guard."""
Counts = tuple[int, ...]
"""The counts of `engine.limits.COUNTERS`, in that order."""

TURNS = next(index for index, limit in enumerate(COUNTERS) if limit.action is not None and ACTIONS[limit.action].calls)
"""The counter of replies: each samples at most the tokens of one turn."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A machine in the form in which `explore` walks it."""

    initial: str
    actions: tuple[tuple[str, str], ...]
    """(state, action) of every state that is not final."""
    events: tuple[tuple[str, tuple[str, ...]], ...]
    """(state, the events of its action)."""
    edges: tuple[tuple[tuple[str, str], tuple[Edge, ...]], ...]
    """((state, event), its transitions in the order in which they are tried); at least one."""
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


_VARIABLES = tuple(limit.variable or "" for limit in COUNTERS)
_BY_CALLS = tuple(limit.per_use == "calls" for limit in COUNTERS)
"""Whether a use of the counter's action adds as many as the newest reply made calls."""
START: Counts = (0,) * len(COUNTERS)

After = tuple[Place, tuple[int, ...]]
"""The place after an action, and the counters that increased."""


class Graph:
    """The reachable places, and the steps between them; it caches the results of guards.

    Methods raise WorkLimitError when `work` is used up.
    """

    def __init__(self, chart: Chart, work: Work, *, rough: bool = False) -> None:
        self.chart = chart
        self.exact = not rough
        self.walked = True
        """False if even the approximate graph takes too much work: then it is empty."""
        self.steps: dict[Place, list[WalkStep]] = {}
        self.most: tuple[float, ...] | None = None
        """The maximum of each counter on any path; computed by `most_counts`."""
        self.work = work
        limits = chart.limits
        self.limits: Limits = tuple(None if limit is None else 1 for limit in limits) if rough else limits
        """The limits of the counters, as this graph counts."""
        self.edges = {key: _blind(group) if rough else group for key, group in chart.edges}
        self.settled = {key: dest for key, ((dest, guard), *_) in self.edges.items() if guard is ALWAYS}
        self.actions = dict(chart.actions)
        self.events = dict(chart.events)
        guards = [] if rough else [guard for _, group in chart.edges for _, guard in group]
        constants = (
            {constant for guard in guards for constant in guard.constants.get(name, ())} for name in _VARIABLES
        )
        compared = ([abs(value) for kind, value in values if kind in NUMBERS] for values in constants)
        self.caps = tuple(max((int(value) + 2 for value in values if value < 1000), default=0) for values in compared)
        """For counters without a limit: a value above all with which guards compare them."""
        self.late_matters = not rough and any(
            guard is not ALWAYS for (_, event), group in chart.edges if event in ALWAYS_EVENTS for _, guard in group
        )
        self.calling = any(_BY_CALLS[index] for name in self.actions.values() for index in COUNTERS_OF.get(name, ()))
        """Whether some action depends on the tool calls of the newest reply."""
        self._ranges: dict[Counts, Ranges] = {}
        self._guards: dict[int, tuple[Formula, tuple[int, ...], dict[tuple[int, ...], bool | None]]] = {}
        """By id, each guard with the counters that it reads and its results by their values."""
        self._moments: dict[tuple[str, str | None], tuple[Place, ...]] = {}

    def walk(self) -> None:
        """Add every reachable place."""
        start = Place(self.chart.initial, START)
        self.steps[start] = []
        waiting = [start]
        while waiting:
            place = waiting.pop()
            self.steps[place] = steps = self._steps_from(place)
            for step in steps:
                if step.dest not in self.steps:
                    self.steps[step.dest] = []
                    waiting.append(step.dest)

    def _steps_from(self, place: Place) -> list[WalkStep]:
        """Return every step from a place, each once."""
        action = self.actions.get(place.state)
        if action is None:
            return []  # a final state, or one that does not exist
        steps: list[WalkStep] = []
        if self.rests(place):
            self.lead(steps, place, LIMIT, ())
        else:
            done: dict[After, None] = {(place, ()): None}
            for event in self.events.get(place.state, ()):
                for after in self.after(place, action, event):
                    self.lead(steps, after[0], event, after[1])
                    done[after] = None
            for after in done:  # a reward rule or a guard may fail after the action
                self.lead(steps, after[0], FAILED, after[1])
            if place.state in self.chart.stoppable:
                self.lead(steps, place, LIMIT, ())
            if self.chart.timed:
                counts = place.counts if self.late_matters else START
                self.lead(steps, Place(place.state, counts, NO_CALLS, True), LIMIT, ())
        self.work.spend(len(steps) + 1)
        return list(dict.fromkeys(steps))

    def rests(self, place: Place) -> bool:
        """Whether the action does not run at a place: the time limit or the action's own limit is reached."""
        return place.late or any(
            (limit := self.limits[index]) is not None and place.counts[index] >= limit
            for index in COUNTERS_OF.get(self.actions.get(place.state, ""), ())
        )

    def after(self, place: Place, action: str, event: str) -> list[After]:
        """The places after an action's own event, each with the counters that increased."""
        if event == OVERFLOW:  # the action does not run
            return [(place, ())]
        facts = ACTIONS.get(action)
        newest = place.newest
        if facts is not None and facts.calls is not None:
            newest = facts.calls.get(event, MAYBE_CALLS) if self.calling else NO_CALLS
        counters = COUNTERS_OF.get(action, ())
        places: list[After] = []
        for values in product(*(self._values(index, place) for index in counters)):
            counts = list(place.counts)
            for index, (value, _) in zip(counters, values, strict=True):
                counts[index] = value
            used = tuple(index for index, (_, increased) in zip(counters, values, strict=True) if increased)
            places.append((Place(place.state, tuple(counts), newest, place.late), used))
        return places

    def _values(self, index: int, place: Place) -> list[tuple[int, bool]]:
        """The values that a counter may have after its action ran, each with whether it increased."""
        count = place.counts[index]
        if not _BY_CALLS[index]:
            return [(value, True) for value in self.more(index, count)]
        values = [] if place.newest == SURE_CALLS else [(count, False)]
        if place.newest != NO_CALLS:
            values += [(value, True) for value in self.more(index, count)]
            if (limit := self.limits[index]) is not None and (limit, True) not in values:
                values.append((limit, True))  # all remaining calls in one turn
        return values

    def more(self, index: int, count: int) -> tuple[int, ...]:
        """The values that a counter may have after one more use."""
        limit = self.limits[index]
        if limit is None:
            return (min(count + 1, self.caps[index]),)
        return (min(count + 1, limit),) if self.exact else (count, limit)

    def ranges(self, counts: Counts) -> Ranges:
        """The ranges of the quantities that guards read at these counters."""
        ranges = self._ranges.get(counts)
        if ranges is None:
            ranges = self._ranges[counts] = _ranges(self.chart, counts, self.caps, rough=not self.exact)
        return ranges

    def _truth(self, guard: Formula, counts: Counts, work: Work) -> bool | None:
        """The result of a guard, computed once for each value of the counters that it reads; counted as `work`."""
        cached = self._guards.get(id(guard))
        if cached is None:  # keeping the guard prevents that another object gets its id
            sampled = "tokens.sampled" in guard.reads
            counters = enumerate(_VARIABLES)
            reads = tuple(index for index, name in counters if name in guard.reads or (sampled and index == TURNS))
            cached = self._guards[id(guard)] = (guard, reads, {})
        _, reads, truths = cached
        key = tuple(counts[index] for index in reads)
        if key not in truths:
            work.spend(guard.weight)
            truths[key] = guard.truth(self.ranges(counts))
        return truths[key]

    def lead(self, found: list[WalkStep], place: Place, event: str, used: tuple[int, ...]) -> None:
        """Add the transitions that an event may take, in the order in which they are tried."""
        settled = self.settled.get((place.state, event))
        if settled is not None:
            found.append(WalkStep(event, place._replace(state=settled), used))
            return
        unsure = False
        for dest, guard in self.edges.get((place.state, event), ()):
            truth = True if guard is ALWAYS else self._truth(guard, place.counts, self.work)
            if truth is not False:
                found.append(WalkStep(event, place._replace(state=dest), used))
            if truth is True and not unsure:
                return
            if truth is True:
                break
            unsure = unsure or truth is None
        if event != FAILED:  # no transition, no guard that holds, or an error in a guard: the event `failed`
            self.lead(found, place, FAILED, used)

    @cached_property
    def components(self) -> tuple[dict[Place, int], int]:
        """The strongly connected component of each place, and their number; steps lead from higher to lower ones.

        Only steps that may be taken any number of times count. Tarjan's algorithm (1972), without recursion.
        """
        number: dict[Place, int] = {}
        low: dict[Place, int] = {}
        component: dict[Place, int] = {}
        stack: list[Place] = []
        count = 0
        for root in self.steps:
            if root in number:
                continue
            work = [(root, iter(self.again(root)))]
            number[root] = low[root] = len(number)
            stack.append(root)
            while work:
                place, steps = work[-1]
                for step in steps:
                    dest = step.dest
                    if dest not in number:
                        number[dest] = low[dest] = len(number)
                        stack.append(dest)
                        work.append((dest, iter(self.again(dest))))
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
                            component[member] = count
                            if member == place:
                                break
                        count += 1
        return component, count

    def again(self, place: Place) -> list[WalkStep]:
        """The steps that may be taken any number of times: in an approximate graph, those that no limit counts."""
        steps = self.steps[place]
        return steps if self.exact else [step for step in steps if all(self.limits[i] is None for i in step.used)]

    @cached_property
    def by_state(self) -> dict[str, list[Place]]:
        """The reachable states, each with its places."""
        places: dict[str, list[Place]] = {}
        for place in self.steps:
            places.setdefault(place.state, []).append(place)
        return places

    def truth(self, guard: Formula, place: Place, work: Work) -> bool | None:
        """The result of a guard at a place; None if it may be either."""
        work.spend()
        return None if place.late else self._truth(guard, place.counts, work)

    def moments(self, state: str, event: str | None = None) -> tuple[Place, ...]:
        """The places after a state's action has run (with this event), before the transition."""
        places = self._moments.get((state, event))
        if places is None:
            action, own_events = self.actions.get(state), self.events.get(state, ())
            taken = [own_event for own_event in own_events if event in (None, own_event)]
            reached: dict[Place, None] = {}
            for place in self.by_state.get(state, ()):
                if action is None or event in ALWAYS_EVENTS:
                    reached[place] = None
                elif not self.rests(place):
                    for own_event in taken:
                        reached |= dict.fromkeys(after for after, _ in self.after(place, action, own_event))
            places = self._moments[state, event] = tuple(reached)
        return places


def _blind(group: Iterable[Edge]) -> tuple[Edge, ...]:
    """Transitions whose guards may have either result, each destination once."""
    edges: dict[str, Formula] = {}
    for dest, guard in group:
        if guard is ALWAYS:
            return (*edges.items(), (dest, guard))
        edges.setdefault(dest, UNKNOWN)
    return tuple(edges.items())


def _ranges(chart: Chart, counts: Counts, caps: Counts, *, rough: bool) -> dict[str, tuple[float, float]]:
    ranges: dict[str, tuple[float, float]] = {}
    for index, (name, count) in enumerate(zip(_VARIABLES, counts, strict=True)):
        limit = chart.limits[index]
        least, most = float(count), float(count)
        if rough:
            least, most = 0.0, float(MAX_STEPS) if limit is None else float(limit)
        elif limit is None and count >= caps[index]:
            most = float(MAX_STEPS)  # a count without a limit
        if _BY_CALLS[index]:  # the count of calls is a lower bound
            most = float(MAX_STEPS) * float(chart.most_sampled) if limit is None else float(limit)
        ranges[name] = (least, most)
    turns = ranges[_VARIABLES[TURNS]][1]
    ranges["tokens.sampled"] = (0.0, turns * chart.most_sampled if turns else 0.0)
    ranges["last.tokens"] = (0.0, float(chart.most_sampled))
    return ranges | dict.fromkeys(("tokens.context", "last.calls", "tools.errors"), (0.0, inf))


MAX_WORK = 150_000
"""Steps and comparisons that computing one graph may take."""


@lru_cache(maxsize=32)
def explore(chart: Chart) -> Graph:
    """Compute the graph of a chart."""
    for rough in (False, True):
        graph = Graph(chart, Work(MAX_WORK), rough=rough)
        try:
            graph.walk()
        except WorkLimitError:
            continue
        graph.work = Work()
        return graph
    graph = Graph(chart, Work(), rough=True)
    graph.walked = False
    return graph


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


def cycles_of(graph: Graph, work: Work | None = None) -> tuple[list[Cycle], bool]:
    """Return the shortest cycle through each step that lies on one, each set of states once; and whether all were
    found."""
    work = work or Work()
    component, _ = graph.components
    first: dict[tuple[str, bool, str, str, tuple[int, ...]], tuple[Place, WalkStep]] = {}
    for place, number in component.items():
        for step in graph.again(place):
            if component[step.dest] == number:
                first.setdefault((place.state, place.late, step.event, step.dest.state, step.used), (place, step))
    cycles: dict[tuple[frozenset[str], bool], list[Cycle]] = {}
    complete = True
    try:
        for place, step in first.values():
            cycle = _shortest(graph, place, step, component, work)
            cycles.setdefault((frozenset(state for state, _ in cycle.steps), cycle.late), []).append(cycle)
    except WorkLimitError:
        complete = False
    merged = []
    for alike in cycles.values():  # through the same states: the one that the fewest limits bound names one for all
        hardest = min(alike, key=lambda cycle: (len(cycle.bounds), len(cycle.steps), cycle.steps))
        common = set(hardest.bounds).intersection(*(cycle.bounds for cycle in alike))
        bounds = tuple(name for name in hardest.bounds if not common or name in common)
        merged.append(hardest._replace(bounds=bounds))
    return merged, complete


def _shortest(graph: Graph, start: Place, first: WalkStep, component: dict[Place, int], work: Work) -> Cycle:
    """The shortest cycle through a place that begins with the given step."""
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
    used = {index for _, step in way for index in step.used}
    taken = [(place.state, step.event) for place, step in reversed(way)]
    least = taken.index(min(taken))  # the same cycle is shown in the same way, wherever it was entered
    return Cycle((*taken[least:], *taken[:least]), tuple(COUNTERS[index].name for index in sorted(used)), start.late)
