"""Steps of an episode through its machine: what may follow from where it stands.

Steps follow the executor: a limit that is used up leaves an action no event but `limit`; once time is up, every state
meets `limit`; anything else may fail; a reply that called tools certainly makes at least one call.

There are two ways of counting. Exactly; or roughly, where a counter that has a limit is only known to be used up or not,
any use of it may be the last, and every guard may go either way.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from engine.actions.facts import ACTIONS, COUNT_LIMIT_OF, COUNT_LIMITS, MOST_STEPS
from engine.checks.chart import MAYBE_CALLS, NO_CALLS, SURE_CALLS, Chart, Edge, Limits, Place, Step
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
    """Answers what may follow, and remembers what guards come to.

    Raises (from whatever it is asked):
        TooMuch: `work` is used up.
    """

    def __init__(self, chart: Chart, work: Work, *, rough: bool = False) -> None:
        self.chart = chart
        self.rough = rough
        self.work = work
        limits = chart.limits
        self.limits: Limits = (_one(limits[0]), _one(limits[1]), _one(limits[2])) if rough else limits
        """Those that it walks by."""
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

    def steps(self, place: Place) -> list[Step]:
        """Every step from a place, each once."""
        action = self.actions.get(place.state)
        if action is None:
            return []  # a final state, or none at all
        found: list[Step] = []
        if place.late or self.used_up(place, action):
            self.lead(found, place, "limit", None)
        else:
            done: dict[tuple[Place, int | None], None] = {(place, None): None}
            for event in self.events.get(place.state, ()):
                for after in self.after(place, action, event):
                    self.lead(found, after[0], event, after[1])
                    done[after] = None
            for after in done:  # a rule or a guard may fail behind the work
                self.lead(found, after[0], "failed", after[1])
            if action in ACTIONS and ACTIONS[action].needs_context:  # the prompt may fill the context
                self.lead(found, place, "limit", None)
            if self.chart.timed:
                counts = place.counts if self.late_matters else (0, 0, 0)
                self.lead(found, Place(place.state, *counts, NO_CALLS, True), "limit", None)
        self.work.spend(len(found) + 1)
        return list(dict.fromkeys(found))

    def used_up(self, place: Place, action: str) -> bool:
        """Whether the action's limit leaves it nothing."""
        counted = COUNT_LIMIT_OF.get(action)
        if counted is None:
            return False
        index = _INDEX[counted.name]
        limit = self.limits[index]
        return limit is not None and place.counts[index] >= limit

    def after(self, place: Place, action: str, event: str) -> list[tuple[Place, int | None]]:
        """What an action's own event leaves behind, and the counter that it moves."""
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
                    counts.append(limit)  # all that are left, in one turn
                left += [(Place(state, turns, user, more, newest, late), 2) for more in dict.fromkeys(counts)]
            return left
        return [(place, None)]

    def more(self, index: int, count: int) -> tuple[int, ...]:
        """What a counter may stand at when it was used once more."""
        limit = self.limits[index]
        if limit is None:
            return (min(count + 1, self.caps[index]),)
        return (count, limit) if self.rough else (min(count + 1, limit),)

    def ranges(self, counts: Counts) -> Ranges:
        """What guards may read."""
        found = self._ranges.get(counts)
        if found is None:
            found = self._ranges[counts] = _ranges(self.chart, counts, self.caps, rough=self.rough)
        return found

    def truth(self, guard: Formula, counts: Counts, work: Work | None = None) -> bool | None:
        """What a guard comes to, asked once for each case; counted as `work`, its own when left out."""
        known = self._guards.get(id(guard))
        if known is None:  # the guard is kept, so that no other gets its id
            known = self._guards[id(guard)] = _Guard(guard, guard.weight, _reads(guard), {})
        reads = known.reads
        key = (reads[0] and counts[0], reads[1] and counts[1], reads[2] and counts[2])
        try:
            return known.truths[key]
        except KeyError:
            (work or self.work).spend(known.weight)
            found = known.truths[key] = guard.truth(self.ranges(counts))
            return found

    def lead(self, found: list[Step], place: Place, event: str, used: int | None) -> None:
        """Add the transitions that an event may take, in their order."""
        settled = self.settled.get((place.state, event))
        if settled is not None:
            found.append(Step(event, Place(settled, *place[1:]), used))
            return
        unsure = False
        for edge in self.edges.get((place.state, event), ()):
            truth = True if edge.guard is ALWAYS else self.truth(edge.guard, place.counts)
            if truth is not False:
                found.append(Step(event, Place(edge.dest, *place[1:]), used))
            if truth is True and not unsure:
                return
            if truth is True:
                break
            unsure = unsure or truth is None
        if event != "failed":  # nothing handles it, no guard held, or one could not be told: that is a failure
            self.lead(found, place, "failed", used)


class _Guard(NamedTuple):
    """A guard, and what it comes to by the counters that it reads."""

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
    """Transitions whose guards may go either way, each destination once."""
    found: dict[str, Edge] = {}
    for edge in group:
        if edge.guard is ALWAYS:
            return (*found.values(), edge)
        found.setdefault(edge.dest, Edge(edge.dest, UNKNOWN))
    return tuple(found.values())


def _caps(chart: Chart) -> Counts:
    """For counters without a limit: one more than any guard compares them with, beyond which all are alike."""
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
        if index == _INDEX["tool_calls"]:  # calls are counted from below
            most = float(MOST_STEPS) * float(chart.most_sampled) if limit is None else float(limit)
        found[name] = (least, most)
    turns = found["turns.assistant"][1]
    found["tokens.sampled"] = (0.0, turns * chart.most_sampled if turns else 0.0)
    found["last.tokens"] = (0.0, float(chart.most_sampled))
    found.update(dict.fromkeys(("tokens.context", "last.calls"), (0.0, inf)))
    found["tools.errors"] = (0.0, inf)
    return found
