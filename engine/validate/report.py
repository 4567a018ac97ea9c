"""The findings in one spec with their source lines, as JSON values, and as bytes for the pipe between processes.

Invariant: bytes of a process that ran untrusted code become a report or a ValueError, and nothing in them is executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from engine.spec.access import Access
from engine.spec.text.diagnostic import SET_FILE, Diagnostic
from engine.spec.text.tree import split_lines
from engine.validate.worst_case import WorstCase

VALID, INVALID, UNREADABLE = 0, 1, 2
WIDEST = 400
"""Characters of a line that are shown."""
MAX_SHOWN = 64 * 2**20
"""Maximum size of a file from which a line is shown, in bytes."""
_NOWHERE = {"file": None, "line": None, "column": None, "via": ""}
"""The place, as JSON values, of a finding without one."""


@dataclass(frozen=True)
class Excerpt:
    """The source line of a finding."""

    text: str
    """At most `WIDEST` characters of it."""
    column: int
    """The column of the finding, from 1."""
    number: str
    """The line number; empty for an override."""


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
    kind: Literal["spec", "scenarios", "replies"] = "spec"
    """What the file holds."""
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
        worst = self.worst
        parts = {} if worst is None else {"episode": worst.episode, "run": worst.run}
        return {
            "file": self.file,
            "valid": self.status == VALID,
            "readable": not self.unreadable,
            "diagnostics": [
                {
                    "rule": item.rule,
                    "severity": item.severity,
                    "message": item.message,
                    "fix": item.fix,
                    "path": list(item.path),
                    **(_NOWHERE if item.origin is None else asdict(item.origin)),
                }
                for item in self.diagnostics
            ],
            "skipped": list(self.skipped),
            "worst_case": worst
            and asdict(worst)
            | {part: {name: bound._asdict() for name, bound in bounds.items()} for part, bounds in parts.items()},
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
            continue
        line, column, number = origin.via.partition("\n")[0], origin.column + len("--set "), ""
        if origin.file != SET_FILE:
            if origin.file not in lines:
                text = sources.get(origin.file, "")
                with suppress(OSError, ValueError):
                    if origin.file not in sources:
                        with access.open(Path(origin.file)) as stream:
                            text = stream.read(MAX_SHOWN).decode("utf-8-sig", errors="replace")
                lines[origin.file] = split_lines(text)
            of_file = lines[origin.file]
            line = of_file[origin.line - 1] if 0 < origin.line <= len(of_file) else ""
            column, number = origin.column, str(origin.line)
        if len(line) > WIDEST:
            start = max(0, column - WIDEST // 2)
            line, column = line[start : start + WIDEST], column - start
        excerpts.append(Excerpt(line, column, number) if line.strip() else None)
    return excerpts


# ---- between processes


def pack(report: Report) -> bytes:
    """A report as JSON, for `unpack`."""
    return json.dumps(msgspec.to_builtins(report)).encode()


def unpack(file: str, data: bytes) -> Report:
    """A report that another process packed.

    Args:
        file: The spec.
        data: The result of `pack`. It may come from a process that runs untrusted code, so nothing in it is executed.

    Raises:
        ValueError: the data is not a report.
    """
    try:
        return replace(msgspec.convert(json.loads(data), Report), file=file)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(f"no report: {error}") from error
