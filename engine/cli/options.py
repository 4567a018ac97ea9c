"""Options of the commands that run episodes: one name, type and help text for each."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.terminal import echo

SpecPath = Annotated[Path | None, typer.Argument(help="The episode spec. With --resume the run's own spec is used.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value: --set rollout.seed=1")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Run only this number of tasks, the first ones.")]
Out = Annotated[Path | None, typer.Option(help="Folder in which runs are stored; by default the spec's `rollout.out`.")]
Resume = Annotated[
    str | None, typer.Option(metavar="RUN", help="Continue this run: a folder, an id or its beginning, or `latest`.")
]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE:NAME",
        help="Import this code, which the run names, such as its credit method. Code of a run is not imported without it.",
    ),
]


def only_looks(command: Callable[..., None]) -> Callable[..., None]:
    """Import nothing that a run names during a command, but what its option `--import` names, and nothing from the current folder."""

    @wraps(command)
    def looks(*arguments: Any, **options: Any) -> None:
        from engine.spec.code.entry import looking

        with looking(options.get("imports") or []) as imported:
            command(*arguments, **options)
        for use in [use for use, done in imported.items() if not done]:
            echo(f"--import {use} had no effect: nothing needed this code", err=True)

    return looks
