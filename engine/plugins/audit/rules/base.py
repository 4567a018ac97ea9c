"""What all rules share: the evidence besides the rows, and findings of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.plugins.audit.examine import Examined, Sampled
from engine.plugins.audit.findings import Finding, Severity


@dataclass(frozen=True, slots=True)
class Evidence:
    """What rules know besides the rows."""

    sampled: Sampled | None = None
    """The sampler's own record."""
    stops: tuple[str, ...] = ()
    """Texts that ended replies."""


def finding_of(
    rule: str, severity: Severity, row: Examined, message: str, token: int | None = None, *, response: bool = True
) -> Finding:
    """A finding of one row. `token` is counted in the response unless `response` is False."""
    at = None if token is None else token + (row.start if response else 0)
    if at is not None and at >= len(row.ids):  # something is missing at the row's end
        at = len(row.ids) - 1 if len(row.ids) else None
    return Finding(rule=rule, severity=severity, row=row.index, place=row.row.place, token=at, message=message)


def quoted(row: Examined, start: int, end: int) -> str:
    text = row.text(start, end)
    return repr(text if len(text) <= 60 else f"{text[:40]}…{text[-19:]}")


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """The first place at which two lists differ; the length of the shorter one where none does."""
    size = min(len(one), len(other))
    found = np.flatnonzero(np.asarray(one[:size]) != np.asarray(other[:size]))
    return int(found[0]) if len(found) else size
