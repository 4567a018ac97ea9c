"""`engine compare`: compares two runs of the same tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.eval import Format
from engine.terminal import echo, echo_json

if TYPE_CHECKING:
    from rich.console import Console

    from engine.runner.evaluate import Comparison


def compare(
    first: Annotated[
        str, typer.Argument(help="A run's or a training's folder, a run's id or the beginning of it, or `latest`.")
    ],
    second: Annotated[str, typer.Argument(help="The run that is compared with it.")],
    out: Annotated[Path, typer.Option(help="Folder in which runs are stored.")] = Path("runs"),
    format: Annotated[Format, typer.Option(help="Output format.")] = Format.TEXT,
) -> None:
    """Compare two runs, paired by task: the difference of the second run from the first, with a 95 % interval.

    For a training's folder, the newest evaluation is used. Only tasks that both runs have, and that are the same in
    both, are compared; the others are counted. Episodes with a failure that is not the policy's are excluded.
    """
    from engine.cli.console import make_console
    from engine.errors import EngineError, StoreError
    from engine.runner.evaluate import compare as hold
    from engine.store import RunStore, find_run

    try:
        one, other = (RunStore.open(find_run(_run(run), out=out), readonly=True) for run in (first, second))

        def same(task_id: str) -> bool:
            return one.task(task_id).fields == other.task(task_id).fields

        found = hold(one.trajectories(), other.trajectories(), same)
        if not found.tasks:
            raise StoreError(
                f"{one.run_id} and {other.run_id} have no finished task in common "
                f"({found.changed} of the same name differ); compare runs of the same tasks"
            )
    except EngineError as error:
        echo(str(error), err=True)
        raise typer.Exit(2) from None
    if format is Format.JSON:
        told = {
            "first": one.run_id,
            "second": other.run_id,
            "tasks": found.tasks,
            "only_first": found.only_first,
            "only_second": found.only_second,
            "changed": found.changed,
            "masked": list(found.masked),
            "warning": found.warning,
            "differences": {name: difference.plain() for name, difference in found.differences.items()},
        }
        echo_json(told)
    else:
        _print(make_console(soft_wrap=True), found, one.run_id, other.run_id)


def _run(word: str) -> str:
    """Open a run; for a training, its newest evaluation."""
    try:
        evaluations = sorted(path.parent for path in Path(word).glob("evals/*/run.db"))
    except (OSError, ValueError):  # a path that the system refuses: `find_run` reports it
        evaluations = []
    return str(evaluations[-1]) if evaluations else word


def _print(console: Console, found: Comparison, first: str, second: str) -> None:
    from rich.table import Table

    from engine.cli.eval import words

    table = Table("measure", "first", "second", "difference", "95 % interval", title_justify="left")
    for name, each in found.differences.items():
        ends = f"{each.low:+.3f} to {each.high:+.3f}" if each.low == each.low else "–"
        table.add_row(words(name), f"{each.first:.3f}", f"{each.second:.3f}", f"{each.difference:+.3f}", ends)
    console.print(f"first: {first}\nsecond: {second}")
    console.print(table)
    left_out = [
        f"{count} tasks {what}"
        for count, what in (
            (found.only_first, "only in the first"),
            (found.only_second, "only in the second"),
            (found.changed, "not the same in both"),
        )
        if count
    ]
    if sum(found.masked):
        left_out.append(f"{found.masked[0]} and {found.masked[1]} episodes with a failure that is not the policy's")
    console.print(f"{found.tasks} tasks, paired" + (f"; left out: {', '.join(left_out)}" if left_out else ""))
    if found.warning is not None:
        console.print(f"warning: {found.warning}", style="yellow")
