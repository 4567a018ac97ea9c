"""Pictures of a machine: Mermaid for documents, SVG for everything else.

Invariant: both show the same states and edges. Transitions between the same two states share an edge, in the order in
which they are tried; what every state does alike (`limit` and `failed`, most often) is drawn once, from a box that
stands for any of them.

The diagrams of the library `transitions` neither mark final states nor escape what guards are written with, so Mermaid
is written here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from engine.machine.presets import ResolvedMachine, ResolvedTransition, resolve_machine
from engine.schemas.machine import MachineSpec

Counts = Mapping[tuple[str, str, str], int]
"""How often each (source, event, dest) was taken."""

Events = Mapping[str, frozenset[str]]
"""Which events may come in a state, for the states where that is known."""

ANY_STATE = "any state"


@dataclass(frozen=True, slots=True)
class Line:
    """One event on an edge."""

    event: str
    guard: str | None
    count: int | None
    """How often it was taken, where that was counted."""


@dataclass(frozen=True, slots=True)
class Edge:
    """Everything that leads from one state to another."""

    source: str
    dest: str
    lines: tuple[Line, ...]

    @property
    def count(self) -> int | None:
        """How often any of it was taken; None where nothing was counted."""
        counted = {(line.event): line.count for line in self.lines if line.count is not None}
        return sum(counted.values()) if counted else None


@dataclass(frozen=True)
class Picture:
    """What is drawn."""

    machine: ResolvedMachine
    edges: list[Edge]

    @property
    def has_any_state(self) -> bool:
        """Whether a box stands for all states that are not final."""
        return any(edge.source == ANY_STATE for edge in self.edges)


def picture(
    machine: MachineSpec | ResolvedMachine, counts: Counts | None = None, events: Events | None = None
) -> Picture:
    """Gather a machine's transitions into edges.

    Args:
        machine: The machine.
        counts: Shown beside each event, where given.
        events: Where given, an event from `"*"` is left out of the states that never meet it.
    """
    resolved = resolve_machine(machine) if isinstance(machine, MachineSpec) else machine
    shown = [t for t in resolved.transitions if not _idle(t, events or {}) and t.source in resolved.states]
    alike = _alike(resolved, shown)
    grouped: dict[tuple[str, str], dict[tuple[str, str | None], int]] = {}
    for t in shown:
        source = ANY_STATE if _as_any(t) in alike else t.source
        taken = counts.get((t.source, t.trigger, t.dest), 0) if counts is not None else 0
        lines = grouped.setdefault((source, t.dest), {})
        key = (t.trigger, t.conditions)
        lines[key] = lines.get(key, 0) + taken
    edges = [
        Edge(
            source,
            dest,
            tuple(Line(event, guard, n if counts is not None else None) for (event, guard), n in lines.items()),
        )
        for (source, dest), lines in grouped.items()
    ]
    return Picture(resolved, edges)


_Any = tuple[str, str, str | None, int | None]


def _as_any(t: ResolvedTransition) -> _Any:
    return t.trigger, t.dest, t.conditions, t.index


def _idle(t: ResolvedTransition, events: Events) -> bool:
    """A transition from `"*"` in a state that never meets its event."""
    return t.wildcard and t.source in events and t.trigger not in events[t.source]


def _alike(machine: ResolvedMachine, shown: list[ResolvedTransition]) -> set[_Any]:
    """Transitions from `"*"` that stand in every state that is not final."""
    standing = set(machine.states) - machine.final
    sources: dict[_Any, set[str]] = {}
    for t in shown:
        if t.wildcard:
            sources.setdefault(_as_any(t), set()).add(t.source)
    return {key for key, found in sources.items() if found >= standing and len(standing) > 1}


def mermaid(machine: MachineSpec | ResolvedMachine, counts: Counts | None = None, events: Events | None = None) -> str:
    """The machine as a Mermaid `stateDiagram-v2`; the arguments are `picture`'s."""
    drawn = picture(machine, counts, events)
    names = _identifiers([*drawn.machine.states, *([ANY_STATE] if drawn.has_any_state else [])])
    text = ["stateDiagram-v2"]
    for state, spec in drawn.machine.states.items():
        action = f"<br/>{_escape(spec.action)}" if spec.action else ""
        text.append(f'    state "{_escape(state)}{action}" as {names[state]}')
    if drawn.has_any_state:
        text.append(f'    state "{ANY_STATE}" as {names[ANY_STATE]}')
    if drawn.machine.initial in names:
        text.append(f"    [*] --> {names[drawn.machine.initial]}")
    for edge in drawn.edges:
        if edge.dest in names:
            label = "<br/>".join(_mermaid_line(line) for line in edge.lines)
            text.append(f"    {names[edge.source]} --> {names[edge.dest]} : {label}")
    text += [f"    {names[state]} --> [*]" for state in drawn.machine.states if state in drawn.machine.final]
    return "\n".join(text) + "\n"


def _mermaid_line(line: Line) -> str:
    guard = f" [{_escape(line.guard)}]" if line.guard else ""
    count = f" ×{line.count}" if line.count is not None else ""
    return f"{_escape(line.event)}{guard}{count}"


def _identifiers(names: list[str]) -> dict[str, str]:
    """Names that Mermaid takes, each of its own."""
    found: dict[str, str] = {}
    for name in names:
        base = re.sub(r"\W", "_", name, flags=re.ASCII) or "_"
        if base.lower() in ("state", "note", "end", "direction", "class", "classdef", "default", "hide", "scale"):
            base += "_"
        wanted, at = base, 2
        while wanted in found.values():
            wanted, at = f"{base}_{at}", at + 1
        found[name] = wanted
    return found


def _escape(text: str) -> str:
    """Mermaid's entity codes for what its grammar or HTML would take as its own."""
    flat = " ".join(text.split())
    return re.sub(r"[^\w .,=!()+*/?|\[\]'-]", lambda match: f"#{ord(match[0])};", flat)


def svg(machine: MachineSpec | ResolvedMachine, counts: Counts | None = None, events: Events | None = None) -> str:
    """The machine as an SVG document; the arguments are `picture`'s."""
    from engine.machine.draw import draw

    return draw(picture(machine, counts, events))
