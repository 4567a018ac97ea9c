"""What the journal of an episode promises to its executor and its runner."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from journals import write_entries

from engine.errors import StoreError
from engine.schemas.journal import JournalEntry
from engine.store import RunStore
from engine.store.codec import encode_record
from engine.store.journal import Journal, MemoryJournal


def hold(journal: Journal, entry: JournalEntry) -> None:
    """Hold an entry."""
    journal.hold(entry, encode_record(entry.record))


async def with_held(store: RunStore, maker: Any) -> Journal:
    """A journal of two entries, the second of which is held."""
    journal = await store.begin(maker.task(), 0)
    await write_entries(journal, maker.entry(0))
    hold(journal, maker.entry(1))
    return journal


def statements(store: RunStore) -> list[str]:
    """Statements that the writing connection begins from now on."""
    begun: list[str] = []
    store._writer._connection.set_trace_callback(lambda text: begun.append(text.split(" ", 1)[0]))  # type: ignore[union-attr]
    return begun


async def settled(rounds: int = 20) -> None:
    """Some rounds of the loop."""
    for _ in range(rounds):
        await asyncio.sleep(0)


class Barrier:
    """Keeps the writer's thread busy."""

    def __init__(self, store: RunStore) -> None:
        self.free = threading.Event()
        store._writer.do(lambda connection: self.free.wait(30))  # type: ignore[union-attr]


async def test_the_held_entry_is_written_with_the_result_in_one_commit(store: RunStore, maker: Any) -> None:
    journal = await with_held(store, maker)
    assert len(store.journal("t0/0")) == 1
    begun = statements(store)
    await journal.finish(maker.trajectory)
    assert (begun.count("BEGIN"), begun.count("COMMIT")) == (1, 1)
    assert maker.same(store.journal("t0/0"), [maker.entry(0), maker.entry(1)])
    assert maker.same(store.trajectory("t0/0"), maker.trajectory())


async def test_nothing_is_written_before_the_judge_has_answered(store: RunStore, maker: Any) -> None:
    journal = await with_held(store, maker)
    seen: list[int] = []

    async def judge(trajectory: Any, encoded: Any) -> Any:
        await settled()
        seen.append(len(store.journal("t0/0")))
        assert store.finished() == set()
        return maker.trajectory(facts={"judged": True})

    trajectory = await journal.finish(maker.trajectory, judge)
    assert seen == [1]
    assert trajectory.facts == store.trajectory("t0/0").facts == {"judged": True}


@pytest.mark.parametrize("times", [1, 3])
async def test_a_result_that_is_being_written_outlives_cancellations(store: RunStore, maker: Any, times: int) -> None:
    journal = await with_held(store, maker)
    barrier = Barrier(store)
    finishing = asyncio.create_task(journal.finish(maker.trajectory))
    await settled()
    for _ in range(times):
        finishing.cancel()
        await settled()
    assert not finishing.done()
    barrier.free.set()
    with pytest.raises(asyncio.CancelledError):
        await finishing
    assert journal.trajectory is not None
    assert store.finished() == {"t0/0"}
    assert len(store.journal("t0/0")) == 2


async def test_a_result_that_waits_for_a_place_outlives_cancellations(
    store: RunStore, maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.store.writer.FINISHING", 1)
    journals = [await store.begin(maker.task(index), 0) for index in range(3)]
    gate, made = asyncio.Event(), []

    async def judge(trajectory: Any, encoded: Any) -> Any:
        await gate.wait()
        return trajectory

    def make(index: int) -> Callable[[], Any]:
        return lambda: (made.append(index), maker.trajectory(index))[1]

    tasks = [asyncio.create_task(journal.finish(make(index), judge)) for index, journal in enumerate(journals)]
    await settled()
    assert made == [0], "no more results are in memory than there are places"
    tasks[2].cancel()
    await settled()
    gate.set()
    assert [type(end) for end in await asyncio.gather(*tasks, return_exceptions=True)] == [
        type(maker.trajectory()), type(maker.trajectory()), asyncio.CancelledError,
    ]  # fmt: skip
    assert store.finished() == {"t0/0", "t1/0", "t2/0"}


async def test_if_the_judge_hangs_a_cancelled_end_has_its_last_entry_and_no_result(
    store: RunStore, maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.store.journal.PATIENCE", 0.01)
    journal = await with_held(store, maker)
    given_up = asyncio.Event()

    async def judge(trajectory: Any, encoded: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    finishing = asyncio.create_task(journal.finish(maker.trajectory, judge))
    await settled()
    finishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await finishing
    await asyncio.wait_for(given_up.wait(), 30)
    assert journal.trajectory is None
    assert store.finished() == set()
    assert len(store.journal("t0/0")) == 2


async def test_without_a_result_the_last_entry_is_written_alone_and_the_episode_can_be_finished(
    store: RunStore, maker: Any
) -> None:
    journal = await with_held(store, maker)

    def fail() -> Any:
        raise ValueError("no result")

    with pytest.raises(ValueError, match="no result"):
        await journal.finish(fail)
    assert len(store.journal("t0/0")) == 2
    with pytest.raises(StoreError, match="t0/0 is running already"):
        await store.begin(maker.task(), 0)
    await journal.finish(maker.trajectory)
    assert len(store.journal("t0/0")) == 2
    assert store.finished() == {"t0/0"}


async def test_while_a_result_is_written_nothing_else_is(store: RunStore, maker: Any) -> None:
    journal = await with_held(store, maker)
    barrier = Barrier(store)
    finishing = asyncio.create_task(journal.finish(maker.trajectory))
    await settled()
    for attempt in (journal.finish(maker.trajectory), journal.restart(), write_entries(journal, maker.entry(1))):
        with pytest.raises(StoreError, match="t0/0 is being finished or begun again"):
            await attempt
    barrier.free.set()
    await finishing


async def test_an_entry_that_cannot_be_written_stays_undone_and_says_why(store: RunStore, maker: Any) -> None:
    journal = await store.begin(maker.task(), 0)
    await write_entries(journal, maker.entry(0))
    journal._length = 0  # the same step again
    entry = maker.entry(0)
    write = journal.append(entry, encode_record(entry.record))
    hold(journal, maker.entry(1))
    with pytest.raises(StoreError, match="the same step was written twice"):
        await write
    assert not write.durable
    for attempt in (journal.finish(maker.trajectory), journal.restart(), write_entries(journal, maker.entry(1))):
        with pytest.raises(StoreError, match="t0/0 takes no more entries"):
            await attempt
    assert store.finished() == set()
    assert len(store.journal("t0/0")) == 1


async def test_a_new_attempt_shares_the_entries_that_are_kept(store: RunStore, maker: Any) -> None:
    journal = await store.begin(maker.task(), 0)
    await write_entries(journal, *map(maker.entry, range(4)))
    hold(journal, maker.entry(4))
    await journal.restart(keep=2)
    assert journal.attempt == 1
    assert maker.same(journal.entries, [maker.entry(0), maker.entry(1)])
    await write_entries(journal, maker.entry(2, 9))
    await journal.reread()
    assert maker.same(journal.entries, [maker.entry(0), maker.entry(1), maker.entry(2, 9)])
    await journal.finish(maker.trajectory)
    assert maker.same(store.journal("t0/0"), journal.entries)
    assert maker.same(store.journal("t0/0", attempt=0), [*map(maker.entry, range(4))])


async def test_an_attempt_that_is_given_up_outlives_a_cancellation(store: RunStore, maker: Any) -> None:
    journal = await with_held(store, maker)
    barrier = Barrier(store)
    restarting = asyncio.create_task(journal.restart())
    await settled()
    restarting.cancel()
    await settled()
    assert not restarting.done()
    barrier.free.set()
    with pytest.raises(asyncio.CancelledError):
        await restarting
    assert (journal.attempt, journal.entries) == (1, [])
    await write_entries(journal, maker.entry(0))


async def test_an_episode_can_be_begun_again_after_a_begin_that_failed(store: RunStore, maker: Any) -> None:
    first = await store.begin(maker.task(), 0)
    await first.finish(maker.trajectory)
    for _ in range(2):
        with pytest.raises(StoreError, match="t0/0 is done"):
            await store.begin(maker.task(), 0)


async def test_what_is_not_stored_is_durable_at_once(maker: Any) -> None:
    journal = MemoryJournal()
    entries = [maker.entry(0), maker.entry(1)]
    write = journal.append(entries[0], encode_record(entries[0].record))
    assert (write.durable, write.parked) == (True, False)
    await write
    journal.hold(entries[1], encode_record(entries[1].record))
    assert journal.entries == entries
