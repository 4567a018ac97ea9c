"""The places of a small directed graph's boxes: ranks from the top down, with each edge's label between its ends.

The library fast-sugiyama (MIT) assigns ranks, inserts a waypoint in every rank that an edge passes, and orders each rank so
that few edges cross. It treats all vertices as points, so this module spaces them by their sizes. Vertices are numbers, because
the library orders names by their hashes; the same graph always gets the same places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from engine.errors import EngineError

GAP_X = 28.0
GAP_Y = 24.0
SWEEPS = 64
"""How often boxes are moved towards their neighbours."""


class LayoutError(EngineError):
    """The library that places boxes is not installed."""

    kind = "layout_error"
    blame = "spec"


@dataclass(slots=True)
class Box:
    """A node, the label of an edge, or a waypoint. Lengths in pixels."""

    width: float
    height: float
    overhang: float = 0.0
    """Space kept free on the right, for a self loop."""
    x: float = 0.0
    """Of the centre, without the overhang."""
    y: float = 0.0
    """Of the centre."""
    top: float = 0.0
    """Upper end of its rank."""
    bottom: float = 0.0
    """Lower end of its rank."""


@dataclass(slots=True)
class Link:
    """An edge from one node to another."""

    source: str
    dest: str
    label: Box
    points: list[Box] = field(default_factory=list)
    """Its label and waypoints, from the upper node to the lower one."""
    upwards: bool = False
    """Whether it leads from a lower rank to an upper one."""
    ends: tuple[float, float] = (0.0, 0.0)
    """x of its ends, at the upper and at the lower node."""


@dataclass(slots=True)
class Layout:
    """A graph with places. Lengths in pixels."""

    nodes: dict[str, Box]
    links: list[Link]
    width: float
    height: float


def lay_out(nodes: Mapping[str, Box], links: Sequence[Link], first: str) -> Layout:
    """Place nodes and links.

    Args:
        nodes: Boxes with their sizes; the places are filled in.
        links: Without self loops, and at most one for each (source, dest).
        first: The node to begin at: a link back to a node from which it was reached leads upwards.

    Raises:
        LayoutError: the library fast-sugiyama is not installed.
    """
    boxes = dict(nodes)
    _direct(boxes, links, first)
    ranks = _ranks(boxes, links)
    pairs = [pair for link in links for pair in pairwise(_chain(boxes, link))]
    _place_x(ranks, pairs)
    height = 0.0
    for rank in ranks:
        inside = {id(box) for box in rank}
        aside = max((abs(upper.x - lower.x) for upper, lower in pairs if id(lower) in inside), default=0.0)
        height += min(aside * 0.1, 36.0)  # lines that go far to the side need space
        bottom = height + max(box.height for box in rank)
        for box in rank:
            box.top, box.y, box.bottom = height, (height + bottom) / 2, bottom
        height = bottom + GAP_Y
    _place_ends(boxes, links)
    width = max(box.x + box.width / 2 + box.overhang for rank in ranks for box in rank)
    return Layout(boxes, list(links), width, height - GAP_Y)


def _direct(nodes: Mapping[str, Box], links: Sequence[Link], first: str) -> None:
    """Mark the links that close a cycle in a depth-first walk; without them there is none."""
    leaving: dict[str, list[Link]] = {name: [] for name in nodes}
    for link in links:
        leaving[link.source].append(link)
    seen: set[str] = set()
    for start in (first, *nodes):
        path: dict[str, Iterator[Link]] = {} if start in seen else {start: iter(leaving[start])}
        while path:
            name = next(reversed(path))
            seen.add(name)
            next_link = next(path[name], None)
            if next_link is None:
                del path[name]
            elif next_link.dest in path:
                next_link.upwards = True
            elif next_link.dest not in seen:
                path[next_link.dest] = iter(leaving[next_link.dest])


def _ranks(nodes: Mapping[str, Box], links: Sequence[Link]) -> list[list[Box]]:
    """The boxes of each rank from left to right, with waypoints; fills in the points of the links."""
    numbers = {name: number for number, name in enumerate(nodes)}
    linked = {name for link in links for name in (link.source, link.dest)}
    hub, *others = sorted(numbers, key=lambda name: name not in linked)
    edges = [(numbers[hub], numbers[name]) for name in others if name not in linked]  # not drawn
    box_of = dict(enumerate([*nodes.values(), *(link.label for link in links)]))
    for number, link in enumerate(links, start=len(nodes)):
        upper, lower = (link.dest, link.source) if link.upwards else (link.source, link.dest)
        edges += [(numbers[upper], number), (number, numbers[lower])]
    places, steps = _sugiyama(edges)
    ranks: dict[float, list[Box]] = {}
    for number, (x, y) in sorted(places.items(), key=lambda item: item[1]):
        box = box_of.setdefault(number, Box(10.0, 0.0))
        box.x = x
        ranks.setdefault(y, []).append(box)
    after = {upper: lower for upper, lower in steps if upper >= len(nodes)}
    before = {lower: upper for upper, lower in steps if lower >= len(nodes)}
    for number, link in enumerate(links, start=len(nodes)):
        above, below = before[number], after[number]
        link.points = [link.label]
        while above >= len(nodes):
            link.points.insert(0, box_of[above])
            above = before[above]
        while below >= len(nodes):
            link.points.append(box_of[below])
            below = after[below]
    return [ranks[y] for y in sorted(ranks)]


def _sugiyama(edges: list[tuple[int, int]]) -> tuple[dict[int, tuple[float, float]], list[tuple[int, int]]]:
    """Places by vertex, y downwards, and the edges cut at waypoints, which are new vertices.

    Raises:
        LayoutError: the library fast-sugiyama is not installed.
    """
    try:
        from fast_sugiyama import from_edges
    except ImportError as error:
        message = "SVG needs the package fast-sugiyama: run `pip install fast-sugiyama`, or write Mermaid with `--format mermaid`"
        raise LayoutError(message) from error
    places = {0: (0.0, 0.0)}
    steps: list[tuple[int, int]] = []
    left = 0.0
    for positions, width, _, edges_cut in from_edges(edges, vertex_spacing=100.0) if edges else []:  # unconnected parts
        lowest = max(y for _, (_, y) in positions)
        places |= {int(number): (left + x, lowest - y) for number, (x, y) in positions}
        steps += [(int(upper), int(lower)) for upper, lower in edges_cut or ()]
        left += width + 100.0
    return places, steps


def _chain(nodes: Mapping[str, Box], link: Link) -> list[Box]:
    """All boxes of a link, from the upper node to the lower one."""
    upper, lower = (link.dest, link.source) if link.upwards else (link.source, link.dest)
    return [nodes[upper], *link.points, nodes[lower]]


def _place_x(ranks: Sequence[Sequence[Box]], joined: Sequence[tuple[Box, Box]]) -> None:
    """Move boxes as near to their neighbours as the gaps allow; straight lines between waypoints matter most."""
    near: dict[int, list[tuple[Box, float]]] = {}
    for upper, lower in joined:
        weight = {0: 1.0, 1: 2.0, 2: 8.0}[(upper.height == 0.0) + (lower.height == 0.0)]
        near.setdefault(id(upper), []).append((lower, weight))
        near.setdefault(id(lower), []).append((upper, weight))
    for sweep in range(SWEEPS):
        for rank in ranks if sweep % 2 == 0 else reversed(ranks):
            wanted, weights = [], []
            for box in rank:
                around = near.get(id(box), [(box, 1.0)]) if sweep else [(box, 1.0)]
                weights.append(sum(weight for _, weight in around))
                wanted.append(sum(other.x * weight for other, weight in around) / weights[-1])
            _space(rank, wanted, weights)
    left = min(box.x - box.width / 2 for rank in ranks for box in rank)
    for rank in ranks:
        for box in rank:
            box.x -= left


def _space(rank: Sequence[Box], wanted: Sequence[float], weights: Sequence[float]) -> None:
    """Place a rank's boxes by weighted least squares, in order and apart: neighbours that would overlap move together."""
    offsets = [0.0]
    for left, right in pairwise(rank):
        offsets.append(offsets[-1] + left.width / 2 + left.overhang + GAP_X + right.width / 2)
    groups: list[tuple[float, float, int]] = []  # weighted sum of (wanted - offset), weight, number of boxes
    for want, offset, weight in zip(wanted, offsets, weights, strict=True):
        groups.append(((want - offset) * weight, weight, 1))
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] > groups[-1][0] / groups[-1][1]:
            total, sum_of_weights, count = groups.pop()
            before = groups.pop()
            groups.append((before[0] + total, before[1] + sum_of_weights, before[2] + count))
    places = [total / weight for total, weight, count in groups for _ in range(count)]
    for box, place, offset in zip(rank, places, offsets, strict=True):
        box.x = place + offset


def _place_ends(nodes: Mapping[str, Box], links: Sequence[Link]) -> None:
    """Spread the ends of links along the edges of their nodes, in the order of the points that they lead to."""
    ends: dict[tuple[int, bool], list[tuple[float, int]]] = {}
    for index, link in enumerate(links):
        chain = _chain(nodes, link)
        ends.setdefault((id(chain[0]), False), []).append((link.points[0].x, index))
        ends.setdefault((id(chain[-1]), True), []).append((link.points[-1].x, index))
    by_id = {id(box): box for box in nodes.values()}
    for (of, at_top), found in ends.items():
        box = by_id[of]
        step = min(30.0, (box.width - 24.0) / max(len(found) - 1, 1))
        for place, (wanted, index) in enumerate(sorted(found)):
            x = box.x + (place - (len(found) - 1) / 2) * step
            if len(found) == 1:
                x = min(max(wanted, box.x - box.width / 2 + 14), box.x + box.width / 2 - 14)
            upper, lower = links[index].ends
            links[index].ends = (upper, x) if at_top else (x, lower)
