"""`engine validate`: every mistake of a spec, with its place and the fix, and the most that it can cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from engine.cli.validate_report import UNREADABLE, Report, as_json, as_text
from engine.spec.access import Access
from engine.terminal import echo

_SPEC_KEY = re.compile(r"^(?:spec|extends)[ \t]*:", re.MULTILINE)


class Format(StrEnum):
    """How findings are written."""

    TEXT = "text"
    JSON = "json"
    SARIF = "sarif"
    GITHUB = "github"


def find_specs(named: Sequence[Path], allowed: Sequence[Path] = ()) -> Iterator[Path]:
    """The files that are meant, each once: a folder means every spec under it.

    In a folder, a YAML file is a spec if it has the key `spec` or `extends` at its top; scripts and scenarios
    that lie beside specs do not.

    Args:
        named: Files and folders.
        allowed: Folders that links in those may lead to.
    """
    seen: set[Path] = set()
    for path in named:
        found = _under(path, allowed) if path.is_dir() else [path]
        for file in found:
            if file.absolute() not in seen:
                seen.add(file.absolute())
                yield file


def _under(folder: Path, allowed: Sequence[Path]) -> list[Path]:
    files = (file for ending in ("yaml", "yml") for file in folder.rglob(f"*.{ending}"))
    return sorted(
        file for file in files if file.is_file() and not _hidden(file, folder) and _looks_like_spec(file, allowed)
    )


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _looks_like_spec(file: Path, allowed: Sequence[Path]) -> bool:
    from engine.spec.resolve import MAX_BYTES

    try:
        data = Access.for_spec(file, allowed).read(file, MAX_BYTES)
    except (OSError, ValueError):
        return True  # reading it will say why
    return data is None or _SPEC_KEY.search(data.decode("utf-8-sig", "replace")) is not None


def validate(
    specs: Annotated[list[Path], typer.Argument(metavar="SPEC…", help="Specs, or folders of specs.")],
    format: Annotated[Format, typer.Option(help="How findings are written.")] = Format.TEXT,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value: --set limits.user_turns=2")
    ] = None,
    worst: Annotated[
        bool,
        typer.Option("--worst-case", help="Say the most that an episode and the run can cost, and what bounds it."),
    ] = False,
    budget: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=MAXIMUM", help="Fail if the whole run could cost more: --budget tokens=1e9"),
    ] = None,
    notes: Annotated[bool, typer.Option("--notes", help="In text, say what is only worth knowing, too.")] = False,
    imports: Annotated[
        bool,
        typer.Option(
            "--import",
            help="Import the code that specs name, for the checks that need it: only for specs that you trust.",
        ),
    ] = False,
    allowed: Annotated[
        list[Path] | None,
        typer.Option(
            "--allow-path",
            metavar="FOLDER",
            help="Open files below this folder too; without it, those below the spec's and the current folder.",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="What one spec may take.")] = 60.0,
) -> None:
    """Find every mistake before anything runs: file:line:column, the rule, what is wrong, and the fix.

    Exits with 0 when every spec is valid, 1 when one is not, 2 when one could not be read.
    `engine explain RULE` says more about a rule.

    Safe for specs that somebody else wrote: without --import nothing that a spec names is imported or called, no network
    is used, and values of environment variables are masked.
    """
    from engine.checks.budget import BudgetError, read_budget
    from engine.cli.validate_examine import Options, examine_all

    try:
        most = read_budget(budget or ())
    except BudgetError as error:
        raise typer.BadParameter(str(error), param_hint="--budget") from error
    folders = tuple(allowed or ())
    options = Options(tuple(overrides or ()), worst, most, imports, folders, timeout)
    reports, printed = examine_all(list(find_specs(specs, folders)), options)
    for line in printed:
        echo(line, err=True)
    if not reports:
        echo(f"no specs under {', '.join(map(str, specs))}", err=True)
        raise typer.Exit(UNREADABLE)
    if format is Format.TEXT:
        typer.echo(as_text(reports, notes=notes, worst=worst))
    elif said := FORMATS[format](reports):
        typer.echo(said)
    raise typer.Exit(max(report.status for report in reports))


def _sarif(reports: Sequence[Report]) -> str:
    from engine.cli.sarif import as_sarif

    return as_sarif(reports)


def _github(reports: Sequence[Report]) -> str:
    from engine.cli.sarif import as_github

    return as_github(reports)


FORMATS: Mapping[Format, Callable[[Sequence[Report]], str]] = {
    Format.TEXT: as_text,
    Format.JSON: as_json,
    Format.SARIF: _sarif,
    Format.GITHUB: _github,
}
"""How reports become what is printed."""
