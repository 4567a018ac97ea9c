"""A layered layout of a small directed graph: boxes in ranks from the top down, edges with labels between them.

Knows nothing of machines or of drawing. After Sugiyama, Tagawa and Toda (IEEE Transactions on Systems, Man and
Cybernetics 11, 1981): edges against the flow are turned round, boxes ranked by longest path, each edge given a
waypoint in every rank that it passes (its label is one of them), crossings reduced by barycentres, and x solved as
least squares under the distances that must be kept. Deterministic: the same graph has the same picture.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

GAP_X = 28.0
GAP_Y = 24.0
SWEEPS = 16

Key = Hashable


@dataclass(slots=True)
class Box:
    """A node, or a waypoint of an edge. Lengths in pixels."""

    width: float
    height: float
    overhang: float = 0.0
    """Room kept free on the right, for a self loop."""
    x: float = 0.0
    """Of the centre, without the overhang."""
    y: float = 0.0
    """Of the centre."""
    rank: int = 0
    band: tuple[float, float] = (0.0, 0.0)
    """Top and bottom of its rank."""
    node: bool = True
    """False for a waypoint."""


@dataclass(slots=True)
class Link:
    """An edge from one node to another."""

    source: str
    dest: str
    label: tuple[float, float]
    """Width and height of its label."""
    reversed: bool = False
    """Whether it runs against the flow, upwards."""
    waypoints: list[Box] = field(default_factory=list)
    """From the upper node to the lower."""
    labelled: Box | None = None
    """The waypoint that is its label."""
    ends: tuple[float, float] = (0.0, 0.0)
    """x of its ends, at the upper and at the lower node."""


@dataclass(slots=True)
class Layout:
    """A graph with places."""

    nodes: dict[str, Box]
    links: list[Link]
    width: float
    height: float


def lay_out(nodes: Mapping[str, Box], links: Sequence[Link], first: str, last: Iterable[str] = ()) -> Layout:
    """Place nodes and links.

    Args:
        nodes: Boxes with their sizes; they are filled in.
        links: Without self loops, at most one for each (source, dest).
        first: The node that the flow begins at.
        last: Nodes that belong into the lowest rank, where nothing leaves them.
    """
    boxes = dict(nodes)
    _turn_round(boxes, links, first)
    _rank(boxes, links, last)
    ranks, joined = _waypoints(boxes, links)
    ranks = _order(ranks, joined)
    _place_x(ranks, joined)
    height = _place_y(ranks, joined)
    _ports(boxes, links)
    everything = [box for rank in ranks for box in rank]
    left = min(box.x - box.width / 2 for box in everything)
    for box in everything:
        box.x -= left
    for link in links:
        link.ends = (link.ends[0] - left, link.ends[1] - left)
    width = max(box.x + box.width / 2 + box.overhang for box in everything)
    return Layout(boxes, list(links), width, height)


def _turn_round(boxes: Mapping[str, Box], links: Sequence[Link], first: str) -> None:
    """Mark the links that lead back to a node that the walk is still inside of."""
    done: set[str] = set()
    inside: set[str] = set()
    leaving: dict[str, list[Link]] = {name: [] for name in boxes}
    for link in links:
        leaving[link.source].append(link)

    for start in (first, *boxes):
        stack: list[tuple[str, int]] = [(start, 0)] if start not in done else []
        inside.update(name for name, _ in stack)
        while stack:
            name, at = stack.pop()
            if at == len(leaving[name]):
                inside.discard(name)
                done.add(name)
                continue
            stack.append((name, at + 1))
            link = leaving[name][at]
            if link.dest in inside:
                link.reversed = True
            elif link.dest not in done:
                inside.add(link.dest)
                stack.append((link.dest, 0))


def _ends(link: Link) -> tuple[str, str]:
    """The upper and the lower node."""
    return (link.dest, link.source) if link.reversed else (link.source, link.dest)


def _rank(boxes: Mapping[str, Box], links: Sequence[Link], last: Iterable[str]) -> None:
    """Longest path from the top; even numbers, so that each link has a rank for its label."""
    for _ in boxes:
        for link in links:
            upper, lower = _ends(link)
            boxes[lower].rank = max(boxes[lower].rank, boxes[upper].rank + 2)
    lowest = max((box.rank for box in boxes.values()), default=0)
    uppers = {_ends(link)[0] for link in links}
    for name in last:
        if name not in uppers:
            boxes[name].rank = lowest
    lowers = {_ends(link)[1] for link in links}
    for name, box in boxes.items():  # what nothing leads to hangs just above what it leads to
        below = [boxes[_ends(link)[1]].rank for link in links if _ends(link)[0] == name]
        if name not in lowers and below and box.rank == 0 and len(boxes) > 2:
            box.rank = min(below) - 2


def _waypoints(boxes: Mapping[str, Box], links: Sequence[Link]) -> tuple[list[list[Box]], list[tuple[Box, Box]]]:
    """Boxes by rank, waypoints included, and the pairs (upper, lower) of neighbouring ranks that are joined."""
    ranks: list[list[Box]] = [[] for _ in range(max(box.rank for box in boxes.values()) + 1)]
    for box in boxes.values():
        ranks[box.rank].append(box)
    joined: list[tuple[Box, Box]] = []
    for link in links:
        upper, lower = (boxes[name] for name in _ends(link))
        at_label = lower.rank - 1 if link.reversed else upper.rank + 1
        for rank in range(upper.rank + 1, lower.rank):
            width, height = link.label if rank == at_label else (10.0, 0.0)
            box = Box(width, height, rank=rank, node=False)
            link.waypoints.append(box)
            ranks[rank].append(box)
        link.labelled = link.waypoints[at_label - upper.rank - 1]
        chain = [upper, *link.waypoints, lower]
        joined += pairwise(chain)
    return ranks, joined


def _neighbours(joined: Iterable[tuple[Box, Box]]) -> tuple[dict[int, list[Box]], dict[int, list[Box]]]:
    up: dict[int, list[Box]] = {}
    down: dict[int, list[Box]] = {}
    for upper, lower in joined:
        down.setdefault(id(upper), []).append(lower)
        up.setdefault(id(lower), []).append(upper)
    return up, down


def _order(ranks: list[list[Box]], joined: list[tuple[Box, Box]]) -> list[list[Box]]:
    """The order with the fewest crossings that sweeping down and up by barycentres finds."""
    up, down = _neighbours(joined)
    best = [list(rank) for rank in ranks]
    fewest = _crossings(best, down)
    current = [list(rank) for rank in ranks]
    for sweep in range(SWEEPS):
        near = up if sweep % 2 == 0 else down
        for index in range(len(current)) if sweep % 2 == 0 else reversed(range(len(current))):
            other = index - 1 if sweep % 2 == 0 else index + 1
            if not 0 <= other < len(current):
                continue
            places = {id(box): place for place, box in enumerate(current[other])}
            own = {id(box): float(place) for place, box in enumerate(current[index])}
            for box in current[index]:
                around = [places[id(each)] for each in near.get(id(box), ())]
                if around:
                    own[id(box)] = sum(around) / len(around)
            current[index].sort(key=lambda box, own=own: own[id(box)])  # type: ignore[misc]
        crossings = _crossings(current, down)
        if crossings < fewest:
            fewest, best = crossings, [list(rank) for rank in current]
    return best


def _crossings(ranks: list[list[Box]], down: Mapping[int, list[Box]]) -> int:
    count = 0
    for upper, lower in pairwise(ranks):
        places = {id(box): place for place, box in enumerate(lower)}
        ends = [sorted(places[id(each)] for each in down.get(id(box), ())) for box in upper]
        for at, left in enumerate(ends):
            for right in ends[at + 1 :]:
                count += sum(1 for a in left for b in right if a > b)
    return count


def _place_x(ranks: list[list[Box]], joined: list[tuple[Box, Box]]) -> None:
    """Each box as near to its neighbours as the distances allow; waypoints in one line before anything else."""
    up, down = _neighbours(joined)
    for rank in ranks:
        _settle(rank, [0.0] * len(rank), [1.0] * len(rank))
    for sweep in range(8 * SWEEPS):
        downwards = sweep % 2 == 0
        for rank in ranks if downwards else reversed(ranks):
            wanted, weights = [], []
            for box in rank:
                before, after = (up, down) if downwards else (down, up)
                around = before.get(id(box), []) or after.get(id(box), [])
                if sweep >= 2 * SWEEPS:
                    around = [*up.get(id(box), []), *down.get(id(box), [])]
                pull = [_STRAIGHT[box.node + each.node] for each in around]
                weights.append(sum(pull) or 1.0)
                at = sum(each.x * weight for each, weight in zip(around, pull, strict=True)) if around else box.x
                wanted.append(at / weights[-1])
            _settle(rank, wanted, weights)


_STRAIGHT = (8.0, 2.0, 1.0)
"""How much it matters that a line is straight between two waypoints, a waypoint and a node, two nodes."""


def _settle(rank: list[Box], wanted: Sequence[float], weights: Sequence[float]) -> None:
    """Weighted least squares to the wanted places, in order and apart: pooling of neighbours that would overlap."""
    offsets = [0.0]
    for left, right in pairwise(rank):
        offsets.append(offsets[-1] + left.width / 2 + left.overhang + GAP_X + right.width / 2)
    pools: list[tuple[float, float, int]] = []  # of wanted places less offsets: weighted sum, weight, how many
    for want, offset, weight in zip(wanted, offsets, weights, strict=False):
        pools.append(((want - offset) * weight, weight, 1))
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            total, weight, count = pools.pop()
            before = pools.pop()
            pools.append((before[0] + total, before[1] + weight, before[2] + count))
    places = [total / weight for total, weight, count in pools for _ in range(count)]
    for box, place, offset in zip(rank, places, offsets, strict=False):
        box.x = place + offset


def _place_y(ranks: list[list[Box]], joined: list[tuple[Box, Box]]) -> float:
    """Ranks under each other, further apart where a line goes far to the side; the height of them all."""
    y = 0.0
    for index, rank in enumerate(ranks):
        aside = [abs(upper.x - lower.x) for upper, lower in joined if lower.rank == index]
        y += GAP_Y + min(max(aside, default=0.0) * 0.1, 36.0) if index else 0.0
        height = max((box.height for box in rank), default=0.0)
        for box in rank:
            box.y = y + height / 2
            box.band = (y, y + height)
        y += height
    return y


def _ports(boxes: Mapping[str, Box], links: Sequence[Link]) -> None:
    """Spread the ends of links along the edges of their nodes, in the order of where they come from."""
    at: dict[tuple[str, bool], list[tuple[float, Link]]] = {}
    for link in links:
        upper, lower = _ends(link)
        at.setdefault((upper, False), []).append((link.waypoints[0].x, link))
        at.setdefault((lower, True), []).append((link.waypoints[-1].x, link))
    for (name, top), found in at.items():
        box = boxes[name]
        found.sort(key=lambda pair: pair[0])
        step = min(30.0, (box.width - 24.0) / max(len(found) - 1, 1))
        for index, (wanted, link) in enumerate(found):
            x = box.x + (index - (len(found) - 1) / 2) * step
            if len(found) == 1:
                x = min(max(wanted, box.x - box.width / 2 + 14), box.x + box.width / 2 - 14)
            link.ends = (link.ends[0], x) if top else (x, link.ends[1])
