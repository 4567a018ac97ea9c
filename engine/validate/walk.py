"""The steps that an episode may take from a place.

Steps follow the executor: an action whose limit is reached has no event but `limit`; after the time limit every state
gets `limit`; every other action may fail; a reply that calls tools makes at least one call.

Counting is exact or approximate. When it is approximate, a counter with a limit only tells whether the limit is reached,
any use may reach it, and every guard may have either result.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import inf
from typing import NamedTuple

from engine.actions.action_facts import MAYBE_CALLS, NO_CALLS, SURE_CALLS
from engine.actions.facts import ACTIONS
from engine.limit import ALWAYS as ALWAYS_EVENTS
from engine.limit import FAILED, LIMIT, MAX_STEPS, OVERFLOW
from engine.limits import COUNTERS, COUNTERS_OF
from engine.validate.chart import TURNS, Chart, Counts, Edge, Limits, Place, WalkStep
from engine.validate.logic import ALWAYS, UNKNOWN, Formula, Ranges
from engine.validate.work import Work

_VARIABLES = tuple(limit.variable or "" for limit in COUNTERS)
_BY_CALLS = tuple(limit.per_use == "calls" for limit in COUNTERS)
"""Whether a use of the counter's action adds as many as the newest reply made calls."""
START: Counts = (0,) * len(COUNTERS)

After = tuple[Place, tuple[int, ...]]
"""The place after an action, and the counters that increased."""


class Walk:
    """Computes steps, and caches the results of guards.

    Every method raises WorkLimitError when `work` is used up.
    """

    def __init__(self, chart: Chart, work: Work, *, rough: bool = False) -> None:
        self.chart = chart
        self.rough = rough
        self.work = work
        limits = chart.limits
        self.limits: Limits = tuple(None if limit is None else 1 for limit in limits) if rough else limits
        """The limits of the counters, as this walk counts."""
        self.edges = {key: _blind(group) if rough else group for key, group in chart.edges}
        self.settled = {key: group[0].dest for key, group in self.edges.items() if group and group[0].guard is ALWAYS}
        self.actions = dict(chart.actions)
        self.events = dict(chart.events)
        self.caps = START if rough else _caps(chart)
        self.late_matters = not rough and any(
            edge.guard is not ALWAYS for (_, event), group in chart.edges if event in ALWAYS_EVENTS for edge in group
        )
        self.calling = any(_BY_CALLS[index] for name in self.actions.values() for index in COUNTERS_OF.get(name, ()))
        """Whether some action depends on the tool calls of the newest reply."""
        self._ranges: dict[Counts, Ranges] = {}
        self._guards: dict[int, _Guard] = {}

    def steps(self, place: Place) -> list[WalkStep]:
        """Return every step from a place, each once."""
        action = self.actions.get(place.state)
        if action is None:
            return []  # a final state, or one that does not exist
        found: list[WalkStep] = []
        if place.late or self.used_up(place, action):
            self.lead(found, place, LIMIT, ())
        else:
            done: dict[After, None] = {(place, ()): None}
            for event in self.events.get(place.state, ()):
                for after in self.after(place, action, event):
                    self.lead(found, after[0], event, after[1])
                    done[after] = None
            for after in done:  # a reward rule or a guard may fail after the action
                self.lead(found, after[0], FAILED, after[1])
            if place.state in self.chart.stoppable:
                self.lead(found, place, LIMIT, ())
            if self.chart.timed:
                counts = place.counts if self.late_matters else START
                self.lead(found, Place(place.state, counts, NO_CALLS, True), LIMIT, ())
        self.work.spend(len(found) + 1)
        return list(dict.fromkeys(found))

    def used_up(self, place: Place, action: str) -> bool:
        """Whether a counter of the action has reached its limit."""
        for index in COUNTERS_OF.get(action, ()):
            limit = self.limits[index]
            if limit is not None and place.counts[index] >= limit:
                return True
        return False

    def after(self, place: Place, action: str, event: str) -> list[After]:
        """The places after an action's own event, each with the counters that increased."""
        if event == OVERFLOW:  # the action does not run
            return [(place, ())]
        facts = ACTIONS.get(action)
        newest = place.newest
        if facts is not None and facts.calls is not None:
            newest = facts.calls.get(event, MAYBE_CALLS) if self.calling else NO_CALLS
        counters = COUNTERS_OF.get(action, ())
        found: list[After] = []
        for values in product(*(self._values(index, place) for index in counters)):
            counts = list(place.counts)
            for index, (value, _) in zip(counters, values, strict=True):
                counts[index] = value
            used = tuple(index for index, (_, increased) in zip(counters, values, strict=True) if increased)
            found.append((Place(place.state, tuple(counts), newest, place.late), used))
        return found

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
        return (count, limit) if self.rough else (min(count + 1, limit),)

    def ranges(self, counts: Counts) -> Ranges:
        """The ranges of the quantities that guards read at these counters."""
        found = self._ranges.get(counts)
        if found is None:
            found = self._ranges[counts] = _ranges(self.chart, counts, self.caps, rough=self.rough)
        return found

    def truth(self, guard: Formula, counts: Counts, work: Work | None = None) -> bool | None:
        """The result of a guard, computed once for each value of the counters that it reads; counted as `work`."""
        known = self._guards.get(id(guard))
        if known is None:  # keeping the guard prevents that another object gets its id
            known = self._guards[id(guard)] = _Guard(guard, guard.weight, _reads(guard), {})
        reads = known.reads
        key = tuple(counts[index] for index in reads)
        try:
            return known.truths[key]
        except KeyError:
            (work or self.work).spend(known.weight)
            found = known.truths[key] = guard.truth(self.ranges(counts))
            return found

    def lead(self, found: list[WalkStep], place: Place, event: str, used: tuple[int, ...]) -> None:
        """Add the transitions that an event may take, in the order in which they are tried."""
        settled = self.settled.get((place.state, event))
        if settled is not None:
            found.append(WalkStep(event, place._replace(state=settled), used))
            return
        unsure = False
        for edge in self.edges.get((place.state, event), ()):
            truth = True if edge.guard is ALWAYS else self.truth(edge.guard, place.counts)
            if truth is not False:
                found.append(WalkStep(event, place._replace(state=edge.dest), used))
            if truth is True and not unsure:
                return
            if truth is True:
                break
            unsure = unsure or truth is None
        if event != FAILED:  # no transition, no guard that holds, or an error in a guard: the event `failed`
            self.lead(found, place, FAILED, used)


class _Guard(NamedTuple):
    """A guard, and its results by the counters that it reads."""

    guard: Formula
    weight: int
    reads: tuple[int, ...]
    truths: dict[tuple[int, ...], bool | None]


def _reads(guard: Formula) -> tuple[int, ...]:
    """The counters on which a guard's result depends."""
    sampled = "tokens.sampled" in guard.reads
    return tuple(index for index, name in enumerate(_VARIABLES) if name in guard.reads or (sampled and index == TURNS))


def _blind(group: Iterable[Edge]) -> tuple[Edge, ...]:
    """Transitions whose guards may have either result, each destination once."""
    found: dict[str, Edge] = {}
    for edge in group:
        if edge.guard is ALWAYS:
            return (*found.values(), edge)
        found.setdefault(edge.dest, Edge(edge.dest, UNKNOWN))
    return tuple(found.values())


def _caps(chart: Chart) -> Counts:
    """For counters without a limit: a value above everything that guards compare them with. Larger values behave the same."""
    caps = list(START)
    for _, group in chart.edges:
        for edge in group:
            for index, name in enumerate(_VARIABLES):
                near = (int(abs(value)) + 2 for value in edge.guard.thresholds(name) if abs(value) < 1000)
                caps[index] = max([caps[index], *near])
    return tuple(caps)


def _ranges(chart: Chart, counts: Counts, caps: Counts, *, rough: bool) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for index, (name, count) in enumerate(zip(_VARIABLES, counts, strict=True)):
        limit = chart.limits[index]
        least, most = float(count), float(count)
        if rough:
            least, most = 0.0, float(MAX_STEPS) if limit is None else float(limit)
        elif limit is None and count >= caps[index]:
            most = float(MAX_STEPS)  # a count without a limit
        if _BY_CALLS[index]:  # the count of calls is a lower bound
            most = float(MAX_STEPS) * float(chart.most_sampled) if limit is None else float(limit)
        found[name] = (least, most)
    turns = found[_VARIABLES[TURNS]][1]
    found["tokens.sampled"] = (0.0, turns * chart.most_sampled if turns else 0.0)
    found["last.tokens"] = (0.0, float(chart.most_sampled))
    found.update(dict.fromkeys(("tokens.context", "last.calls"), (0.0, inf)))
    found["tools.errors"] = (0.0, inf)
    return found
