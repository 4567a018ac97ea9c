"""`engine graph`: a spec's machine as a picture."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.terminal import echo

if TYPE_CHECKING:
    from collections import Counter

    from engine.machine.graph import Events
    from engine.machine.presets import ResolvedMachine


class GraphFormat(StrEnum):
    """How the picture is written."""

    MERMAID = "mermaid"
    SVG = "svg"


def graph(
    spec: Annotated[Path, typer.Argument(help="The episode spec.")],
    format: Annotated[GraphFormat | None, typer.Option(help="As --out's suffix says, else mermaid.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write here instead of to the terminal.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value: --set machine=tools")
    ] = None,
    run: Annotated[
        str | None, typer.Option(metavar="RUN", help="Show how often this run's episodes took each transition.")
    ] = None,
) -> None:
    """Draw a spec's machine, its preset included.

    Mermaid goes into documents as it is; SVG needs no other program. Guards stand in brackets. What every state
    does alike is drawn once, from a box called "any state".
    """
    from engine.errors import EngineError
    from engine.machine.graph import mermaid, svg
    from engine.machine.presets import resolve_machine
    from engine.spec.load import load_spec

    try:
        loaded = load_spec(spec, list(overrides or ()))
        machine = resolve_machine(loaded.spec.machine)
        counts = _counts(run, Path(loaded.spec.rollout.out)) if run is not None else None
    except EngineError as error:
        echo(str(error), err=True)
        raise typer.Exit(1) from None
    if format is None:
        format = GraphFormat.SVG if out is not None and out.suffix == ".svg" else GraphFormat.MERMAID
    events = _events(machine)
    text = svg(machine, counts, events) if format is GraphFormat.SVG else mermaid(machine, counts, events)
    if out is None:
        echo(text, nl=False)
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        echo(f"cannot write {out}: {error.strerror}", err=True)
        raise typer.Exit(1) from None


def _events(machine: ResolvedMachine) -> Events:
    """What may happen in each state, where the engine knows: not behind actions of the spec's own."""
    from engine.actions.facts import ACTIONS, ALWAYS

    return {
        name: frozenset((*facts.events, *ALWAYS))
        for name, state in machine.states.items()
        if (facts := ACTIONS.get(str(state.action))) is not None and facts.events is not None
    }


def _counts(run: str, out: Path) -> Counter[tuple[str, str, str]]:
    from collections import Counter

    from engine.store import RunStore, find_run

    with RunStore.open(find_run(run, out=out), readonly=True) as store:
        return Counter(step for trajectory in store.trajectories() for step in trajectory.path)
