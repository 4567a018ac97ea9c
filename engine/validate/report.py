"""The findings in one spec, and their formats: text, JSON, and a form for the pipe between processes.

Text in findings that comes from a spec or another file is escaped here: control characters, line feeds, and commands to
CI systems (`::error::` at the beginning of a line, `##[error]` anywhere).
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from engine.spec.access import Access
from engine.spec.text.diagnostic import SET_FILE, Diagnostic, Origin
from engine.terminal import visible, visible_json

if TYPE_CHECKING:
    from engine.validate.worst_case import Bound, WorstCase

VALID, INVALID, UNREADABLE = 0, 1, 2
WIDEST = 400
"""Characters of a line that are shown."""
MAX_SHOWN = 64 * 2**20
"""Maximum size of a file from which a line is shown, in bytes."""
_WORD = re.compile(r""""(?:[^"\\]|\\.)*"|'[^']*'|\{\{.*?\}\}|[\w./:*-]*[\w./*-]""")
_COLORS = {"error": typer.colors.RED, "warning": typer.colors.YELLOW, "info": typer.colors.BLUE}
_COMMAND = re.compile(r"##(?=[\w.-]*\[)")
"""The beginnings of commands to CI systems, anywhere in a line."""


@dataclass(frozen=True)
class Excerpt:
    """The source line of a finding."""

    text: str
    """At most `WIDEST` characters of it."""
    column: int
    """The column of the finding, from 1."""
    number: str
    """The line number; empty for an override."""


KINDS = {
    "spec": ("spec", "specs"),
    "scenarios": ("file of scenarios", "files of scenarios"),
    "replies": ("file of replies", "files of replies"),
}
"""What a file may hold, each with the words for one and for several."""


@dataclass(frozen=True)
class Report:
    """The findings in one spec."""

    file: str
    diagnostics: list[Diagnostic]
    unreadable: bool = False
    excerpts: list[Excerpt | None] = field(default_factory=list)
    """The source line of each finding, if it can be read."""
    worst: WorstCase | None = None
    """The worst case; None if the machine has errors, or if it was not requested."""
    kind: str = "spec"
    """What the file holds, a key of `KINDS`."""
    skipped: list[str] = field(default_factory=list)
    """Rules that skipped something because code is not imported."""

    @property
    def status(self) -> int:
        """The exit status: 0 valid, 1 invalid, 2 could not be read."""
        if self.unreadable:
            return UNREADABLE
        return INVALID if any(item.severity == "error" for item in self.diagnostics) else VALID


# ---- excerpts


def excerpts_of(diagnostics: Sequence[Diagnostic], sources: Mapping[str, str], access: Access) -> list[Excerpt | None]:
    """The source line of each finding.

    Args:
        diagnostics: The findings.
        sources: Text of the files that were read, by `Origin.file`.
        access: The other files that may be opened.
    """
    lines: dict[str, list[str]] = {}
    excerpts: list[Excerpt | None] = []
    for item in diagnostics:
        origin = item.origin
        if origin is None:
            excerpts.append(None)
        elif origin.file == SET_FILE:
            line = origin.via.partition("\n")[0]
            excerpts.append(_excerpt_at(line, origin.column + len("--set "), ""))
        else:
            if origin.file not in lines:
                lines[origin.file] = _lines_of(origin.file, sources, access)
            of_file = lines[origin.file]
            line = of_file[origin.line - 1] if 0 < origin.line <= len(of_file) else ""
            excerpts.append(_excerpt_at(line, origin.column, str(origin.line)))
    return excerpts


def _excerpt_at(line: str, column: int, number: str) -> Excerpt | None:
    if len(line) > WIDEST:
        start = max(0, column - WIDEST // 2)
        line, column = line[start : start + WIDEST], column - start
    return Excerpt(line, column, number) if line.strip() else None


def _lines_of(file: str, sources: Mapping[str, str], access: Access) -> list[str]:
    from engine.spec.text.tree import split_lines

    text = sources.get(file)
    if text is None:
        try:
            with access.open(Path(file)) as stream:
                text = stream.read(MAX_SHOWN).decode("utf-8-sig", errors="replace")
        except (OSError, ValueError):
            return []
    return split_lines(text)


# ---- text


def as_text(reports: Sequence[Report], *, notes: bool = True, worst: bool = False) -> str:
    """Return the findings with their source lines, the worst cases, and a summary line."""
    blocks = [
        _block(item, report.excerpts[index] if index < len(report.excerpts) else None)
        for report in reports
        for index, item in enumerate(report.diagnostics)
        if notes or item.severity != "info"
    ]
    costs = [line for report in reports for line in _cost(report) if report.kind == "spec"] if worst else []
    return "\n".join([*blocks, *costs, _summary(reports)])


def one_line(text: str) -> str:
    """Escape a text so that it stays on one line and is not a command to a terminal or CI system."""
    return no_command(visible(text, newlines=False))


def no_command(text: str) -> str:
    """Escape `##[error]` and similar commands in a text."""
    return _COMMAND.sub(r"#\\x23", text)


def first_in_line(text: str) -> str:
    """Escape the same, and commands at the beginning of a line."""
    shown = one_line(text)
    return f"\\x3a{shown.lstrip()[1:]}" if shown.lstrip().startswith("::") else shown


def _cost(report: Report) -> list[str]:
    """The worst case as a table."""
    worst = report.worst
    file = first_in_line(report.file)
    if worst is None:
        return [f"{file}: no worst case: its machine has errors"]
    many = "?" if worst.episodes is None else f"{worst.episodes:,}"
    rows = [("the most of", "one episode", f"{many} episodes", "bounded by")]
    for name, bound in worst.episode.items():
        run = worst.run.get(name)
        of_run = "" if run is None else "?" if worst.episodes is None and run.most is None else _number(run.most)
        rows.append((name, _number(bound.most), of_run, bound.by))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    title = file if worst.exact else f"{file} (from its limits only: the machine is too large to check all its paths)"
    return [title] + [
        f"  {row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {one_line(row[3])}" for row in rows
    ]


def _number(value: float | None) -> str:
    return "unbounded" if value is None else f"{value:,.0f}" if value < 1e18 else "over 1e18"


def _summary(reports: Sequence[Report]) -> str:
    severities = [item.severity for report in reports for item in report.diagnostics]
    counts = [f"{(count := severities.count(name))} {name}{'s' * (count != 1)}" for name in ("error", "warning")]
    bad = sum(report.status != VALID for report in reports)
    kinds = [report.kind for report in reports]
    counted = [(kinds.count(kind), *words) for kind, words in KINDS.items()]
    specs = " and ".join(f"{count} {one if count == 1 else many}" for count, one, many in counted if count)
    verdict = f"{specs}, {bad} invalid" if bad else f"{specs} valid"
    said = [count for count in counts if not count.startswith("0 ")]
    skipped = skipped_words(sum(len(report.skipped) for report in reports))
    return (f"{verdict}: {', '.join(said)}" if said else verdict) + (f"; {skipped}" if skipped else "")


def skipped_words(count: int) -> str:
    """The summary's words about skipped rules; empty if none were skipped."""
    return f"`--import` would add {count} {'check' if count == 1 else 'checks'}" if count else ""


def _block(item: Diagnostic, excerpt: Excerpt | None) -> str:
    label = typer.style(f"{item.severity}[{one_line(item.rule)}]", fg=_COLORS[item.severity], bold=True)
    where = f"{first_in_line(str(item.origin))}: " if item.origin else ""
    lines = [f"{where}{label} {one_line(item.message)}", *_excerpt(excerpt)]
    if item.fix:
        lines.append(f"        fix: {one_line(item.fix)}")
    return "\n".join(lines)


def _excerpt(excerpt: Excerpt | None) -> list[str]:
    """The source line, with a caret under the position."""
    if excerpt is None:
        return []
    line, column = excerpt.text, excerpt.column
    before = one_line(line[: column - 1])
    pad = "".join("\t" if char == "\t" else " " * _width(char) for char in before)
    word = _WORD.match(line, column - 1)
    carets = "^" * (sum(map(_width, one_line(word[0]))) if word else 1)
    return [f"{excerpt.number:>6} | {one_line(line)}", f"       | {pad}{carets}"]


def _width(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


# ---- json


def json_text(data: Any) -> str:
    """Return JSON in which no line is a command to a CI system."""
    return visible_json(json.dumps(data, indent=2, ensure_ascii=False)).replace("##", "#\\u0023")


def as_json(reports: Sequence[Report]) -> str:
    """`{"valid": …, "specs": [{"file", "valid", "readable", "diagnostics": […], "skipped": […],
    "worst_case": {…}}]}`."""
    specs = [
        {
            "file": report.file,
            "valid": report.status == VALID,
            "readable": not report.unreadable,
            "diagnostics": [_plain(item) for item in report.diagnostics],
            "skipped": list(report.skipped),
            "worst_case": None if report.worst is None else _plain_cost(report.worst),
        }
        for report in reports
    ]
    return json_text({"valid": all(spec["valid"] for spec in specs), "specs": specs})


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


# ---- between processes


def pack(report: Report) -> bytes:
    """A report as JSON, for `unpack`."""
    worst = report.worst
    data = {
        "diagnostics": [_plain(item) for item in report.diagnostics],
        "unreadable": report.unreadable,
        "excerpts": [item and [item.text, item.column, item.number] for item in report.excerpts],
        "worst": None if worst is None else _plain_cost(worst),
        "kind": report.kind,
        "skipped": list(report.skipped),
    }
    return json.dumps(data).encode()


def unpack(file: str, data: bytes) -> Report:
    """A report that another process packed.

    Args:
        file: The spec.
        data: The result of `pack`. It may come from a process that runs untrusted code, so nothing in it is executed.

    Raises:
        ValueError: the data is not a report.
    """
    try:
        plain = json.loads(data)
        worst = plain["worst"]
        return Report(
            file,
            [_diagnostic(item) for item in plain["diagnostics"]],
            bool(plain["unreadable"]),
            [None if item is None else Excerpt(str(item[0]), int(item[1]), str(item[2])) for item in plain["excerpts"]],
            None if worst is None else _cost_of(worst),
            plain["kind"] if plain["kind"] in KINDS else "spec",
            [str(item) for item in plain["skipped"]],
        )
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"no report: {error}") from error


def _diagnostic(plain: Mapping[str, Any]) -> Diagnostic:
    severity = plain["severity"]
    if severity not in _COLORS:
        raise ValueError("no severity")
    origin = None
    if plain["file"] is not None:
        origin = Origin(str(plain["file"]), int(plain["line"]), int(plain["column"]), str(plain["via"]))
    fix = None if plain["fix"] is None else str(plain["fix"])
    path = tuple(key if isinstance(key, int) else str(key) for key in plain["path"])
    return Diagnostic(str(plain["rule"]), severity, str(plain["message"]), fix, origin, path)


def _cost_of(plain: Mapping[str, Any]) -> WorstCase:
    from engine.validate.worst_case import Bound, WorstCase

    def bounds(given: Mapping[str, Any]) -> dict[str, Bound]:
        return {str(name): Bound(_most(item["most"]), str(item["by"])) for name, item in given.items()}

    def _most(value: Any) -> float | None:
        if value is not None and not isinstance(value, int | float):
            raise ValueError("no number")
        return value

    tasks, episodes = (None if plain[key] is None else int(plain[key]) for key in ("tasks", "episodes"))
    return WorstCase(bounds(plain["episode"]), bounds(plain["run"]), tasks, episodes, bool(plain["exact"]))
