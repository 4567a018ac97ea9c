"""The steps that an episode may take from a place.

Steps follow the executor: an action whose limit is reached has no event but `limit`; after the time limit every state
gets `limit`; every other action may fail; a reply that calls tools makes at least one call.

Counting is exact or approximate. When it is approximate, a counter with a limit only tells whether the limit is reached,
any use may reach it, and every guard may have either result.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from engine.actions.facts import ACTIONS, COUNT_LIMIT_OF, COUNT_LIMITS, MOST_STEPS
from engine.checks.chart import MAYBE_CALLS, NO_CALLS, SURE_CALLS, Chart, Edge, Limits, Place, WalkStep
from engine.checks.logic import ALWAYS, UNKNOWN, Formula, Ranges
from engine.checks.work import Work

_INDEX = {limit.name: index for index, limit in enumerate(COUNT_LIMITS)}
_VARIABLE = tuple(limit.variable for limit in COUNT_LIMITS)
_CALLS = {
    "answered": NO_CALLS,
    "tool_calls": SURE_CALLS,
    "malformed": MAYBE_CALLS,
    "truncated": MAYBE_CALLS,
    "aborted": MAYBE_CALLS,
}

Counts = tuple[int, int, int]


class Walk:
    """Computes steps, and caches the results of guards.

    Every method raises TooMuch when `work` is used up.
    """

    def __init__(self, chart: Chart, work: Work, *, rough: bool = False) -> None:
        self.chart = chart
        self.rough = rough
        self.work = work
        limits = chart.limits
        self.limits: Limits = (_one(limits[0]), _one(limits[1]), _one(limits[2])) if rough else limits
        """The limits of the counters, as this walk counts."""
        self.edges = {key: _blind(group) if rough else group for key, group in chart.edges}
        self.settled = {key: group[0].dest for key, group in self.edges.items() if group and group[0].guard is ALWAYS}
        self.actions = dict(chart.actions)
        self.events = dict(chart.events)
        self.caps = (0, 0, 0) if rough else _caps(chart)
        self.late_matters = not rough and any(
            edge.guard is not ALWAYS
            for (_, event), group in chart.edges
            if event in ("limit", "failed")
            for edge in group
        )
        self.calling = any(action == "call_tools" for action in self.actions.values())
        self._ranges: dict[Counts, Ranges] = {}
        self._guards: dict[int, _Guard] = {}

    def steps(self, place: Place) -> list[WalkStep]:
        """Return every step from a place, each once."""
        action = self.actions.get(place.state)
        if action is None:
            return []  # a final state, or one that does not exist
        found: list[WalkStep] = []
        if place.late or self.used_up(place, action):
            self.lead(found, place, "limit", None)
        else:
            done: dict[tuple[Place, int | None], None] = {(place, None): None}
            for event in self.events.get(place.state, ()):
                for after in self.after(place, action, event):
                    self.lead(found, after[0], event, after[1])
                    done[after] = None
            for after in done:  # a reward rule or a guard may fail after the action
                self.lead(found, after[0], "failed", after[1])
            if action in ACTIONS and ACTIONS[action].needs_context:  # the prompt may fill the context
                self.lead(found, place, "limit", None)
            if self.chart.timed:
                counts = place.counts if self.late_matters else (0, 0, 0)
                self.lead(found, Place(place.state, *counts, NO_CALLS, True), "limit", None)
        self.work.spend(len(found) + 1)
        return list(dict.fromkeys(found))

    def used_up(self, place: Place, action: str) -> bool:
        """Whether the action's limit is reached."""
        counted = COUNT_LIMIT_OF.get(action)
        if counted is None:
            return False
        index = _INDEX[counted.name]
        limit = self.limits[index]
        return limit is not None and place.counts[index] >= limit

    def after(self, place: Place, action: str, event: str) -> list[tuple[Place, int | None]]:
        """The places after an action's own event, each with the counter that increased."""
        state, turns, user, calls, newest, late = place
        if action == "generate":
            known = _CALLS.get(event, MAYBE_CALLS) if self.calling else NO_CALLS
            return [(Place(state, more, user, calls, known, late), 0) for more in self.more(0, turns)]
        if action == "ask_user":
            return [(Place(state, turns, more, calls, newest, late), 1) for more in self.more(1, user)]
        if action == "call_tools":
            left: list[tuple[Place, int | None]] = [] if newest == SURE_CALLS else [(place, None)]
            if newest != NO_CALLS:
                counts = list(self.more(2, calls))
                if (limit := self.limits[2]) is not None:
                    counts.append(limit)  # all remaining calls in one turn
                left += [(Place(state, turns, user, more, newest, late), 2) for more in dict.fromkeys(counts)]
            return left
        return [(place, None)]

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
        key = (reads[0] and counts[0], reads[1] and counts[1], reads[2] and counts[2])
        try:
            return known.truths[key]
        except KeyError:
            (work or self.work).spend(known.weight)
            found = known.truths[key] = guard.truth(self.ranges(counts))
            return found

    def lead(self, found: list[WalkStep], place: Place, event: str, used: int | None) -> None:
        """Add the transitions that an event may take, in the order in which they are tried."""
        settled = self.settled.get((place.state, event))
        if settled is not None:
            found.append(WalkStep(event, Place(settled, *place[1:]), used))
            return
        unsure = False
        for edge in self.edges.get((place.state, event), ()):
            truth = True if edge.guard is ALWAYS else self.truth(edge.guard, place.counts)
            if truth is not False:
                found.append(WalkStep(event, Place(edge.dest, *place[1:]), used))
            if truth is True and not unsure:
                return
            if truth is True:
                break
            unsure = unsure or truth is None
        if event != "failed":  # no transition, no guard that holds, or an error in a guard: the event `failed`
            self.lead(found, place, "failed", used)


class _Guard(NamedTuple):
    """A guard, and its results by the counters that it reads."""

    guard: Formula
    weight: int
    reads: tuple[bool, bool, bool]
    truths: dict[tuple[int, int, int], bool | None]


def _reads(guard: Formula) -> tuple[bool, bool, bool]:
    assistant, user, calls = _VARIABLE
    return not guard.reads.isdisjoint((assistant, "tokens.sampled")), user in guard.reads, calls in guard.reads


def _one(limit: int | None) -> int | None:
    return None if limit is None else 1


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
    caps = [0, 0, 0]
    for _, group in chart.edges:
        for edge in group:
            for index, name in enumerate(_VARIABLE):
                near = (int(abs(value)) + 2 for value in edge.guard.thresholds(name) if abs(value) < 1000)
                caps[index] = max([caps[index], *near])
    return caps[0], caps[1], caps[2]


def _ranges(chart: Chart, counts: Counts, caps: Counts, *, rough: bool) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for index, (name, count) in enumerate(zip(_VARIABLE, counts, strict=True)):
        limit = chart.limits[index]
        least, most = float(count), float(count)
        if rough:
            least, most = 0.0, float(MOST_STEPS) if limit is None else float(limit)
        elif limit is None and count >= caps[index]:
            most = float(MOST_STEPS)  # a count without a limit
        if index == _INDEX["tool_calls"]:  # the count of calls is a lower bound
            most = float(MOST_STEPS) * float(chart.most_sampled) if limit is None else float(limit)
        found[name] = (least, most)
    turns = found["turns.assistant"][1]
    found["tokens.sampled"] = (0.0, turns * chart.most_sampled if turns else 0.0)
    found["last.tokens"] = (0.0, float(chart.most_sampled))
    found.update(dict.fromkeys(("tokens.context", "last.calls"), (0.0, inf)))
    found["tools.errors"] = (0.0, inf)
    return found
