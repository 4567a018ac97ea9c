# ruff: noqa: PT028  (a command called `test`, not a test)
"""`engine test`: plays the scenarios of specs without a model, and prints the differences from their expectations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.cli.options import Json, Overrides
from engine.terminal import echo, echo_json, visible

if TYPE_CHECKING:
    from rich.console import Console

    from engine.plugins.scenarios.suite import ScenarioResult, SuiteResult

PASSED, DIFFERS, INVALID = 0, 1, 2
_STYLES = {"-": "red", "+": "green", " ": "dim"}


def test(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH…", help="Specs, files of scenarios, or folders of them.")
    ],
    require_coverage: Annotated[
        bool,
        typer.Option(
            "--require-coverage", help="Require that every transition is taken, like --coverage-fail-under 100."
        ),
    ] = False,
    fail_under: Annotated[
        float | None,
        typer.Option(
            "--coverage-fail-under",
            min=0,
            max=100,
            metavar="PERCENT",
            help="Minimum percentage of the transitions of each machine that is taken.",
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option("-k", metavar="TEXT", help="Play only scenarios whose name contains this.")
    ] = None,
    overrides: Overrides = None,
    json: Json = False,
) -> None:
    """Play the scenarios of specs on the scripted backend, with the model's real tokenizer.

    A spec's scenarios are beside it: specs/quickstart.scenarios.yaml for specs/quickstart.yaml. Without -k, scenarios
    of failures, of the time limit and of a reply that is given up are generated where no written one takes the
    transition. Exits with 0 when all results are as expected, 1 if one differs or too few transitions are taken, 2 if
    a file cannot be read or a scenario cannot be played.

    Tools, environments and users of the specs are run: use only specs that you trust.
    """
    from engine.logs import configure_logging
    from engine.plugins.scenarios.suite import Formats, run_suite

    configure_logging()
    specs = _specs(paths)
    if not specs:
        echo(f"no specs under {', '.join(map(str, paths))}", err=True)
        raise typer.Exit(INVALID)
    formats = Formats()
    suites = [run_suite(spec, formats, overrides or (), only, file, generate=only is None) for spec, file in specs]
    least = 100.0 if require_coverage else fail_under
    if json:
        echo_json(as_data(suites, least))
    else:
        _print(suites, least)
    raise typer.Exit(status(suites, least))


test.__test__ = False  # type: ignore[attr-defined]  # pytest: this is no test


def _specs(paths: Sequence[Path]) -> list[tuple[Path, Path | None]]:
    """The specs to test, each with the file of its scenarios; None for the file beside it."""
    from engine.plugins.scenarios.load import files_of_scenarios, spec_of
    from engine.validate.examine import find_specs

    specs: dict[tuple[Path, Path | None], tuple[Path, Path | None]] = {}
    for path in paths:
        named = files_of_scenarios(path)
        pairs = [(spec, None) for spec in find_specs([path])] if path.is_dir() else [(spec_of(path), None)][: not named]
        for spec, file in [*pairs, *((spec_of(file), file) for file in named)]:
            key = (spec.absolute(), file.absolute() if file else None)
            specs.setdefault(key, (spec, file))
    return list(specs.values())


def too_low(suite: SuiteResult, least: float | None) -> bool:
    """Return whether too few of a machine's transitions are taken."""
    return least is not None and suite.coverage is not None and suite.coverage.percent < least - 1e-9


def status(suites: Sequence[SuiteResult], least: float | None) -> int:
    """Return the exit status: 0, 1 or 2."""
    if any(suite.invalid for suite in suites) or not any(suite.results for suite in suites):
        return INVALID
    bad = any(suite.differs or too_low(suite, least) for suite in suites)
    return DIFFERS if bad else PASSED


# ---- text


def _print(suites: Sequence[SuiteResult], least: float | None) -> None:
    from engine.console import make_console

    console = make_console(soft_wrap=True)
    for suite in suites:
        _print_suite(console, suite, least)
    results = [result for suite in suites for result in suite.results]
    failed = sum(not result.passed for result in results)
    counted = f"{len(results)} scenario{'s' if len(results) != 1 else ''} of {len(suites)} spec"
    counted += "s" if len(suites) != 1 else ""
    seconds = sum(result.seconds for result in results)
    if failed:
        console.print(f"{counted}: {failed} failed", style="bold red")
    else:
        console.print(f"{counted} passed in {seconds:.2f} s" if results else counted, style="bold")


def _print_suite(console: Console, suite: SuiteResult, least: float | None) -> None:
    from engine.plugins.scenarios.coverage import show_edge

    console.print(str(suite.spec), style="bold")
    for problem in suite.problems:
        console.print(f"  {problem}", style="red")
    if suite.scenarios is None and not suite.problems:
        console.print(f"  no scenarios: write {suite.spec.stem}.scenarios.yaml beside it", style="yellow")
    for result in suite.results:
        _print_result(console, result)
    if (coverage := suite.coverage) is not None:
        missing, low = coverage.missing, too_low(suite, least)
        summary = f"  {len(coverage.taken) - len(missing)} of {len(coverage.taken)} transitions taken"
        if low:
            summary += f": {coverage.percent:.1f} %, {least:g} % are required"
        console.print(summary, style="red" if low else "yellow" if missing else "")
        for edge in missing:
            console.print(f"    never: {show_edge(edge)}", style="red" if low else "yellow")
    console.print()


def _print_result(console: Console, result: ScenarioResult) -> None:
    from rich.text import Text

    mark = ("✓ ", "green") if result.passed else ("✗ ", "bold red")
    console.print(Text.assemble("  ", mark, result.name, (f"  {result.seconds * 1e3:.0f} ms", "dim")))
    for problem in result.problems:
        console.print(f"      {problem}", style="red")
    if not result.differences:
        return
    console.print(f"      {result.origin}", style="dim")
    console.print(Text.assemble("      ", ("--- expected", "red"), "  ", ("+++ actual", "green")))
    for mismatch in result.differences:
        console.print(Text(visible(f"      @@ {mismatch.what} @@"), style="cyan"))
        for side, line in mismatch.lines:
            console.print(Text(visible(f"      {side}{line}"), style=_STYLES[side]))


# ---- json


def as_data(suites: Sequence[SuiteResult], least: float | None) -> dict[str, Any]:
    """Return `{"status": 0 | 1 | 2, "specs": [{"spec", "scenarios", "problems", "results": [...], "coverage"}]}`."""
    specs = [
        {
            "spec": str(suite.spec),
            "scenarios": str(suite.scenarios) if suite.scenarios else None,
            "problems": [str(problem) for problem in suite.problems],
            "results": [_result_data(result) for result in suite.results],
            "coverage": _coverage_data(suite, least),
        }
        for suite in suites
    ]
    return {"status": status(suites, least), "specs": specs}


def _result_data(result: ScenarioResult) -> dict[str, Any]:
    origin, failure = result.origin, result.failure
    return {
        "name": result.name,
        "passed": result.passed,
        "line": origin.line if origin else None,
        "problems": [str(problem) for problem in result.problems],
        "differences": [{"what": mismatch.what, "diff": mismatch.text} for mismatch in result.differences],
        "failure": {name: value for name, value in failure.plain().items() if name != "trace"} if failure else None,
        "seconds": round(result.seconds, 6),
    }


def _coverage_data(suite: SuiteResult, least: float | None) -> dict[str, Any] | None:
    if suite.coverage is None:
        return None
    names = ("source", "trigger", "dest", "conditions")
    taken = [{**dict(zip(names, edge, strict=True)), "taken": count} for edge, count in suite.coverage.taken.items()]
    impossible = [dict(zip(names, edge, strict=True)) for edge in suite.coverage.impossible]
    return {
        "percent": round(suite.coverage.percent, 3),
        "enough": not too_low(suite, least),
        "transitions": taken,
        "impossible": impossible,
    }
