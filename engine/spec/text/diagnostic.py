"""One finding about a spec: what is wrong, at which line and column, by which stable rule, and what to do about it.

Invariant: a diagnostic's rule id is stable; its words may change. It knows where a value was written even
when the value came through `extends`, `${ENV}` or `--set`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.terminal import around, brief

Severity = Literal["error", "warning", "info"]
PathKey = str | int
DataPath = tuple[PathKey, ...]
"""Where in a document: `("machine", "transitions", 0, "dest")`."""

SET_FILE = "--set"
"""`Origin.file` of what the command line gave."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where something was written."""

    file: str
    """As the user named it; `--set` for an override on the command line."""
    line: int
    """From 1."""
    column: int
    """From 1, in characters."""
    via: str = ""
    """What brought it here: `--set a.b=c`, `${ENV}`, `extends base.yaml`; empty when it was written in the spec itself.
    """

    def __str__(self) -> str:
        via = around(self.via, 0)
        if self.file == SET_FILE:
            return via
        place = f"{self.file}:{self.line}:{self.column}"
        return f"{place} ({via})" if via else place


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One thing that is wrong.

    `str()` is one line: `file:line:column: error[rule] message; fix`.
    """

    rule: str
    """Stable id, such as `spec.unknown-key`."""
    severity: Severity
    message: str
    fix: str | None
    """What to write instead, where that is known."""
    origin: Origin | None
    path: DataPath = ()
    """Which value of the resolved spec is meant."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", brief(self.message))
        object.__setattr__(self, "fix", None if self.fix is None else brief(self.fix))

    @property
    def place(self) -> tuple[str, int, int, bool]:
        """The key by which findings are sorted: their position, errors first."""
        origin = self.origin or Origin("", 0, 0)
        return origin.file, origin.line, origin.column, self.severity != "error"

    def __str__(self) -> str:
        where = f"{self.origin}: " if self.origin else ""
        fix = f"; {self.fix}" if self.fix else ""
        return f"{where}{self.severity}[{self.rule}] {self.message}{fix}"


def show_path(path: DataPath) -> str:
    """`("tools", 0, "use")` -> `tools[0].use`; the whole document is `the spec`."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text or "the spec"
