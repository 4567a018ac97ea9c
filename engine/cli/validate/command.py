"""`engine validate`: all errors of a spec with their positions and fixes, and its worst-case cost. `engine explain`:
what a rule finds."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine import plugin
from engine.cli.exits import USAGE
from engine.cli.options import Overrides, one_of
from engine.cli.validate.report import as_json, as_text
from engine.terminal import echo

if TYPE_CHECKING:
    from engine.validate.report import Report

FORMATS = ("text", "json")
"""The core's formats of findings; plugins add others."""
_OPTIONS = {"budget_error": "--budget", "trainer_error": "--trainer"}
"""The kind of an error -> the option whose value it refuses."""


def validate(
    specs: Annotated[list[Path], typer.Argument(metavar="SPEC…", help="Specs, or folders of specs.")],
    overrides: Overrides = None,
    worst: Annotated[
        bool,
        typer.Option("--worst-case", help="Show the maximum cost of an episode and of the run, and what bounds it."),
    ] = False,
    budget: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=MAXIMUM", help="Fail if the whole run could cost more: --budget tokens=1e9"),
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Also compare what the spec uses with what another trainer carries: --trainer verl"
        ),
    ] = None,
    notes: Annotated[bool, typer.Option("--notes", help="In text, also show findings of severity info.")] = False,
    allowed: Annotated[
        list[Path] | None,
        typer.Option(
            "--allow-path",
            metavar="FOLDER",
            help="Also open files below this folder; the default is the spec's folder and the current folder.",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Time limit for one spec.")] = 60.0,
    format: Annotated[str, one_of("findings_formats", FORMATS, "Format of the findings.")] = "text",
    imports: Annotated[
        bool,
        typer.Option(
            "--import",
            help="Import the code that specs name, for the rules that need it; only for specs that you trust.",
        ),
    ] = False,
) -> None:
    """Find all errors before a run: file:line:column, the rule, what is wrong, and how to fix it.

    The exit status is 0 if all specs are valid, 1 if one is not, 2 if one could not be read.
    `engine explain RULE` describes a rule.

    Safe for untrusted specs: without --import no code that a spec names is imported or called, no network is used, and
    values of environment variables are masked.
    """
    with collections_paused():
        from engine import EngineError, check_files

        try:
            reports = check_files(
                specs,
                overrides or (),
                imports=imports,
                worst_case=worst,
                budget=budget or (),
                trainer=trainer,
                allowed=allowed or (),
                seconds=timeout,
                heard=partial(echo, err=True),
            )
        except EngineError as error:
            raise typer.BadParameter(str(error), param_hint=_OPTIONS[error.kind]) from error
    if not reports:
        echo(f"no specs under {', '.join(map(str, specs))}", err=True)
        raise typer.Exit(USAGE)
    if format == "text":
        typer.echo(as_text(reports, notes=notes, worst=worst))
    elif said := written(format, reports):
        typer.echo(said)
    raise typer.Exit(max(report.status for report in reports))


@contextmanager
def collections_paused() -> Iterator[None]:
    """What a short command imports lives until its end: looking for garbage in it costs a twentieth of `engine
    validate` and `engine show`, and a tenth of `engine plan`."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def written(format: str, reports: Sequence[Report]) -> str:
    """Reports in a format."""
    write = {"text": as_text, "json": as_json}.get(format) or plugin.load(plugin.entries("findings_formats")[format])
    text: str = write(reports)
    return text


def explain(
    rule: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]", help="A rule's id, such as `machine.unreachable`; by default all rules are listed."
        ),
    ] = None,
) -> None:
    """Print the page of a rule: what it finds, why, a bad example and a good one."""
    from difflib import get_close_matches

    from engine import rule_pages

    pages = rule_pages()
    if rule is None:
        width = max(map(len, pages), default=0)
        for name, page in pages.items():
            echo(f"{name:<{width}}  {page.severity:<7}  {page.about}")
    elif named := pages.get(rule.strip().strip("[]`")):
        echo(named.text.rstrip())
    else:
        near = get_close_matches(rule, pages, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else ""
        echo(f"there is no rule `{rule}`{hint} (`engine explain` lists them all)", err=True)
        raise typer.Exit(USAGE)
