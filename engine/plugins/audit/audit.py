"""Audits rows: reads files of a framework, examines each row, and applies the rules.

rows = read_rows("verl", [Path("batch.pkl")])
report, examined = audit(rows, "verl", load_format(ModelSpec(path=model, allow_special=True), Path()))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import AuditError
from engine.plugins.audit.examine import ExaminedRow, RowFinding, SamplerRecord, TemplateMarks
from engine.plugins.audit.files import find_files, open_document
from engine.plugins.audit.frameworks import FRAMEWORKS
from engine.plugins.audit.rows import MAX_ROWS, Columns, ForeignRow, Vector, ids_of
from engine.plugins.audit.rules import RULES, lacks
from engine.tokens.template import ChatTemplate


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


def read_rows(framework: str, paths: Sequence[Path]) -> list[ForeignRow]:
    """Read files of a framework.

    Raises:
        AuditError: A file cannot be read, is not of the framework's form, or holds no rows.
    """
    title, read = FRAMEWORKS[framework]
    rows: list[ForeignRow] = []
    for path in find_files(paths):
        document = open_document(path)
        try:
            rows_of_file = read(document)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
            raise AuditError(f"{path} is not of the form of {title}: {error}") from error
        if not rows_of_file:
            raise AuditError(f"{path} holds no rows")
        rows += rows_of_file
        if len(rows) > MAX_ROWS:
            raise AuditError(f"there are more than {MAX_ROWS:,} rows; audit fewer files at once")
    return rows


def read_sampled(path: Path) -> list[Vector]:
    """Read a sampler's record: JSON lines with `output_ids`, one for each reply. Returns ids, int32 [tokens], of each.

    Raises:
        AuditError: It cannot be read or is not of this form.
    """
    document = open_document(path)
    lines = document.value if document.lines else [document.value]
    replies = []
    for at, line in enumerate(lines, 1):
        columns = Columns(line, f"{path.name} line {at}")
        columns.need("output_ids")
        replies.append(ids_of(columns.get("output_ids"), f"{columns.place}: output_ids"))
    return replies


def audit(
    rows: Sequence[ForeignRow],
    framework: str,
    template: ChatTemplate,
    *,
    sampled: Sequence[Vector] | None = None,
    stops: Sequence[str] = (),
) -> tuple[AuditReport, list[ExaminedRow]]:
    """Apply all rules.

    Args:
        rows: The rows.
        framework: Where they are from.
        template: The chat template of the model that sampled them, with `allow_special`.
        sampled: The sampler's own record of replies: ids, int32 [tokens], of each.
        stops: Strings that ended replies without a stop token.

    Returns:
        The report, with findings in the order of the rows; and the examined rows.

    Raises:
        AuditError: An id is not in the model's vocabulary.
    """
    for foreign in rows:
        if foreign.has_ids and len(foreign.ids) and int(foreign.ids.max()) >= template.vocab_size:
            raise AuditError(
                f"{foreign.place} holds the id {int(foreign.ids.max())}, and the model's vocabulary is [0, "
                f"{template.vocab_size}): give the model that sampled these rows"
            )
    marks = TemplateMarks(template, stops)
    examined = [ExaminedRow(index, row, marks) for index, row in enumerate(rows)]
    record = None if sampled is None else SamplerRecord(sampled, marks)
    report = AuditReport(framework=framework, rows=len(rows))
    for name, (check, needs) in RULES.items():
        reasons = [(row, lacks(row, needs)) for row in examined]
        judged = [row for row, reason in reasons if reason is None]
        report.judged[name] = len(judged)
        report.not_judged[name] = Counter(reason for _, reason in reasons if reason is not None)
        report.findings += check(judged, record)
    order = list(RULES)
    report.findings.sort(key=lambda finding: (finding.row, order.index(finding.rule), finding.token or 0))
    for row in examined:
        if not row.foreign.has_ids:
            continue
        report.tokens += len(row.ids)
        report.trained += int(np.count_nonzero(row.foreign.mask))
        for reply in row.replies:
            ids = row.response[reply.start : reply.end - reply.stopped]
            report.replies += 1
            report.unusual += template.encode(template.decode(ids)) != ids.tolist()
    return report, examined
