"""`engine compare`: compares two runs of the same tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.cli.exits import USAGE, errors_exit, wrong_usage
from engine.cli.options import Json, RunsFolder, only_looks
from engine.terminal import echo_json

if TYPE_CHECKING:
    from rich.console import Console

    from engine.plugins.compare.run_comparison import RunComparison

_TASKS = 8
"""Maximum number of tasks that are named as better, and as worse."""
_VALUE = 60
"""Maximum number of characters of a value of a spec."""


@only_looks
def compare(
    first: Annotated[
        str, typer.Argument(help="A run's or a training's folder, a run's id or the beginning of it, or `latest`.")
    ],
    second: Annotated[str, typer.Argument(help="The run that is compared with it.")],
    out: RunsFolder = Path("runs"),
    json: Json = False,
) -> None:
    """Compare two runs, paired by task: the difference of the second run from the first, with a 95 % interval.

    For a training's folder, the newest evaluation is used. Only tasks that both runs have, and that are the same in
    both, are compared; the others are counted. Episodes with a failure that is not the policy's are excluded. The tasks
    with the largest losses and gains are named, and the values of the specs that differ.
    """
    from engine.console import make_console
    from engine.plugins.compare.run_comparison import compare_runs
    from engine.store import RunStore, find_run

    with errors_exit(USAGE):
        one, other = (RunStore.open(find_run(_run(run), out=out), readonly=True) for run in (first, second))
        comparison = compare_runs(one, other)
    if comparison.nothing is not None:
        wrong_usage(f"{one.run_id} and {other.run_id} cannot be compared: {comparison.nothing}")
    if json:
        echo_json(
            {
                "first": comparison.first,
                "second": comparison.second,
                "tasks": len(comparison.tasks),
                "only_first": comparison.only_first,
                "only_second": comparison.only_second,
                "changed": len(comparison.changed),
                "masked": comparison.masked,
                "warning": comparison.warning,
                "differences": {
                    measure.name: {name: value for name, value in measure.plain().items() if name != "name"}
                    for measure in comparison.measures
                },
                "verdicts": comparison.counts,
                "by_task": [pair.plain() for pair in comparison.tasks],
                "spec": [each.plain() for each in comparison.spec],
            }
        )
    else:
        _print(make_console(soft_wrap=True), comparison)


def _run(word: str) -> str:
    """What names a run; for a training's folder, its newest evaluation."""
    try:
        evaluations = sorted(path.parent for path in Path(word).glob("evals/*/run.db"))
    except (OSError, ValueError):  # a path that the system refuses: `find_run` reports it
        evaluations = []
    return str(evaluations[-1]) if evaluations else word


def _print(console: Console, comparison: RunComparison) -> None:
    from rich.table import Table
    from rich.text import Text

    from engine.plugins.evaluation.command import words

    table = Table("measure", "first", "second", "difference", "95 % interval", title_justify="left")
    for row in comparison.measures:
        table.add_row(
            words(row.name),
            f"{row.first:.3f}",
            f"{row.second:.3f}",
            f"{row.difference:+.3f}",
            f"{row.low:+.3f} to {row.high:+.3f}" if row.low is not None else "–",
        )
    console.print(f"first: {comparison.first}\nsecond: {comparison.second}")
    console.print(table)
    left_out = [
        f"{count} tasks {what}"
        for count, what in (
            (comparison.only_first, "only in the first"),
            (comparison.only_second, "only in the second"),
            (len(comparison.changed), "not the same in both"),
        )
        if count
    ]
    if sum(comparison.masked):
        left_out.append(
            f"{comparison.masked[0]} and {comparison.masked[1]} episodes with a failure that is not the policy's"
        )
    counts = ", ".join(f"{count} {verdict}" for verdict, count in comparison.counts.items())
    console.print(
        f"{len(comparison.tasks)} tasks, paired: {counts}" + (f"; left out: {', '.join(left_out)}" if left_out else "")
    )
    for verdict, pairs in (("worse", comparison.tasks), ("better", comparison.tasks[::-1])):
        shown = [pair for pair in pairs if pair.verdict == verdict][:_TASKS]
        if shown:
            tasks = ", ".join(f"{pair.task} {pair.difference:+.3f}" for pair in shown)
            console.print(Text(f"{verdict}: {tasks}", style="red" if verdict == "worse" else "green"))
    if comparison.spec:
        rows = Table("the runs differ in", "first", "second", title_justify="left")
        for value in comparison.spec:
            rows.add_row(Text(value.path), Text(_short(value.first)), Text(_short(value.second)))
        console.print(rows)
    if comparison.warning is not None:
        console.print(f"warning: {comparison.warning}", style="yellow")


def _short(value: Any) -> str:
    from engine.store.codec import json_of

    text = "–" if value is None else json_of(value)
    return text if len(text) <= _VALUE else f"{text[: _VALUE - 1]}…"
