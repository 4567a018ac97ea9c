"""Group commits: who waits for what, and what one failure may cost."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from journals import write_entries, write_result

from engine.clocks import ROUNDS
from engine.errors import StoreError
from engine.store import RunStore, writer
from engine.store.codec import encode_record
from engine.store.journal import Journal


async def begun(store: RunStore, maker: Any, count: int) -> list[Journal]:
    """The journals of so many new episodes."""
    return [await store.begin(maker.task(index), 0) for index in range(count)]


def count_commits(store: RunStore) -> list[str]:
    """Statements that the writing connection runs from now on."""
    seen: list[str] = []
    store._writer._connection.set_trace_callback(seen.append)  # type: ignore[union-attr]
    return seen


async def test_entries_of_one_moment_are_one_commit(store: RunStore, maker: Any) -> None:
    journals = await begun(store, maker, 200)
    seen = count_commits(store)
    await asyncio.gather(*(write_entries(journal, maker.entry(0, n)) for n, journal in enumerate(journals)))
    assert [statement.split(" ", 1)[0] for statement in seen] == ["BEGIN", *["INSERT"] * 4, "COMMIT"]
    seen.clear()
    await asyncio.gather(*(write_entries(journal, maker.entry(1, n)) for n, journal in enumerate(journals[:64])))
    assert [statement.split(" ", 1)[0] for statement in seen] == ["INSERT"], "one statement is a commit"
    assert [len(store.journal(f"t{index}/0")) for index in range(200)] == [2] * 64 + [1] * 136


async def test_entries_of_a_few_rounds_are_one_commit(store: RunStore, maker: Any) -> None:
    first, *others = await begun(store, maker, ROUNDS)
    seen = count_commits(store)

    async def later(journal: Journal, rounds: int) -> None:
        for _ in range(rounds):
            await asyncio.sleep(0)
        await write_entries(journal, maker.entry(0, rounds))

    await asyncio.gather(later(first, 0), *(later(journal, at + 1) for at, journal in enumerate(others)))
    assert [statement.split(" ", 1)[0] for statement in seen] == ["INSERT"]
    assert [len(store.journal(f"t{index}/0")) for index in range(ROUNDS)] == [1] * ROUNDS


async def test_many_entries_are_submitted_at_once(store: RunStore, maker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MANY", 8)
    journals = await begun(store, maker, 20)
    lane = store._writer.lane()  # type: ignore[union-attr]
    writes, gathered = [], []
    for number, journal in enumerate(journals):
        entry = maker.entry(0, number)
        writes.append(journal.append(entry, encode_record(entry.record)))
        gathered.append(len(lane.fresh))
    assert gathered == [1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4]
    await asyncio.gather(*writes)
    assert [len(store.journal(f"t{index}/0")) for index in range(20)] == [1] * 20


async def test_a_commit_wakes_a_loop_once(store: RunStore, maker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    journals = await begun(store, maker, 100)
    loop = asyncio.get_running_loop()
    calls: list[Any] = []
    inner = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args, **kw: (calls.append(args), inner(*args, **kw))[1])
    await asyncio.gather(*(write_entries(journal, maker.entry(0, n)) for n, journal in enumerate(journals)))
    assert len(calls) == 1


async def test_one_bad_write_fails_alone(store: RunStore, maker: Any) -> None:
    journals = await begun(store, maker, 20)
    await write_entries(journals[7], maker.entry(0, 7))
    journals[7]._length = 0  # the same step again
    results = await asyncio.gather(
        *(write_entries(journal, maker.entry(0, n)) for n, journal in enumerate(journals)), return_exceptions=True
    )
    assert [index for index, result in enumerate(results) if result is not None] == [7]
    assert isinstance(results[7], StoreError)
    assert "the same step was written twice" in str(results[7])
    assert [len(store.journal(f"t{index}/0")) for index in range(20)] == [1] * 20
    with pytest.raises(StoreError, match="t7/0 takes no more entries"):
        await write_entries(journals[7], maker.entry(1, 7))
    with pytest.raises(StoreError, match="t7/0 takes no more entries"):
        await write_result(journals[7], maker.trajectory(7))
    with pytest.raises(StoreError, match="t7/0 takes no more entries"):
        await journals[7].restart()
    await write_entries(journals[8], maker.entry(1, 8))


async def test_after_a_failed_write_the_episode_has_no_gap(store: RunStore, maker: Any) -> None:
    journal = await store.begin(maker.task(), 0)
    await write_entries(journal, maker.entry(0))
    journal._length = 0
    writes = [journal.append(entry, encode_record(entry.record)) for entry in map(maker.entry, range(4))]
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert [write.durable for write in writes] == [False] * 4
    assert [type(result) for result in results] == [StoreError] * 4
    assert [entry.seq for entry in store.journal("t0/0")] == [0]


async def test_a_cancelled_append_is_written_all_the_same(store: RunStore, maker: Any) -> None:
    journal = await store.begin(maker.task(), 0)
    task = asyncio.create_task(write_entries(journal, maker.entry(0)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await write_entries(journal, maker.entry(1))
    assert maker.same(store.journal("t0/0"), [maker.entry(0), maker.entry(1)])


async def test_what_waits_to_be_written_is_bounded(
    store: RunStore, maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BOUND", 20_000)
    journals = await begun(store, maker, 100)
    lane = store._writer._lanes[asyncio.get_running_loop()]  # type: ignore[union-attr]
    most, inner = 0, writer.Lane.put

    def put(self: Any, write: Any, **options: Any) -> Any:
        nonlocal most
        inner(self, write, **options)
        most = max(most, self.weight)
        return write

    monkeypatch.setattr(writer.Lane, "put", put)
    entries = [maker.entry(seq, tokens=256) for seq in range(6)]

    await asyncio.gather(*(write_entries(journal, *entries) for journal in journals))
    assert [len(store.journal(f"t{index}/0")) for index in range(100)] == [6] * 100
    assert 20_000 < most < 20_000 + 3_000  # one write over: the last that found room
    assert (lane.weight, len(lane.parked)) == (0, 0)


async def test_a_write_that_is_parked_is_made_though_who_waits_is_cancelled(
    store: RunStore, maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BOUND", 0)
    journals = await begun(store, maker, 3)
    tasks = [asyncio.create_task(write_entries(journal, maker.entry(0, n))) for n, journal in enumerate(journals)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [type(None), asyncio.CancelledError, type(None)]
    await write_entries(journals[1], maker.entry(1, 1))
    assert [len(store.journal(f"t{index}/0")) for index in range(3)] == [1, 2, 1]


async def test_closing_makes_the_writes_that_are_parked(
    tmp_path: Path, maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunStore.create(tmp_path, maker.header()) as store:
        journals = await begun(store, maker, 3)
        monkeypatch.setattr(writer, "BOUND", 0)
        entry = maker.entry(0)
        writes = [journal.append(entry, encode_record(entry.record)) for journal in journals]
        assert [write.parked for write in writes] == [False, True, True]
    await asyncio.gather(*writes)
    assert [len(store.journal(f"t{index}/0")) for index in range(3)] == [1, 1, 1]


async def test_a_write_has_a_future_only_where_somebody_waits(store: RunStore, maker: Any) -> None:
    (journal,) = await begun(store, maker, 1)
    first, second = maker.entry(0), maker.entry(1)
    write = journal.append(first, encode_record(first.record))
    assert not write.durable
    await journal.append(second, encode_record(second.record))
    assert (write.durable, write.waiter) == (True, None)
    await write
    assert write.waiter is None


async def test_a_write_is_awaited_again_after_a_cancellation(store: RunStore, maker: Any) -> None:
    (journal,) = await begun(store, maker, 1)
    entry = maker.entry(0)
    write = journal.append(entry, encode_record(entry.record))
    waiting = asyncio.ensure_future(write)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await write
    assert write.durable


def test_several_event_loops_write_to_one_store(tmp_path: Path, maker: Any) -> None:
    with RunStore.create(tmp_path, maker.header()) as store:

        async def episodes(base: int) -> None:
            async def one(index: int) -> None:
                journal = await store.begin(maker.task(index), 0)
                await write_entries(journal, *(maker.entry(seq, index) for seq in range(5)))

            await asyncio.gather(*(one(base + number) for number in range(10)))

        threads = [threading.Thread(target=lambda base=base: asyncio.run(episodes(base))) for base in (0, 10, 20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index in range(30):
            assert maker.same(store.journal(f"t{index}/0"), [maker.entry(seq, index) for seq in range(5)])


async def test_a_full_disk_is_a_store_error_and_what_was_written_stays_readable(store: RunStore, maker: Any) -> None:
    journals = await begun(store, maker, 30)
    await store._writer.do(lambda c: c.execute(f"PRAGMA max_page_count = {c.execute('PRAGMA page_count').fetchone()[0] + 4}"))  # type: ignore[union-attr]  # fmt: skip
    written, refused = {}, []

    async def episode(index: int) -> None:
        written[index] = 0
        for seq in range(10):
            try:
                await write_entries(journals[index], maker.entry(seq, index, 64))
            except StoreError as error:
                refused.append(str(error))
                return
            written[index] += 1

    await asyncio.wait_for(asyncio.gather(*(episode(index) for index in range(30))), 120)
    assert len(refused) == 30
    assert set(refused) == {
        f"cannot write {store.folder / 'run.db'}: the disk is full; free space on the disk and resume the run"
    }
    assert sum(written.values()) > 0
    for index, count in written.items():
        assert maker.same(store.journal(f"t{index}/0"), [maker.entry(seq, index, 64) for seq in range(count)])
    await store._writer.do(lambda c: c.execute("PRAGMA max_page_count = 1000000"))  # type: ignore[union-attr]
    await write_entries(await store.begin(maker.task(99), 0), maker.entry(0, 99))
    with sqlite3.connect(store.folder / "run.db") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


FILE_LIMIT = """
import asyncio, resource, signal, sys
sys.path[:0] = [sys.argv[2]]
from pathlib import Path
from store_kit import make_entry, make_header, make_task
from engine.errors import StoreError
from engine.store import RunStore
from engine.store.codec import encode_record

async def main():
    store = RunStore.create(Path(sys.argv[1]), make_header())
    journals = [await store.begin(make_task(index), 0) for index in range(8)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))
    async def episode(index):
        for seq in range(1000):
            try:
                entry = make_entry(seq, index, 64)
                await journals[index].append(entry, encode_record(entry.record))
            except StoreError as error:
                return seq, str(error)
    for index, (count, error) in enumerate(await asyncio.wait_for(asyncio.gather(*map(episode, range(8))), 120)):
        print(index, count, error.partition("run.db: ")[2])
    store.close()

asyncio.run(main())
"""


def test_a_file_that_may_not_grow_fails_every_waiter_and_stays_whole(tmp_path: Path, maker: Any) -> None:
    command = [sys.executable, "-c", FILE_LIMIT, str(tmp_path), str(Path(__file__).parent)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=240)
    lines = [line.split(" ", 2) for line in out.stdout.splitlines()]
    assert [line[0] for line in lines] == [str(index) for index in range(8)], out.stderr
    run = next(tmp_path.iterdir())
    with sqlite3.connect(run / "run.db") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with RunStore.open(run, readonly=True) as store:
        for index, count, error in lines:
            assert "free space on the disk and resume the run" in error
            assert maker.same(
                store.journal(f"t{index}/0"), [maker.entry(seq, int(index), 64) for seq in range(int(count))]
            )


async def test_a_writer_that_breaks_wakes_everybody_with_the_reason(
    store: RunStore, maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    journals = await begun(store, maker, 5)

    def broken(self: Any, writes: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(writer.Writer, "_commit_all", broken)
    waits = [write_entries(journal, maker.entry(0, n)) for n, journal in enumerate(journals)]
    results = await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), 120)
    assert [str(result) for result in results] == [f"cannot write {store.folder / 'run.db'}: no memory"] * 5
    with pytest.raises(StoreError, match="no memory"):
        await store.begin(maker.task(9), 0)
