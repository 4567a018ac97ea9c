"""Options of the commands that run episodes: one name, type and help text for each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SpecPath = Annotated[Path | None, typer.Argument(help="The episode spec. With --resume the run's own spec is used.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value: --set rollout.seed=1")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Run only this number of tasks, the first ones.")]
Out = Annotated[Path | None, typer.Option(help="Folder in which runs are stored; by default the spec's `rollout.out`.")]
Resume = Annotated[
    str | None, typer.Option(metavar="RUN", help="Continue this run: a folder, an id or its beginning, or `latest`.")
]
