"""The journal of one episode: what was recorded, entry by entry, and at the end the episode's result.

Invariant: no gap; an entry is durable after all before it; the last one is written with the episode's result.

    journal = await store.begin(task, sample)
    write = journal.append(entry, encode_record(record))  # has its place; `write.durable`, or await it
    journal.hold(last_entry, encode_record(last_record))  # the action that ended the episode is not performed again
    trajectory = await journal.finish(make_trajectory)    # in one commit
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from engine.errors import StoreError
from engine.store import episode_rows
from engine.store.codec import entry_row, read_entry
from engine.store.reading import decoding, journal_rows
from engine.store.results import EncodedTrajectory, encode_trajectory
from engine.store.writer import OVERHEAD, Write

if TYPE_CHECKING:
    from engine.schemas.journal import JournalEntry
    from engine.schemas.trajectory import Trajectory
    from engine.store.codec import EncodedRecord
    from engine.store.writer import Writer

T = TypeVar("T")

Judge = Callable[["Trajectory", EncodedTrajectory], Awaitable["Trajectory"]]
"""Says what a result is worth before it is stored: the same trajectory, or one with a failure."""

PATIENCE = 5.0
"""Seconds for which a cancelled episode waits for its judge."""


class Journal:
    """The journal of an episode's current attempt. Made by `RunStore.begin`, used by one executor.

    Args:
        writer: The store's writer.
        running: The ids of the store's episodes that run; this one leaves when its result is written.
        episode_id: The episode.
        number: Its number in the store.
        attempt: The number of the attempt.
        rows: What the attempt holds already, as `journal_rows` reads it.

    Raises:
        StoreError: a row does not hold an entry.
    """

    __slots__ = (
        "_closing",
        "_held",
        "_lane",
        "_length",
        "_number",
        "_running",
        "_writer",
        "attempt",
        "entries",
        "episode_id",
        "failure",
        "trajectory",
    )

    def __init__(
        self, writer: Writer, running: set[str], episode_id: str, number: int, attempt: int, rows: list[Any]
    ) -> None:
        self.episode_id = episode_id
        self.attempt = attempt
        self.entries: list[JournalEntry] = []
        """What the attempt held when it was opened."""
        self.failure: StoreError | None = None
        """The first failed write, set by the writer: nothing is written after it."""
        self.trajectory: Trajectory | None = None
        """The result; None until it is written."""
        self._writer = writer
        self._lane = writer.lane()
        self._running = running
        self._number = number
        self._held: tuple[JournalEntry, EncodedRecord] | None = None
        self._closing = False
        """Whether the attempt is being finished or given up."""
        self._length = 0
        self._open(rows)

    def _open(self, rows: list[Any]) -> None:
        self.entries = []
        if rows:
            with decoding(Path(self._writer.name), self.episode_id):
                self.entries = [read_entry(row) for row in rows]
        self._length = len(rows)

    def append(self, entry: JournalEntry, encoded: EncodedRecord) -> Write:
        """Write the next entry without waiting. Those after it are lost with it if it cannot be written.

        Raises:
            StoreError: it is not the next entry, or the journal takes no more.
        """
        if self.failure is not None or self._closing or self._writer.closed is not None or entry.seq != self._length:
            raise self._refusal(entry.seq)
        row = (self._number, self.attempt, *entry_row(entry, encoded))
        self._length += 1
        return self._lane.put(Write(journal=self, row=row, weight=encoded.size + OVERHEAD))

    def hold(self, entry: JournalEntry, encoded: EncodedRecord) -> None:
        """Keep the entry that ends the episode: `finish` writes it with the result.

        Raises:
            StoreError: as `append`.
        """
        if self.failure is not None or self._closing or entry.seq != self._length:
            raise self._refusal(entry.seq)
        self._held = entry, encoded

    async def finish(self, make: Callable[[], Trajectory], judge: Judge | None = None) -> Trajectory:
        """Write the held entry and the result in one commit; the cancellation of the caller is raised after it.

        The held entry is written alone if no result can be made, or if the caller is cancelled and the judge does not
        answer soon. So a resume finishes the episode, and never performs its last action again.

        Args:
            make: Makes the result. At most `writer.FINISHING` results of an event loop wait in memory to be written.
            judge: Sees the result before it is stored.

        Raises:
            StoreError: an entry is missing or could not be written, or the write failed.
            SpecCodeError: the result holds a value that JSON cannot represent.
        """
        self._must_be_open()
        waits = _Uninterrupted()
        await waits.repeat(self._lane.places.acquire)
        try:
            try:
                trajectory = make()
                encoded = encode_trajectory(trajectory)
                if judge is not None:
                    judged = await waits.answer(judge(trajectory, encoded))
                    if judged is not trajectory:
                        trajectory, encoded = judged, encode_trajectory(judged)
            except Exception:
                if self._held is not None:
                    write = self.append(*self._held)
                    self._held = None
                    await waits.repeat(lambda: write)
                raise
            write = self._write_result(trajectory, encoded)
            await waits.repeat(lambda: write)
            self.trajectory = trajectory
            self._running.discard(self.episode_id)
        except StoreError:  # stops the run, which is more than the end of one episode
            raise
        except Exception:
            waits.raise_cancellation()
            raise
        finally:
            self._lane.places.release()
            self._closing = self.trajectory is not None
        waits.raise_cancellation()
        return trajectory

    def _write_result(self, trajectory: Trajectory, encoded: EncodedTrajectory) -> Write:
        rows, size = [], encoded.size
        if self._held is not None:
            entry, record = self._held
            rows.append((self._number, self.attempt, *entry_row(entry, record)))
            size += record.size
        job = partial(
            episode_rows.finish,
            number=self._number,
            attempt=self.attempt,
            before=self._length,
            last=rows,
            trajectory=trajectory,
            encoded=encoded,
        )
        self._closing = True
        return self._writer.do(job, self, size, at_once=True)

    async def restart(self, keep: int = 0) -> None:
        """Give the attempt up and begin the next one; the old entries are kept. The cancellation of the caller is
        raised after it.

        Args:
            keep: Number of entries of the first attempt with which the new one begins: those that a fork shares.

        Raises:
            StoreError: the write failed.
        """
        self._must_be_open()
        waits = _Uninterrupted()
        job = partial(episode_rows.restart, number=self._number, attempt=self.attempt, keep=keep)
        write = self._writer.do(job, self)
        self._closing = True
        try:
            rows = await waits.repeat(lambda: write)
        finally:
            self._closing = False
        self.attempt += 1
        self._held = None
        self._open(rows)
        waits.raise_cancellation()

    async def reread(self) -> None:
        """Read the entries again: of an episode that is resumed in the launch that wrote them."""
        self._open(await self._writer.do(partial(journal_rows, number=self._number, attempt=self.attempt)))

    def _must_be_open(self) -> None:
        if self.failure is not None or self._closing:
            raise self._refusal()

    def _refusal(self, seq: int | None = None) -> StoreError:
        if self.failure is not None:
            return StoreError(f"{self.episode_id} takes no more entries: {self.failure}")
        if self.trajectory is not None:
            return StoreError(f"{self.episode_id} is done")
        if self._closing:
            return StoreError(f"{self.episode_id} is being finished or begun again")
        if self._writer.closed is not None:
            return self._writer.closed
        return StoreError(f"{self.episode_id}: entry {seq} was given, but the next entry is {self._length}")


@dataclass(eq=False)
class MemoryJournal:
    """The journal of an episode that is not stored. What is appended is durable at once."""

    entries: list[JournalEntry] = field(default_factory=list)

    def append(self, entry: JournalEntry, encoded: EncodedRecord) -> Write:
        """Keep the next entry."""
        self.entries.append(entry)
        return _DURABLE

    def hold(self, entry: JournalEntry, encoded: EncodedRecord) -> None:
        """Keep the last entry."""
        self.entries.append(entry)


_DURABLE = Write(durable=True)


class _Uninterrupted:
    """Waits that the cancellation of their task does not end: it is remembered, and raised when the work is done."""

    _cancellation: asyncio.CancelledError | None = None

    async def repeat(self, wait: Callable[[], Awaitable[T]]) -> T:
        """Wait for what `wait` returns, and call it again after a cancellation."""
        while True:
            try:
                return await wait()
            except asyncio.CancelledError as error:
                self._cancellation = error

    async def answer(self, asking: Awaitable[T]) -> T:
        """Wait for an answer, after a cancellation at most `PATIENCE`.

        Raises:
            TimeoutError: it has not come.
        """
        task = asyncio.ensure_future(asking)
        while not task.done():
            try:
                await asyncio.wait({task}, timeout=None if self._cancellation is None else PATIENCE)
            except asyncio.CancelledError as error:
                self._cancellation = error
            else:
                if not task.done():
                    task.cancel()
                    raise TimeoutError
        return task.result()

    def raise_cancellation(self) -> None:
        """Raise the cancellation, if there was one."""
        if self._cancellation is not None:
            raise self._cancellation from None
