"""The coordinator of a run's drivers, in the process of the test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.plugins.drivers.leases import Lease, LeaseAnswer, Leases
from engine.plugins.drivers.session import Report


class Here:
    """The coordinator, without a process of its own."""

    def __init__(self, leases: Leases, stop_at: int | None = None, whole: str | None = None) -> None:
        self.leases = leases
        self.stop_at = stop_at
        self.whole = whole
        self.reports: dict[int, Report] = {}

    async def __call__(self, method: str, *arguments: Any) -> Any:
        return await getattr(self, method)(*arguments)

    async def join(self, slot: int, machine: str, existing: list[str]) -> tuple[str, list[Lease]]:
        return self.leases.join(slot, machine, existing)

    async def call(
        self, slot: int, number: int, wanted: int, done: Sequence[int], faulty: Sequence[int], report: Report
    ) -> tuple[LeaseAnswer, bool, str | None]:
        self.reports[slot] = report
        answer = self.leases.call(slot, number, wanted, done, faulty)
        return answer, self.stop_at is not None and self.leases.counts.done >= self.stop_at, self.whole
