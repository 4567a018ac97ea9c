"""What a picture of a machine shows, and the picture as Mermaid; `engine.plugins.pictures.draw` draws the same as SVG.

Transitions between the same two states share an edge, in the order in which they are tried. Transitions that all states
share (usually `limit` and `failed`) are drawn once, from a box for any state.

The diagrams of the library `transitions` do not mark final states and do not escape guards, so Mermaid is written here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from engine.machine.machine import ResolvedMachine, resolve_machine
from engine.schemas.base import Struct
from engine.schemas.machine import MachineSpec

Counts = Mapping[tuple[str, str, str], int]
"""How often each (source, event, dest) was taken."""

Events = Mapping[str, frozenset[str]]
"""The events that may occur in a state, for states where they are known."""

ANY_STATE = "any state"


class EdgeLine(Struct, frozen=True, kw_only=True):
    """One event on an edge."""

    event: str
    guard: str | None
    count: int | None
    """How often it was taken; None without counts."""


class DrawnEdge(Struct, frozen=True, kw_only=True):
    """All transitions from one state to another."""

    source: str
    dest: str
    lines: tuple[EdgeLine, ...]

    @property
    def count(self) -> int | None:
        """How often any of its transitions was taken; None without counts."""
        counted = {(line.event): line.count for line in self.lines if line.count is not None}
        return sum(counted.values()) if counted else None


class Picture(Struct, frozen=True, kw_only=True):
    """The content of a picture."""

    machine: ResolvedMachine
    edges: list[DrawnEdge]
    boxes: list[str]
    """The names of the states, and of the box for any state, if there is one."""


def picture(
    machine: MachineSpec | ResolvedMachine, counts: Counts | None = None, events: Events | None = None
) -> Picture:
    """Group a machine's transitions into edges.

    Args:
        machine: The machine.
        counts: If given, shown beside each event.
        events: If given, a transition from `"*"` is left out of states in which its event never occurs.
    """
    resolved = resolve_machine(machine) if isinstance(machine, MachineSpec) else machine
    possible = events or {}
    # Without those from `"*"` in states in which their event never occurs.
    shown = [
        (t, (t.trigger, t.dest, t.conditions, t.index))
        for t in resolved.transitions
        if t.source in resolved.states and not (t.wildcard and t.trigger not in possible.get(t.source, {t.trigger}))
    ]
    # Those from `"*"` that apply in every state that is not final.
    standing = set(resolved.states) - resolved.final
    sources: dict[tuple[str, str, str | None, int | None], set[str]] = {}
    for t, anywhere in shown:
        if t.wildcard:
            sources.setdefault(anywhere, set()).add(t.source)
    alike = {key for key, states in sources.items() if states >= standing and len(standing) > 1}
    grouped: dict[tuple[str, str], dict[tuple[str, str | None], int]] = {}
    for t, anywhere in shown:
        source = ANY_STATE if anywhere in alike else t.source
        taken = counts.get((t.source, t.trigger, t.dest), 0) if counts is not None else 0
        lines = grouped.setdefault((source, t.dest), {})
        key = (t.trigger, t.conditions)
        lines[key] = lines.get(key, 0) + taken
    edges = [
        DrawnEdge(
            source=source,
            dest=dest,
            lines=tuple(
                EdgeLine(event=event, guard=guard, count=n if counts is not None else None)
                for (event, guard), n in lines.items()
            ),
        )
        for (source, dest), lines in grouped.items()
    ]
    any_state = [ANY_STATE] if any(edge.source == ANY_STATE for edge in edges) else []
    return Picture(machine=resolved, edges=edges, boxes=[*resolved.states, *any_state])


def mermaid(machine: MachineSpec | ResolvedMachine, counts: Counts | None = None, events: Events | None = None) -> str:
    """Return the machine as a Mermaid `stateDiagram-v2`. The arguments are those of `picture`."""
    drawn = picture(machine, counts, events)
    names = _identifiers(drawn.boxes)
    text = ["stateDiagram-v2"]
    for state, spec in drawn.machine.states.items():
        action = f"<br/>{_escape(spec.action)}" if spec.action else ""
        text.append(f'    state "{_escape(state)}{action}" as {names[state]}')
    if ANY_STATE in names:
        text.append(f'    state "{ANY_STATE}" as {names[ANY_STATE]}')
    if drawn.machine.initial in names:
        text.append(f"    [*] --> {names[drawn.machine.initial]}")
    for edge in drawn.edges:
        if edge.dest in names:
            lines = []
            for line in edge.lines:
                guard = f" [{_escape(line.guard)}]" if line.guard else ""
                count = f" ×{line.count}" if line.count is not None else ""
                lines.append(f"{_escape(line.event)}{guard}{count}")
            text.append(f"    {names[edge.source]} --> {names[edge.dest]} : {'<br/>'.join(lines)}")
    text += [f"    {names[state]} --> [*]" for state in drawn.machine.states if state in drawn.machine.final]
    return "\n".join(text) + "\n"


def _identifiers(names: list[str]) -> dict[str, str]:
    """A different identifier for each name, which Mermaid accepts."""
    identifiers: dict[str, str] = {}
    for name in names:
        base = re.sub(r"\W", "_", name, flags=re.ASCII) or "_"
        if base.lower() in ("state", "note", "end", "direction", "class", "classdef", "default", "hide", "scale"):
            base += "_"
        wanted, at = base, 2
        while wanted in identifiers.values():
            wanted, at = f"{base}_{at}", at + 1
        identifiers[name] = wanted
    return identifiers


def _escape(text: str) -> str:
    """Replace characters that have a meaning in Mermaid or HTML by entity codes."""
    flat = " ".join(text.split())
    return re.sub(r"[^\w .,=!()+*/?|\[\]'-]", lambda match: f"#{ord(match[0])};", flat)
