"""Cycles in the graph of what an episode may do that no counter ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from engine.limits import COUNTERS
from engine.validate.chart import Place, WalkStep
from engine.validate.explore import Graph
from engine.validate.work import Work, WorkLimitError

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
    found: dict[tuple[frozenset[str], bool], list[Cycle]] = {}
    complete = True
    try:
        for cycle in _each_cycle(graph, work):
            found.setdefault((frozenset(state for state, _ in cycle.steps), cycle.late), []).append(cycle)
    except WorkLimitError:
        complete = False
    return Cycles([_merged(alike) for alike in found.values()], complete)


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
    """Of cycles through the same states, the one that the fewest limits bound; it names a limit that bounds all, if there is one."""
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
