"""`engine validate`: all errors of a spec with their positions and fixes, and its worst-case cost. `engine explain`:
what a rule finds."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from engine import plugin
from engine.cli.options import Overrides, one_of
from engine.spec.access import Access
from engine.terminal import echo
from engine.validate.report import UNREADABLE, Report, as_json, as_text

_SPEC_KEY = re.compile(r"^(?:spec|extends)[ \t]*:", re.MULTILINE)


FORMATS = ("text", "json")
"""The core's formats of findings; plugins add others."""


def find_specs(named: Sequence[Path], allowed: Sequence[Path] = ()) -> Iterator[Path]:
    """Yield the files to validate, each once: for a folder, all specs below it.

    In a folder, a YAML file is a spec if it has the key `spec` or `extends` at the top level; scripts and scenarios
    have neither.

    Args:
        named: Files and folders.
        allowed: Folders to which links in these may lead.
    """
    seen: set[Path] = set()
    for path in named:
        for file in _under(path, allowed) if path.is_dir() else [path]:
            if file.absolute() not in seen:
                seen.add(file.absolute())
                yield file


def _under(folder: Path, allowed: Sequence[Path]) -> list[Path]:
    specs = []
    for file in (*folder.rglob("*.yaml"), *folder.rglob("*.yml")):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if file.is_file() and not hidden and _looks_like_spec(file, allowed):
            specs.append(file)
    return sorted(specs)


def _looks_like_spec(file: Path, allowed: Sequence[Path]) -> bool:
    from engine.spec.resolve import MAX_BYTES

    try:
        data = Access.for_spec(file, allowed).read(file, MAX_BYTES)
    except (OSError, ValueError):
        return True  # reading it reports the reason
    return data is None or _SPEC_KEY.search(data.decode("utf-8-sig", "replace")) is not None


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
        from engine.validate.examine import Options, examine_all
        from engine.validate.worst_case import InvalidBudgetError, read_budget

        try:
            most = read_budget(budget or ())
        except InvalidBudgetError as error:
            raise typer.BadParameter(str(error), param_hint="--budget") from error
        from engine.validate.check import TrainerError, trainer_of

        try:
            if trainer is not None:
                trainer_of(trainer)
        except TrainerError as error:
            raise typer.BadParameter(str(error), param_hint="--trainer") from error
        folders = tuple(allowed or ())
        options = Options(tuple(overrides or ()), worst, most, imports, folders, timeout, trainer)
        reports, printed = examine_all(list(find_specs(specs, folders)), options)
    for line in printed:
        echo(line, err=True)
    if not reports:
        echo(f"no specs under {', '.join(map(str, specs))}", err=True)
        raise typer.Exit(UNREADABLE)
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

    from engine.validate.registry import page_ids, page_of

    ids = page_ids()
    if rule is None:
        width = max(map(len, ids), default=0)
        for name in ids:
            page = page_of(name)
            if page is not None:
                echo(f"{name:<{width}}  {page.severity:<7}  {page.about}")
        return
    page = page_of(rule.strip().strip("[]`"))
    if page is None:
        near = get_close_matches(rule, ids, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else ""
        echo(f"there is no rule `{rule}`{hint} (`engine explain` lists them all)", err=True)
        raise typer.Exit(UNREADABLE)
    echo(page.text.rstrip())
