"""What an audit finds: findings, and what could not be judged."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.schemas.base import Struct

Severity = Literal["error", "warning", "info"]
"""`error`: the loss is not the one that the rewards and samples mean. `warning`: it may be intended. `info`: something
that the rows do not tell."""


class RowFinding(Struct, frozen=True, kw_only=True):
    """One thing that is wrong with a row."""

    rule: str
    severity: Severity
    row: int
    """The row, from 0, over all files; -1 for all rows."""
    place: str
    """The row, as its file counts."""
    token: int | None = None
    """The first token, from 0, counted from the row's first prompt token; None for the row as a whole."""
    message: str

    def __str__(self) -> str:
        token = "" if self.token is None else f" token {self.token}"
        return f"{self.place}{token}: {self.severity}[{self.rule}] {self.message}"


@dataclass(slots=True)
class AuditReport:
    """The result of an audit."""

    framework: str
    rows: int = 0
    tokens: int = 0
    trained: int = 0
    """Tokens with loss mask 1."""
    findings: list[RowFinding] = field(default_factory=list)
    judged: Counter[str] = field(default_factory=Counter)
    """Number of rows that each rule judged."""
    not_judged: dict[str, Counter[str]] = field(default_factory=dict)
    """For each rule: number of rows that it did not judge, by the reason."""
    replies: int = 0
    """Sampled replies whose ids are known."""
    unusual: int = 0
    """Of them, those whose ids are not what the tokenizer makes of their text."""

    @property
    def failed(self) -> bool:
        """Whether there is an error."""
        return any(finding.severity == "error" for finding in self.findings)

    def counts(self) -> dict[str, dict[str, int]]:
        """Number of rows with a finding, by rule and severity."""
        rows: dict[tuple[str, str], set[int]] = {}
        for finding in self.findings:
            rows.setdefault((finding.rule, finding.severity), set()).add(finding.row)
        found: dict[str, dict[str, int]] = {}
        for (rule, severity), where in rows.items():
            found.setdefault(rule, {})[severity] = self.rows if -1 in where else len(where)
        return found

    def plain(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "framework": self.framework,
            "rows": self.rows,
            "tokens": self.tokens,
            "trained_tokens": self.trained,
            "replies": self.replies,
            "replies_with_unusual_ids": self.unusual,
            "counts": self.counts(),
            "judged": dict(self.judged),
            "not_judged": {rule: dict(reasons) for rule, reasons in self.not_judged.items()},
            "findings": [finding.plain() for finding in self.findings],
        }
