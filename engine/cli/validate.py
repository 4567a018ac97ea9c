"""`engine validate`: every mistake of a spec, with its place and the fix, and the most that it can cost."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.cli.validate_scenarios import is_scenarios, scenario_problems
from engine.spec.diagnostic import SET_FILE, Diagnostic

if TYPE_CHECKING:
    from engine.checks.worst_case import Bound, WorstCase

VALID, INVALID, UNREADABLE = 0, 1, 2
_SPEC_KEY = re.compile(r"^(?:spec|extends)[ \t]*:", re.MULTILINE)
_WORD = re.compile(r""""(?:[^"\\]|\\.)*"|'[^']*'|\{\{.*?\}\}|[\w./:*-]*[\w./*-]""")
_COLORS = {"error": typer.colors.RED, "warning": typer.colors.YELLOW, "info": typer.colors.BLUE}


WIDEST = 400
"""Characters of a line that are shown."""
MOST_SHOWN = 64 * 2**20
"""Bytes of a file that a line is looked for in."""


class Format(StrEnum):
    """How findings are written."""

    TEXT = "text"
    JSON = "json"
    SARIF = "sarif"
    GITHUB = "github"


@dataclass(frozen=True)
class Report:
    """What was found in one spec."""

    file: str
    diagnostics: list[Diagnostic]
    unreadable: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)
    """Text of the files that were read, where it is at hand."""
    worst: WorstCase | None = None
    """The most that it can cost; None where its machine is not sound, or nobody asked."""
    scenarios: bool = False
    """It is a file of scenarios, held to the spec beside it."""

    @property
    def status(self) -> int:
        """0 valid, 1 invalid, 2 could not be read."""
        if self.unreadable:
            return UNREADABLE
        return INVALID if any(item.severity == "error" for item in self.diagnostics) else VALID


def examine(
    path: Path, overrides: Sequence[str] = (), *, cost: bool = False, budget: Mapping[str, float] | None = None
) -> Report:
    """Read one spec and try every rule on it; a file of scenarios is held to the spec beside it.

    Args:
        path: The spec.
        overrides: As `--set` takes them.
        cost: Compute the worst case too.
        budget: The most that the run may cost; see `engine.checks.budget`.
    """
    from engine.checks import check_spec
    from engine.spec.load import UNREADABLE as UNREADABLE_RULES
    from engine.spec.load import read_spec

    if is_scenarios(path):
        found, unreadable = scenario_problems(path, overrides)
        return Report(str(path), found, unreadable, scenarios=True)
    loaded, problems = read_spec(path, overrides)
    if loaded is None:
        return Report(str(path), problems, unreadable=any(item.rule in UNREADABLE_RULES for item in problems))
    with contextlib.redirect_stdout(sys.stderr):  # what a user's module prints while it is imported is no finding
        found = check_spec(loaded)
        worst = None
        sound = not any(item.severity == "error" and item.rule.startswith("machine.") for item in found)
        if (cost or budget) and sound:
            from engine.checks.budget import over_budget
            from engine.checks.context import CheckContext
            from engine.checks.worst_case import worst_case

            worst = worst_case(CheckContext(loaded))
            found += over_budget(loaded, worst, budget or {})
    return Report(str(path), [*problems, *found], sources=loaded.sources, worst=worst)


def find_specs(named: Sequence[Path]) -> Iterator[Path]:
    """The files that are meant, each once: a folder means every spec under it.

    In a folder, a YAML file is a spec if it has the key `spec` or `extends` at its top; scripts and scenarios
    that lie beside specs do not.
    """
    seen: set[Path] = set()
    for path in named:
        found = _under(path) if path.is_dir() else [path]
        for file in found:
            if file.absolute() not in seen:
                seen.add(file.absolute())
                yield file


def _under(folder: Path) -> list[Path]:
    files = (file for ending in ("yaml", "yml") for file in folder.rglob(f"*.{ending}"))
    return sorted(file for file in files if file.is_file() and not _hidden(file, folder) and _looks_like_spec(file))


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _looks_like_spec(file: Path) -> bool:
    try:
        return _SPEC_KEY.search(file.read_text(encoding="utf-8-sig", errors="replace")) is not None
    except OSError:
        return True  # reading it will say why


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
        typer.Option(metavar="WHAT=MOST", help="Fail if the whole run could cost more: --budget tokens=1e9"),
    ] = None,
    notes: Annotated[bool, typer.Option("--notes", help="In text, say what is only worth knowing, too.")] = False,
) -> None:
    """Find every mistake before anything runs: file:line:column, the rule, what is wrong, and the fix.

    Exits with 0 when every spec is valid, 1 when one is not, 2 when one could not be read.
    `engine explain RULE` says more about a rule.
    """
    from engine.checks.budget import BudgetError, read_budget

    try:
        most = read_budget(budget or ())
    except BudgetError as error:
        raise typer.BadParameter(str(error), param_hint="--budget") from error
    reports = [examine(path, overrides or (), cost=worst, budget=most) for path in find_specs(specs)]
    if not reports:
        typer.echo(f"no specs under {', '.join(map(str, specs))}", err=True)
        raise typer.Exit(UNREADABLE)
    if format is Format.TEXT:
        typer.echo(_printable(as_text(reports, notes=notes, worst=worst)))
    elif said := FORMATS[format](reports):
        typer.echo(_printable(said))
    raise typer.Exit(max(report.status for report in reports))


def _printable(text: str) -> str:
    """Names and variables of the system may hold bytes that are no text."""
    return text.encode("utf-8", "replace").decode("utf-8")


# ---- text


def as_text(reports: Sequence[Report], *, notes: bool = True, worst: bool = False) -> str:
    """Each finding with its line of source and a caret, what each spec can cost, then one line that counts."""
    blocks = [
        _block(item, report.sources)
        for report in reports
        for item in report.diagnostics
        if notes or item.severity != "info"
    ]
    costs = [line for report in reports for line in _cost(report) if not report.scenarios] if worst else []
    return "\n".join([*blocks, *costs, _summary(reports)])


def _cost(report: Report) -> list[str]:
    """The worst case as a table."""
    found = report.worst
    if found is None:
        return [f"{report.file}: no worst case: its machine has errors"]
    many = "?" if found.episodes is None else f"{found.episodes:,}"
    rows = [("the most of", "one episode", f"{many} episodes", "bounded by")]
    for name, bound in found.episode.items():
        run = found.run.get(name)
        whole = "" if run is None else "?" if found.episodes is None and run.most is None else _number(run.most)
        rows.append((name, _number(bound.most), whole, bound.by))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    title = (
        report.file if found.exact else f"{report.file} (its limits alone: the machine is too large to walk through)"
    )
    return [title] + [
        f"  {row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}" for row in rows
    ]


def _number(value: float | None) -> str:
    return "unbounded" if value is None else f"{value:,.0f}" if value < 1e18 else "over 1e18"


def _summary(reports: Sequence[Report]) -> str:
    found = [item.severity for report in reports for item in report.diagnostics]
    counts = [f"{found.count(name)} {name}{'s' if found.count(name) != 1 else ''}" for name in ("error", "warning")]
    bad = sum(report.status != VALID for report in reports)
    played = sum(report.scenarios for report in reports)
    counted = [(len(reports) - played, "spec", "specs"), (played, "file of scenarios", "files of scenarios")]
    specs = " and ".join(f"{count} {one if count == 1 else many}" for count, one, many in counted if count)
    verdict = f"{specs}, {bad} invalid" if bad else f"{specs} valid"
    said = [count for count in counts if not count.startswith("0 ")]
    return f"{verdict}: {', '.join(said)}" if said else verdict


def _block(item: Diagnostic, sources: Mapping[str, str]) -> str:
    label = typer.style(f"{item.severity}[{item.rule}]", fg=_COLORS[item.severity], bold=True)
    where = f"{item.origin}: " if item.origin else ""
    lines = [f"{where}{label} {item.message}", *_excerpt(item, sources)]
    if item.fix:
        lines.append(f"        fix: {item.fix}")
    return "\n".join(lines)


def _excerpt(item: Diagnostic, sources: Mapping[str, str]) -> list[str]:
    """The source line, and a caret under what is meant."""
    origin = item.origin
    if origin is None:
        return []
    if origin.file == SET_FILE:
        line, column, number = origin.via.partition("\n")[0], origin.column + len("--set "), ""
    else:
        line, column, number = _line(origin.file, origin.line, sources), origin.column, str(origin.line)
    if len(line) > WIDEST:
        start = max(0, column - WIDEST // 2)
        line, column = line[start : start + WIDEST], column - start
    if not line.strip():
        return []
    before = line[: column - 1]
    pad = "".join("\t" if char == "\t" else " " * _width(char) for char in before)
    word = _WORD.match(line, column - 1)
    carets = "^" * (sum(map(_width, word[0])) if word else 1)
    return [f"{number:>6} | {line}", f"       | {pad}{carets}"]


def _width(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _line(file: str, line: int, sources: Mapping[str, str]) -> str:
    text = sources.get(file)
    lines = _lines_of_file(file) if text is None else _lines_of(text)
    return lines[line - 1] if 0 < line <= len(lines) else ""


@lru_cache(maxsize=4)
def _lines_of(text: str) -> list[str]:
    from engine.spec.tree import split_lines

    return split_lines(text)


def _lines_of_file(file: str) -> list[str]:
    try:
        status = Path(file).stat()
        return _read_lines(str(Path(file).absolute()), status.st_mtime_ns, status.st_size)
    except (OSError, ValueError):
        return []


@lru_cache(maxsize=4)
def _read_lines(file: str, changed: int, size: int) -> list[str]:
    with Path(file).open("rb") as stream:
        return _lines_of(stream.read(MOST_SHOWN).decode("utf-8-sig", errors="replace"))


# ---- json


def as_json(reports: Sequence[Report]) -> str:
    """`{"valid": …, "specs": [{"file", "valid", "readable", "diagnostics": [...], "worst_case": {…}}]}`."""
    specs = [
        {
            "file": report.file,
            "valid": report.status == VALID,
            "readable": not report.unreadable,
            "diagnostics": [_plain(item) for item in report.diagnostics],
            "worst_case": None if report.worst is None else _plain_cost(report.worst),
        }
        for report in reports
    ]
    return json.dumps({"valid": all(spec["valid"] for spec in specs), "specs": specs}, indent=2, ensure_ascii=False)


def _plain_cost(worst: WorstCase) -> dict[str, Any]:
    def plain(bounds: Mapping[str, Bound]) -> dict[str, Any]:
        return {name: {"most": bound.most, "by": bound.by} for name, bound in bounds.items()}

    return {
        "tasks": worst.tasks,
        "episodes": worst.episodes,
        "exact": worst.exact,
        "episode": plain(worst.episode),
        "run": plain(worst.run),
    }


def _plain(item: Diagnostic) -> dict[str, Any]:
    origin = item.origin
    return {
        "rule": item.rule,
        "severity": item.severity,
        "message": item.message,
        "fix": item.fix,
        "path": list(item.path),
        "file": origin.file if origin else None,
        "line": origin.line if origin else None,
        "column": origin.column if origin else None,
        "via": origin.via if origin else "",
    }


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
