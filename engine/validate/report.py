"""The findings in one spec with their source lines, as JSON values, and as bytes for the pipe between processes.

Invariant: bytes of a process that ran untrusted code become a report or a ValueError, and nothing in them is executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from engine.spec.access import Access
from engine.spec.text.diagnostic import SET_FILE, Diagnostic, Origin, Severity

if TYPE_CHECKING:
    from engine.validate.worst_case import Bound, WorstCase

VALID, INVALID, UNREADABLE = 0, 1, 2
WIDEST = 400
"""Characters of a line that are shown."""
MAX_SHOWN = 64 * 2**20
"""Maximum size of a file from which a line is shown, in bytes."""


@dataclass(frozen=True)
class Excerpt:
    """The source line of a finding."""

    text: str
    """At most `WIDEST` characters of it."""
    column: int
    """The column of the finding, from 1."""
    number: str
    """The line number; empty for an override."""


KINDS = ("spec", "scenarios", "replies")
"""What a file may hold."""


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
    """What the file holds, one of `KINDS`."""
    skipped: list[str] = field(default_factory=list)
    """Rules that skipped something because code is not imported."""

    @property
    def status(self) -> int:
        """The exit status: 0 valid, 1 invalid, 2 could not be read."""
        if self.unreadable:
            return UNREADABLE
        return INVALID if any(item.severity == "error" for item in self.diagnostics) else VALID

    def plain(self) -> dict[str, Any]:
        """The report as JSON values, without source lines: `{"file", "valid", "readable", "diagnostics": […],
        "skipped": […], "worst_case": {…}}`."""
        return {
            "file": self.file,
            "valid": self.status == VALID,
            "readable": not self.unreadable,
            "diagnostics": [_plain(item) for item in self.diagnostics],
            "skipped": list(self.skipped),
            "worst_case": None if self.worst is None else _plain_cost(self.worst),
        }


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


# ---- between processes


def pack(report: Report) -> bytes:
    """A report as JSON, for `unpack`."""
    excerpts = [item and [item.text, item.column, item.number] for item in report.excerpts]
    return json.dumps(report.plain() | {"excerpts": excerpts, "kind": report.kind}).encode()


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
        worst = plain["worst_case"]
        return Report(
            file,
            [_diagnostic(item) for item in plain["diagnostics"]],
            not plain["readable"],
            [None if item is None else Excerpt(str(item[0]), int(item[1]), str(item[2])) for item in plain["excerpts"]],
            None if worst is None else _cost_of(worst),
            plain["kind"] if plain["kind"] in KINDS else "spec",
            [str(item) for item in plain["skipped"]],
        )
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"no report: {error}") from error


def _diagnostic(plain: Mapping[str, Any]) -> Diagnostic:
    severity = plain["severity"]
    if severity not in get_args(Severity):
        raise ValueError("no severity")
    origin = None
    if plain["file"] is not None:
        origin = Origin(str(plain["file"]), int(plain["line"]), int(plain["column"]), str(plain["via"]))
    return Diagnostic(
        str(plain["rule"]),
        severity,
        str(plain["message"]),
        None if plain["fix"] is None else str(plain["fix"]),
        origin,
        tuple(key if isinstance(key, int) else str(key) for key in plain["path"]),
    )


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


# ---- as JSON values


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
