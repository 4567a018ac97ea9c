"""Writes entries and results into journals, as the executor and the runner do."""

from __future__ import annotations

from engine.schemas.journal import JournalEntry
from engine.schemas.trajectory import Trajectory
from engine.store.codec import encode_record
from engine.store.journal import Journal


async def write_entries(journal: Journal, *entries: JournalEntry) -> None:
    """Append entries; each is durable before the next is appended."""
    for entry in entries:
        await journal.append(entry, encode_record(entry.record))


async def write_result(journal: Journal, trajectory: Trajectory) -> None:
    """Finish the episode."""
    await journal.finish(lambda: trajectory)
