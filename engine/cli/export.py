"""`engine export`: the command line of `Run.export`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from engine.cli.exits import USAGE, errors_exit
from engine.cli.options import Imports, RunsFolder, Score, StoredRun, one_of, only_looks

CORE = ("jsonl", "parquet", "scenario")
"""Formats of the core; plugins add others."""


@only_looks
def export(
    run: StoredRun,
    episode: Annotated[str | None, typer.Option(metavar="ID", help="With --format scenario: the episode.")] = None,
    filter: Annotated[
        str | None,
        typer.Option(
            metavar="CEL",
            help="Only episodes for which this holds: an expression over the variables of guards, `outcome` and "
            "`episode`, "
            "such as 'outcome.solved && turns.assistant <= 4'.",
        ),
    ] = None,
    trainable_only: Annotated[
        bool, typer.Option("--trainable-only", help="Leave out rows that are not trainable.")
    ] = False,
    credit: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Change the spec's credit method: --credit method=turn_return"),
    ] = None,
    score: Score = None,
    values: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A critic's values, for bilevel_gae and turn_ppo: JSON lines with `episode_id` and `values`, "
            "a list for each turn, a number for each sampled token.",
        ),
    ] = None,
    runs: RunsFolder = Path("runs"),
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="The file; by default rows.FORMAT in the run's folder."),
    ] = None,
    format: Annotated[
        str | None,
        one_of(
            "export_formats",
            CORE,
            "jsonl or parquet: training rows; the default follows the suffix of --out, else jsonl. "
            "scenario: a test of one episode, for `engine test`. Others are formats of plugins.",
        ),
    ] = None,
    imports: Imports = None,
    added: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write training rows, one per branch: ids, loss mask, log-probs, rewards and advantages by token, messages.

    All rows of finished episodes are written, with a column `trainable`; a run that is still running can be
    exported too. Rewards and advantages are computed from the stored ledgers, so --credit needs no new run. The tensors
    that a forward pass needs for images are written to a folder beside the file, FILE.images, one file per image.

    With --format scenario: a scenario of one episode, with its replies and its result, which has passed `engine test`,
    so the spec's code runs. A file that holds scenarios of the same spec gets one more.
    """
    from engine import looking, open
    from engine.console import make_console

    of_plugins = {option.removeprefix("--").replace("-", "_"): value for option, value in added.items()}
    runs_code = looking(None) if format == "scenario" else nullcontext()
    with errors_exit(USAGE), runs_code, (stored := open(run, runs)).store:
        exported = (stored if filter is None else stored.filter(filter)).export(
            out,
            format=format,
            episode=episode,
            trainable_only=trainable_only,
            credit=credit or (),
            score=score,
            values=values,
            **of_plugins,
        )
    console = make_console(soft_wrap=True)
    console.print(f"{exported.words}: {exported.path}")
    for warning in exported.warnings:
        console.print(warning, style="yellow")
    for note in exported.notes:
        console.print(note)
