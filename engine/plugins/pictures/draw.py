"""A machine's picture as SVG, and the places of its boxes: ranks from the top down, with each edge's label between its
ends.

Lengths are in pixels. Widths of text are estimated from the font size, because the program that shows the picture
chooses the fonts; boxes are a little wider than needed.

The library fast-sugiyama (MIT) assigns ranks, inserts a waypoint in every rank that an edge passes, and orders each
rank so that few edges cross. It treats all vertices as points, so this module spaces them by their sizes. Vertices are
numbers, because the library orders names by their hashes; the same graph always gets the same places.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from xml.sax.saxutils import escape, quoteattr

from engine.errors import EngineError
from engine.machine.machine import ResolvedMachine
from engine.plugins.pictures.graph import ANY_STATE, Counts, DrawnEdge, Events, Picture, picture
from engine.schemas.machine import MachineSpec

MARGIN = 20.0
LINE = 15.0
LABEL_SIZE = 11.5
NAME_SIZE = 13.0
GUARD_COLUMNS = 38
EVENT_COLUMNS = 28
LOOP = 30.0
LEAN = 0.7
"""Maximum slope of a line at a waypoint: pixels to the side per pixel down."""

INK = "#1f2933"
MUTED = "#697586"
EDGE = "#52606d"
GUARD = "#2f6f9f"
TINTS = {
    "reset": ("#eef1f4", "#9aa5b1"),
    "generate": ("#e3effd", "#3b82c4"),
    "call_tools": ("#fff1d6", "#d19a2a"),
    "ask_user": ("#e2f5e7", "#3f9d63"),
    "step": ("#fbe7ef", "#c2557f"),
    "score": ("#eee8fb", "#7c5cc4"),
}
"""Fill and border by action."""
OWN = ("#e0f4f4", "#2f8f8f")
PLAIN = ("#ffffff", "#9aa5b1")
GAP_X = 28.0
GAP_Y = 24.0
SWEEPS = 64
"""How often boxes are moved towards their neighbours."""


_Row = tuple[str, str, str]
"""One row of a label: the event, its guard and its count."""


def _rows(edge: DrawnEdge) -> list[_Row]:
    """The rows of a label: events with the same guard share one; a long guard is wrapped at its operators."""
    rows: list[_Row] = []
    together: dict[str | None, list[str]] = {}
    for line in edge.lines:
        if line.count is None:
            together.setdefault(line.guard, []).append(line.event)
        else:
            rows += _guarded(line.event, line.guard, f"×{line.count}")
    for guard, events in together.items():
        rows += _guarded(", ".join(events), guard, "")
    return rows


def _guarded(events: str, guard: str | None, count: str) -> list[_Row]:
    *before, name = textwrap.wrap(events, EVENT_COLUMNS)
    rows = [(row, "", "") for row in before]
    if guard is None:
        return [*rows, (name, "", count)]
    bracketed = f"[{' '.join(guard.split())}]"
    if len(name) + 1 + len(bracketed) <= GUARD_COLUMNS:
        return [*rows, (name, bracketed, count)]
    rows.append((name, "", count))
    line = ""
    for clause in re.split(r"(?<=&&) |(?<=\|\|) ", bracketed):
        if line and len(line) + 1 + len(clause) > GUARD_COLUMNS:
            rows.append(("", line, ""))
            line = ""
        line = f"{line} {clause}".strip()
        *full, line = textwrap.wrap(line, GUARD_COLUMNS, break_long_words=False, break_on_hyphens=False)
        rows += [("", part, "") for part in full]
    return [*rows, ("", line, "")]


def _size(rows: list[_Row]) -> tuple[float, float]:
    longest = max(len(" ".join(filter(None, row))) for row in rows)
    return longest * LABEL_SIZE * 0.61 + 10.0, len(rows) * LINE + 4.0


def _action(name: str, drawn: Picture) -> tuple[str, str]:
    """The action of a state, and the second line of its box; empty where it has none."""
    state = drawn.machine.states.get(name)
    action = state.action if state is not None and state.action else ""
    return action, action.rpartition(":")[2]


def svg(machine: MachineSpec | ResolvedMachine, counts: Counts | None = None, events: Events | None = None) -> str:
    """Return the machine as an SVG document. The arguments are those of `picture`.

    Raises:
        EngineError: the library fast-sugiyama is not installed.
    """
    drawn = picture(machine, counts, events)
    edges = [edge for edge in drawn.edges if edge.dest in drawn.boxes]
    loops = {edge.source: edge for edge in edges if edge.source == edge.dest}
    between = [edge for edge in edges if edge.source != edge.dest]
    nodes = {}
    for name in drawn.boxes:
        ends = max(sum(e.source == name for e in between), sum(e.dest == name for e in between))
        _, action = _action(name, drawn)
        width = max(len(name) * NAME_SIZE * 0.72, len(action) * LABEL_SIZE * 0.61, ends * 18.0, 64.0) + 26.0
        overhang = LOOP + _size(_rows(loops[name]))[0] if name in loops else 0.0
        nodes[name] = Box(width, 46.0 if action else 34.0, overhang)
    links = [Link(edge.source, edge.dest, Box(*_size(_rows(edge)))) for edge in between]
    initial = drawn.machine.initial if drawn.machine.initial in nodes else next(iter(nodes))
    width, height = lay_out(nodes, links, initial)
    busiest = max((edge.count or 0 for edge in edges), default=0)
    parts = [_link(link, nodes, edge, busiest) for link, edge in zip(links, between, strict=True)]
    parts += [_loop(nodes[name], edge, busiest) for name, edge in loops.items()]
    parts += [_node(name, box, drawn) for name, box in nodes.items()]
    parts += [_label(link, edge) for link, edge in zip(links, between, strict=True)]
    parts.append(_start(nodes[initial]))
    width, height = width + 2 * MARGIN, height + 2 * MARGIN + GAP_Y
    body = "\n".join(part for part in parts if part)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(width)}" height="{_n(height)}" '
        f'viewBox="0 0 {_n(width)} {_n(height)}" font-family="sans-serif">\n'
        "<title>State machine of an episode</title>\n"
        f'<rect width="{_n(width)}" height="{_n(height)}" fill="#ffffff"/>\n'
        f'<g transform="translate({_n(MARGIN)} {_n(MARGIN + GAP_Y)})">\n{body}\n</g>\n</svg>\n'
    )


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def _node(name: str, box: Box, drawn: Picture) -> str:
    full, action = _action(name, drawn)
    fill, border = TINTS.get(full, OWN) if full else PLAIN
    left, top = box.x - box.width / 2, box.y - box.height / 2
    dash = ' stroke-dasharray="4 3"' if name == ANY_STATE else ""
    parts = [
        f'<rect x="{_n(left)}" y="{_n(top)}" width="{_n(box.width)}" height="{_n(box.height)}" rx="9" '
        f'fill="{fill}" stroke="{border}" stroke-width="1.5"{dash}/>'
    ]
    if name in drawn.machine.final:
        parts.append(
            f'<rect x="{_n(left + 4)}" y="{_n(top + 4)}" width="{_n(box.width - 8)}" height="{_n(box.height - 8)}" '
            f'rx="6" fill="none" stroke="{border}" stroke-width="1.2"/>'
        )
    weight = "normal" if name == ANY_STATE else "bold"
    style = ' font-style="italic"' if name == ANY_STATE else ""
    ink = MUTED if name == ANY_STATE else INK
    y = box.y - 3.0 if action else box.y + 4.5
    parts.append(
        f'<text x="{_n(box.x)}" y="{_n(y)}" text-anchor="middle" font-size="{NAME_SIZE}" font-weight="{weight}"{style} '
        f'fill="{ink}">{escape(name)}</text>'
    )
    if action:
        parts.append(
            f'<text x="{_n(box.x)}" y="{_n(box.y + 12)}" text-anchor="middle" font-family="monospace" '
            f'font-size="{LABEL_SIZE - 0.5}" fill="{MUTED}">{escape(action)}</text>'
        )
    return f"<g data-state={quoteattr(name)}>{''.join(parts)}</g>"


def _edge_group(edge: DrawnEdge, drawing: str) -> str:
    """A line with its head, and in attributes the transitions that it stands for."""
    events = " ".join(dict.fromkeys(line.event for line in edge.lines))
    names = f"data-from={quoteattr(edge.source)} data-to={quoteattr(edge.dest)} data-events={quoteattr(events)}"
    return f"<g {names}>{drawing}</g>"


def _stroke(edge: DrawnEdge, busiest: int) -> str:
    """A line is thicker if it was taken more often, and dashed if it never was."""
    count = edge.count
    if count is None:
        return f'stroke="{MUTED if edge.source == ANY_STATE else EDGE}" stroke-width="1.4"'
    if count == 0:
        return 'stroke="#b8c0c8" stroke-width="1.2" stroke-dasharray="4 3"'
    width = 1.4 + 2.6 * math.log1p(count) / math.log1p(busiest)
    return f'stroke="{EDGE}" stroke-width="{width:.1f}"'


def _link(link: Link, nodes: Mapping[str, Box], edge: DrawnEdge, busiest: int) -> str:
    names = (link.dest, link.source) if link.upwards else (link.source, link.dest)
    upper, lower = (nodes[name] for name in names)
    top, bottom = upper.y + upper.height / 2, lower.y - lower.height / 2
    start = (link.ends[0], top + (8.0 if link.upwards else 0.0))
    end = (link.ends[1], bottom - (0.0 if link.upwards else 8.0))
    path = _curve(start, link, end)
    x, tip, base = (link.ends[0], top, top + 9) if link.upwards else (link.ends[1], bottom, bottom - 9)
    fill = "#b8c0c8" if edge.count == 0 else MUTED if edge.source == ANY_STATE and edge.count is None else EDGE
    head = f'<path d="M{_n(x)} {_n(tip)} L{_n(x - 4.5)} {_n(base)} L{_n(x + 4.5)} {_n(base)} Z" fill="{fill}"/>'
    return _edge_group(edge, f'<path d="{path}" fill="none" {_stroke(edge, busiest)}/>{head}')


def _curve(start: tuple[float, float], link: Link, end: tuple[float, float]) -> str:
    """A smooth line through the waypoints, vertical at its ends and behind its label."""
    upright = [(*start, 0.0)]
    for box in link.points:
        upright += [(box.x, y, 0.0) for y in ((box.top, box.bottom) if box is link.label else (box.y,))]
    points = [*upright, (*end, 0.0)]
    free = {(box.x, box.y) for box in link.points if box is not link.label}
    for at in range(1, len(points) - 1):
        (x0, y0, _), (x, y, _), (x1, y1, _) = points[at - 1 : at + 2]
        if (x, y) in free:
            points[at] = (x, y, min(max((x1 - x0) / (y1 - y0), -LEAN), LEAN))
    path = f"M{_n(start[0])} {_n(start[1])}"
    for (x0, y0, lean0), (x1, y1, lean1) in pairwise(points):
        reach = 0.45 * (y1 - y0)
        path += (
            f" C{_n(x0 + lean0 * reach)} {_n(y0 + reach)} {_n(x1 - lean1 * reach)} {_n(y1 - reach)} {_n(x1)} {_n(y1)}"
        )
    return path


def _label(link: Link, edge: DrawnEdge) -> str:
    box = link.label
    width, height = _size(_rows(edge))
    back = (
        f'<rect x="{_n(box.x - width / 2)}" y="{_n(box.y - height / 2)}" width="{_n(width)}" height="{_n(height)}" '
        'rx="4" fill="#ffffff" fill-opacity="0.94"/>'
    )
    return back + _text(_rows(edge), box.x, box.y - height / 2, "middle", edge)


def _text(rows: list[_Row], x: float, top: float, anchor: str, edge: DrawnEdge) -> str:
    parts = []
    ink = MUTED if edge.source == ANY_STATE or edge.count == 0 else INK
    for index, (event, guard, count) in enumerate(rows):
        spans = " ".join(
            f'<tspan fill="{fill}"{weight}>{escape(text)}</tspan>'
            for text, fill, weight in (
                (event, ink, ""),
                (guard, GUARD, ""),
                (count, ink, ' font-weight="bold"'),
            )
            if text
        )
        y = top + LINE * (index + 0.78) + 1.5
        parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}" font-family="monospace" font-size="{LABEL_SIZE}">'
            f"{spans}</text>"
        )
    return "".join(parts)


def _loop(box: Box, edge: DrawnEdge, busiest: int) -> str:
    """An edge from a state to itself, on the right of its box."""
    x, y = box.x + box.width / 2, box.y
    path = f"M{_n(x)} {_n(y - 9)} C{_n(x + LOOP)} {_n(y - 24)} {_n(x + LOOP)} {_n(y + 24)} {_n(x + 8)} {_n(y + 10)}"
    head = f'<path d="M{_n(x)} {_n(y + 7)} L{_n(x + 9.5)} {_n(y + 5.5)} L{_n(x + 6)} {_n(y + 14)} Z" fill="{EDGE}"/>'
    rows = _rows(edge)
    top = y - _size(rows)[1] / 2
    line = f'<path d="{path}" fill="none" {_stroke(edge, busiest)}/>{head}'
    return _edge_group(edge, line + _text(rows, x + LOOP, top, "start", edge))


def _start(box: Box) -> str:
    """The dot and the arrow in front of the initial state."""
    top = box.y - box.height / 2
    return (
        f'<circle cx="{_n(box.x)}" cy="{_n(top - GAP_Y)}" r="5.5" fill="{INK}"/>'
        f'<path d="M{_n(box.x)} {_n(top - GAP_Y)} V{_n(top - 8)}" stroke="{INK}" stroke-width="1.4"/>'
        f'<path d="M{_n(box.x)} {_n(top)} l-4.5 -9 h9 Z" fill="{INK}"/>'
    )


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


def lay_out(nodes: Mapping[str, Box], links: Sequence[Link], first: str) -> tuple[float, float]:
    """Place nodes and links. Returns the width and the height of the picture, in pixels.

    Args:
        nodes: Boxes with their sizes; the places are filled in, and those of the links, too.
        links: Without self loops, and at most one for each (source, dest).
        first: The node to begin at: a link back to a node from which it was reached leads upwards.

    Raises:
        EngineError: the library fast-sugiyama is not installed.
    """
    _direct(nodes, links, first)
    ranks = _ranks(nodes, links)
    pairs = [pair for link in links for pair in pairwise(_chain(nodes, link))]
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
    _place_ends(nodes, links)
    return max(box.x + box.width / 2 + box.overhang for rank in ranks for box in rank), height - GAP_Y


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
        EngineError: the library fast-sugiyama is not installed.
    """
    try:
        from fast_sugiyama import from_edges
    except ImportError as error:
        message = (
            "SVG needs the package fast-sugiyama: run `pip install fast-sugiyama`, or write Mermaid with "
            "`--format mermaid`"
        )
        raise EngineError(message, kind="layout_error", blame="spec") from error
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
    """Place a rank's boxes by weighted least squares, in order and apart: neighbours that would overlap move
    together."""
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
    for (of, at_top), ends_here in ends.items():
        box = by_id[of]
        step = min(30.0, (box.width - 24.0) / max(len(ends_here) - 1, 1))
        for place, (wanted, index) in enumerate(sorted(ends_here)):
            x = box.x + (place - (len(ends_here) - 1) / 2) * step
            if len(ends_here) == 1:
                x = min(max(wanted, box.x - box.width / 2 + 14), box.x + box.width / 2 - 14)
            upper, lower = links[index].ends
            links[index].ends = (upper, x) if at_top else (x, lower)
