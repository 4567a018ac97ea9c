"""The formats of findings of `engine validate`: text and JSON.

Text in findings that comes from a spec or another file is escaped here: control characters, line feeds, and commands to
CI systems (`::error::` at the beginning of a line, `##[error]` anywhere).
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from engine.terminal import one_line, visible_json

if TYPE_CHECKING:
    from engine import Diagnostic
    from engine.validate.report import Excerpt, Report

_WORD = re.compile(r""""(?:[^"\\]|\\.)*"|'[^']*'|\{\{.*?\}\}|[\w./:*-]*[\w./*-]""")
_COLORS = {"error": typer.colors.RED, "warning": typer.colors.YELLOW, "info": typer.colors.BLUE}
_KINDS = {
    "spec": ("spec", "specs"),
    "scenarios": ("file of scenarios", "files of scenarios"),
    "replies": ("file of replies", "files of replies"),
}
"""What a file may hold, each with the words for one and for several."""

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
    bad = sum(report.status != 0 for report in reports)
    kinds: list[str] = [report.kind for report in reports]
    counted = [(kinds.count(kind), *words) for kind, words in _KINDS.items()]
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
    lines = [f"{where}{label} {one_line(item.message)}"]
    if excerpt is not None:  # the source line, with a caret under the position
        line, column = excerpt.text, excerpt.column
        before = one_line(line[: column - 1])
        pad = "".join("\t" if char == "\t" else " " * _width(char) for char in before)
        word = _WORD.match(line, column - 1)
        carets = "^" * (sum(map(_width, one_line(word[0]))) if word else 1)
        lines += [f"{excerpt.number:>6} | {one_line(line)}", f"       | {pad}{carets}"]
    if item.fix:
        lines.append(f"        fix: {one_line(item.fix)}")
    return "\n".join(lines)


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
    specs = [report.plain() for report in reports]
    return json_text({"valid": all(spec["valid"] for spec in specs), "specs": specs})
