"""Audits rows: reads files of a framework, examines each row, and applies the rules.

rows = read_rows("verl", [Path("batch.pkl")])
report, examined = audit(rows, "verl", load_format(ModelSpec(path=model, allow_special=True), Path()))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.errors import AuditError
from engine.plugins.audit.examine import Evidence, ExaminedRow, SamplerRecord, TemplateMarks
from engine.plugins.audit.files import find_files, open_document
from engine.plugins.audit.findings import AuditReport
from engine.plugins.audit.frameworks import FRAMEWORKS
from engine.plugins.audit.rows import MAX_ROWS, Columns, ForeignRow, Vector, ids_of
from engine.plugins.audit.rules import RULES
from engine.tokens.template import ChatTemplate


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
        columns = Columns.of(line, f"{path.name} line {at}")
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
    for row in rows:
        if row.has_ids and len(row.ids) and int(row.ids.max()) >= template.vocab_size:
            raise AuditError(
                f"{row.place} holds the id {int(row.ids.max())}, and the model's vocabulary is [0, "
                f"{template.vocab_size}): give the model that sampled these rows"
            )
    marks = TemplateMarks(template)
    examined = [ExaminedRow(index, row, marks) for index, row in enumerate(rows)]
    known = Evidence(None if sampled is None else SamplerRecord(sampled, marks), tuple(stops))
    report = AuditReport(framework=framework, rows=len(rows))
    for rule in RULES:
        reasons = [(row, rule.lacks(row)) for row in examined]
        judged = [row for row, reason in reasons if reason is None]
        report.judged[rule.name] = len(judged)
        report.not_judged[rule.name] = Counter(reason for _, reason in reasons if reason is not None)
        report.findings += rule.check(judged, known)
    order = {rule.name: at for at, rule in enumerate(RULES)}
    report.findings.sort(key=lambda finding: (finding.row, order[finding.rule], finding.token or 0))
    for each in examined:
        _count(report, each)
    return report, examined


def _count(report: AuditReport, row: ExaminedRow) -> None:
    """Add a row's tokens and replies to the report."""
    if not row.foreign.has_ids:
        return
    report.tokens += len(row.ids)
    report.trained += int(np.count_nonzero(row.foreign.mask))
    template = row.marks.template
    for reply in row.replies:
        ids = row.response[reply.start : reply.end - reply.stopped]
        report.replies += 1
        report.unusual += template.encode(template.decode(ids)) != ids.tolist()
