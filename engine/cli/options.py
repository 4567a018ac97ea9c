"""Arguments and options that several commands have: one name, type and help text for each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from engine import plugin
from engine.terminal import echo

SpecPath = Annotated[Path | None, typer.Argument(help="The episode spec. With --resume the run's own spec is used.")]
Spec = Annotated[Path, typer.Argument(help="The episode spec.")]
StoredRun = Annotated[str, typer.Argument(help="A run's folder, its id or the beginning of it, or `latest`.")]
_RUNS = "Folder in which runs are stored."
RunsFolder = Annotated[Path, typer.Option(metavar="FOLDER", help=_RUNS)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the spec: --set rollout.seed=1"),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Run only this number of tasks, the first ones.")]
Out = Annotated[Path | None, typer.Option(metavar="FOLDER", help=_RUNS, show_default="the spec's `rollout.out`")]
Resume = Annotated[
    str | None, typer.Option(metavar="RUN", help="Continue this run: a folder, an id or its beginning, or `latest`.")
]
KeepGoing = Annotated[
    bool, typer.Option("--keep-going", help="Continue if the first 16 episodes all fail with one cause.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")]
Score = Annotated[str | None, typer.Option(metavar="LABEL", help="Use the rewards of this score of `engine rescore`.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE:NAME",
        help="Import this code, which the run names, such as its credit method. Code of a run is not imported without "
        "it.",
    ),
]


def only_looks(command: Callable[..., None]) -> Callable[..., None]:
    """Import nothing that a run names during a command, but what its option `--import` names, and nothing from the
    current folder."""

    @wraps(command)
    def looks(*arguments: Any, **options: Any) -> None:
        from engine import looking

        with looking(options.get("imports") or []) as imported:
            command(*arguments, **options)
        for use in [use for use, done in imported.items() if not done]:
            echo(f"--import {use} had no effect: nothing needed this code", err=True)

    return looks


def one_of(point: str, core: Sequence[str], help: str) -> Any:
    """An option whose values are the core's names and those that plugins add to a point."""

    def parsed(name: str) -> str:
        names = [*core, *plugin.entries(point)]
        if name in names:
            return name
        raise typer.BadParameter(plugin.missing(point, name) or f"{name!r} is not one of {', '.join(names)}")

    names = [*core, *plugin.entries(point)]
    return typer.Option(parser=parsed, metavar="|".join(names), autocompletion=lambda: names, help=help)


def with_options(name: str, command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options that plugins add to it. It gets them as `added`: option -> value, None if it is not
    given."""
    signature = inspect.signature(command, eval_str=True)
    core = {key: parameter for key, parameter in signature.parameters.items() if key != "added"}
    taken = [f"{name} --{key.replace('_', '-')}" for key in core]
    options = {
        f"--{option}": annotation
        for path, annotation in plugin.loaded("options", taken).items()
        for of, _, option in [path.partition(" --")]
        if of == name
    }
    variables = {option: option.removeprefix("--").replace("-", "_") for option in options}
    parameters = core | {
        variables[option]: inspect.Parameter(
            variables[option], inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
        )
        for option, annotation in options.items()
    }

    @wraps(command)
    def called(**values: Any) -> None:
        added = {option: values.pop(variable) for option, variable in variables.items()}
        command(**values, added=added)

    called.__dict__["__signature__"] = signature.replace(parameters=list(parameters.values()))
    called.__annotations__ = {key: parameter.annotation for key, parameter in parameters.items()}
    return called
