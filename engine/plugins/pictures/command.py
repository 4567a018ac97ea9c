"""`engine graph`: draws a spec's machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine import plugin
from engine.cli.exits import ERROR, errors_exit
from engine.cli.options import Overrides, Spec, one_of
from engine.terminal import echo

if TYPE_CHECKING:
    from collections import Counter


def graph(
    spec: Spec,
    overrides: Overrides = None,
    run: Annotated[
        str | None, typer.Option(metavar="RUN", help="Show how often this run's episodes took each transition.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write here instead of to the terminal.")] = None,
    format: Annotated[
        str | None, one_of("graph_formats", ["mermaid"], "The default follows the suffix of --out, else mermaid.")
    ] = None,
) -> None:
    """Draw a spec's machine, including its preset.

    Mermaid text can be pasted into documents. SVG needs the package fast-sugiyama. Guards are shown in brackets.
    Transitions that all states share are drawn once, from a box called "any state".
    """
    from engine.actions.facts import events_of
    from engine.machine.machine import resolved_machine
    from engine.plugins.pictures.graph import mermaid
    from engine.spec.load import load_spec

    with errors_exit(ERROR):
        loaded = load_spec(spec, list(overrides or ()))
        machine = resolved_machine(loaded.spec)
        counts = _counts(run, Path(loaded.spec.rollout.out)) if run is not None else None
    if format is None:
        suffix = "" if out is None else out.suffix.removeprefix(".")
        format = suffix if suffix in plugin.entries("graph_formats") else "mermaid"
        if format != suffix and (why := plugin.missing("graph_formats", suffix)) is not None:
            raise typer.BadParameter(why, param_hint="--out")
    draw = mermaid if format == "mermaid" else plugin.load(plugin.entries("graph_formats")[format])
    with errors_exit(ERROR):
        text = draw(machine, counts, events_of(machine))
    if out is None:
        echo(text, nl=False)
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        echo(f"cannot write {out}: {error.strerror}", err=True)
        raise typer.Exit(1) from None


def _counts(run: str, out: Path) -> Counter[tuple[str, str, str]]:
    from collections import Counter

    from engine.store import RunStore, find_run
    from engine.store.dropped import dropped_words

    with RunStore.open(find_run(run, out=out), readonly=True) as store:
        if dropped := dropped_words(store):
            echo(dropped, err=True)
        return Counter(step for trajectory in store.trajectories() for step in trajectory.path)
