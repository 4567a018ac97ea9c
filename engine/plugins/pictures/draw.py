"""A machine's picture as SVG.

Lengths are in pixels. Widths of text are estimated from the font size, because the program that shows the picture chooses
the fonts; boxes are a little wider than needed.
"""

from __future__ import annotations

import math
import re
import textwrap
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape, quoteattr

from engine.machine.machine import ResolvedMachine
from engine.plugins.pictures.graph import ANY_STATE, Counts, Edge, Events, Picture, picture
from engine.plugins.pictures.layout import GAP_Y, Box, Layout, Link, lay_out
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


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of a label: the event, its guard and its count."""

    event: str
    guard: str
    count: str = ""

    @property
    def width(self) -> float:
        parts = [part for part in (self.event, self.guard, self.count) if part]
        return len(" ".join(parts)) * LABEL_SIZE * 0.61


def _rows(edge: Edge) -> list[_Row]:
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
    rows = [_Row(row, "") for row in before]
    if guard is None:
        return [*rows, _Row(name, "", count)]
    whole = f"[{' '.join(guard.split())}]"
    if len(name) + 1 + len(whole) <= GUARD_COLUMNS:
        return [*rows, _Row(name, whole, count)]
    rows.append(_Row(name, "", count))
    line = ""
    for clause in re.split(r"(?<=&&) |(?<=\|\|) ", whole):
        if line and len(line) + 1 + len(clause) > GUARD_COLUMNS:
            rows.append(_Row("", line))
            line = ""
        line = f"{line} {clause}".strip()
        *full, line = textwrap.wrap(line, GUARD_COLUMNS, break_long_words=False, break_on_hyphens=False)
        rows += [_Row("", part) for part in full]
    return [*rows, _Row("", line)]


def _size(rows: list[_Row]) -> tuple[float, float]:
    return max(row.width for row in rows) + 10.0, len(rows) * LINE + 4.0


def _lines_of(name: str, drawn: Picture) -> tuple[str, str]:
    """The two lines of a box: the state and its action."""
    state = drawn.machine.states.get(name)
    action = state.action if state is not None and state.action else ""
    return name, action.rpartition(":")[2] if ":" in action else action


def _box(name: str, drawn: Picture, ends: int, loop: Edge | None) -> Box:
    title, action = _lines_of(name, drawn)
    width = max(len(title) * NAME_SIZE * 0.72, len(action) * LABEL_SIZE * 0.61, ends * 18.0, 64.0) + 26.0
    overhang = LOOP + _size(_rows(loop))[0] if loop is not None else 0.0
    return Box(width, 46.0 if action else 34.0, overhang)


def svg(machine: MachineSpec | ResolvedMachine, counts: Counts | None = None, events: Events | None = None) -> str:
    """Return the machine as an SVG document. The arguments are those of `picture`.

    Raises:
        LayoutError: the library fast-sugiyama is not installed.
    """
    drawn = picture(machine, counts, events)
    known = set(drawn.machine.states) | ({ANY_STATE} if drawn.has_any_state else set())
    edges = [edge for edge in drawn.edges if edge.dest in known]
    loops = {edge.source: edge for edge in edges if edge.source == edge.dest}
    between = [edge for edge in edges if edge.source != edge.dest]
    nodes = {}
    for name in [*drawn.machine.states, *([ANY_STATE] if drawn.has_any_state else [])]:
        ends = max(sum(e.source == name for e in between), sum(e.dest == name for e in between))
        nodes[name] = _box(name, drawn, ends, loops.get(name))
    links = [Link(edge.source, edge.dest, Box(*_size(_rows(edge)))) for edge in between]
    initial = drawn.machine.initial if drawn.machine.initial in nodes else next(iter(nodes))
    layout = lay_out(nodes, links, initial)
    busiest = max((edge.count or 0 for edge in edges), default=0)
    parts = [_link(link, layout, edge, busiest) for link, edge in zip(links, between, strict=True)]
    parts += [_loop(layout.nodes[name], edge, busiest) for name, edge in loops.items()]
    parts += [_node(name, box, drawn) for name, box in layout.nodes.items()]
    parts += [_label(link, edge) for link, edge in zip(links, between, strict=True)]
    parts.append(_start(layout.nodes[initial]))
    return _document(parts, layout)


def _document(parts: list[str], layout: Layout) -> str:
    width, height = layout.width + 2 * MARGIN, layout.height + 2 * MARGIN + GAP_Y
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
    title, action = _lines_of(name, drawn)
    state = drawn.machine.states.get(name)
    full = state.action if state is not None and state.action else None
    fill, border = PLAIN if full is None else TINTS.get(full, OWN)
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
        f'fill="{ink}">{escape(title)}</text>'
    )
    if action:
        parts.append(
            f'<text x="{_n(box.x)}" y="{_n(box.y + 12)}" text-anchor="middle" font-family="monospace" '
            f'font-size="{LABEL_SIZE - 0.5}" fill="{MUTED}">{escape(action)}</text>'
        )
    return f"<g data-state={quoteattr(name)}>{''.join(parts)}</g>"


def _edge_group(edge: Edge, drawing: str) -> str:
    """A line with its head, and in attributes the transitions that it stands for."""
    events = " ".join(dict.fromkeys(line.event for line in edge.lines))
    names = f"data-from={quoteattr(edge.source)} data-to={quoteattr(edge.dest)} data-events={quoteattr(events)}"
    return f"<g {names}>{drawing}</g>"


def _stroke(edge: Edge, busiest: int) -> str:
    """A line is thicker if it was taken more often, and dashed if it never was."""
    count = edge.count
    if count is None:
        return f'stroke="{MUTED if edge.source == ANY_STATE else EDGE}" stroke-width="1.4"'
    if count == 0:
        return 'stroke="#b8c0c8" stroke-width="1.2" stroke-dasharray="4 3"'
    width = 1.4 + 2.6 * math.log1p(count) / math.log1p(busiest)
    return f'stroke="{EDGE}" stroke-width="{width:.1f}"'


def _link(link: Link, layout: Layout, edge: Edge, busiest: int) -> str:
    names = (link.dest, link.source) if link.upwards else (link.source, link.dest)
    upper, lower = (layout.nodes[name] for name in names)
    top, bottom = upper.y + upper.height / 2, lower.y - lower.height / 2
    start = (link.ends[0], top + (8.0 if link.upwards else 0.0))
    end = (link.ends[1], bottom - (0.0 if link.upwards else 8.0))
    path = _curve(start, link, end)
    tip = (link.ends[0], top) if link.upwards else (link.ends[1], bottom)
    line = f'<path d="{path}" fill="none" {_stroke(edge, busiest)}/>' + _arrow(*tip, 1 if link.upwards else -1, edge)
    return _edge_group(edge, line)


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


def _arrow(x: float, y: float, back: int, edge: Edge) -> str:
    """An arrowhead with its tip at (x, y); `back` is -1 if the line comes from above, 1 if from below."""
    fill = "#b8c0c8" if edge.count == 0 else MUTED if edge.source == ANY_STATE and edge.count is None else EDGE
    base = y + 9 * back
    return f'<path d="M{_n(x)} {_n(y)} L{_n(x - 4.5)} {_n(base)} L{_n(x + 4.5)} {_n(base)} Z" fill="{fill}"/>'


def _label(link: Link, edge: Edge) -> str:
    box = link.label
    width, height = _size(_rows(edge))
    back = (
        f'<rect x="{_n(box.x - width / 2)}" y="{_n(box.y - height / 2)}" width="{_n(width)}" height="{_n(height)}" '
        'rx="4" fill="#ffffff" fill-opacity="0.94"/>'
    )
    return back + _text(_rows(edge), box.x, box.y - height / 2, "middle", edge)


def _text(rows: list[_Row], x: float, top: float, anchor: str, edge: Edge) -> str:
    parts = []
    ink = MUTED if edge.source == ANY_STATE or edge.count == 0 else INK
    for index, row in enumerate(rows):
        spans = " ".join(
            f'<tspan fill="{fill}"{weight}>{escape(text)}</tspan>'
            for text, fill, weight in (
                (row.event, ink, ""),
                (row.guard, GUARD, ""),
                (row.count, ink, ' font-weight="bold"'),
            )
            if text
        )
        y = top + LINE * (index + 0.78) + 1.5
        parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}" font-family="monospace" font-size="{LABEL_SIZE}">'
            f"{spans}</text>"
        )
    return "".join(parts)


def _loop(box: Box, edge: Edge, busiest: int) -> str:
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
