"""What a run's store promises to its writer."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from journals import write_entries, write_result
from msgspec.structs import astuple

from engine.errors import SpecCodeError, StoreError
from engine.schemas.environment import UserTurn
from engine.schemas.journal import JournalEntry, UserRecord
from engine.store import RunStore


async def test_a_journal_comes_back_bit_equal_and_in_order(store: RunStore, maker: Any) -> None:
    journal = await store.begin(maker.task(), 0)
    assert (journal.episode_id, journal.attempt, journal.entries) == ("t0/0", 0, [])
    entries = [maker.entry(seq) for seq in range(9)]
    await write_entries(journal, *entries)
    assert maker.same(store.journal("t0/0"), entries)


async def test_an_acknowledged_entry_is_in_the_file_already(store: RunStore, maker: Any) -> None:
    journal = await store.begin(maker.task(), 0)
    for seq in range(5):
        await write_entries(journal, maker.entry(seq))
        code = "import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute('SELECT max(seq) FROM journal').fetchone()[0])"
        command = [sys.executable, "-c", code, str(store.folder / "run.db")]
        out = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
        assert out.stdout == f"{seq}\n"


async def test_a_trajectory_comes_back_equal(store: RunStore, maker: Any) -> None:
    journal = await store.begin(maker.task(), 0)
    trajectory = maker.trajectory()
    assert await journal.finish(lambda: trajectory) is trajectory
    assert journal.trajectory is trajectory
    assert maker.same(store.trajectory("t0/0"), trajectory)
    row = store.episode("t0/0")
    assert (row.status, row.state, row.event, row.solved, row.trainable) == ("done", "DONE", "satisfied", True, True)
    assert (row.reward, row.turns, row.tokens, row.seed, row.attempt) == (1.0, 2, 10, 2**62, 0)
    assert row.started is not None
    assert row.ended is not None
    assert row.started <= row.ended


async def test_trajectories_stream_in_the_order_of_tasks_and_samples(store: RunStore, maker: Any) -> None:
    order = [(index, sample) for index in range(40) for sample in range(4)]
    for index, sample in reversed(order):
        await write_result(await store.begin(maker.task(index), sample), maker.trajectory(index, sample, branches=1))
    assert [item.episode_id for item in store.trajectories()] == [f"t{index}/{sample}" for index, sample in order]


async def test_an_episode_is_done_wholly_or_not_at_all(store: RunStore, maker: Any) -> None:
    journal = await store.begin(maker.task(), 0)
    good = maker.trajectory()
    doubled = replace(good, postings=[good.postings[0], good.postings[0]])
    with pytest.raises(StoreError, match="the same step was written twice"):
        await write_result(journal, doubled)
    connection = sqlite3.connect(store.folder / "run.db")
    for table in ("trajectories", "branches", "postings"):
        assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    connection.close()
    assert store.finished() == set()
    with pytest.raises(StoreError, match="t0/0 is running: it has no trajectory yet"):
        store.trajectory("t0/0")


async def test_resume_gives_back_the_journal_and_refuses_what_is_done(tmp_path: Path, maker: Any) -> None:
    with RunStore.create(tmp_path, maker.header()) as store:
        await write_result(await store.begin(maker.task(0), 0), maker.trajectory(0))
        journal = await store.begin(maker.task(1), 0)
        await write_entries(journal, *(maker.entry(seq, 1) for seq in range(3)))
        folder = store.folder
    with RunStore.open(folder) as store:
        assert store.finished() == {"t0/0"}
        with pytest.raises(StoreError, match="t0/0 is done; it is not run again"):
            await store.begin(maker.task(0), 0)
        journal = await store.begin(maker.task(1), 0)
        assert maker.same(journal.entries, [maker.entry(seq, 1) for seq in range(3)])
        with pytest.raises(StoreError, match="t1/0: entry 2 was given, but the next entry is 3"):
            await write_entries(journal, maker.entry(2, 1))
        await write_entries(journal, maker.entry(3, 1))
        await write_result(journal, maker.trajectory(1))
        assert store.finished() == {"t0/0", "t1/0"}


async def test_restart_begins_a_new_attempt_and_keeps_the_old_one(store: RunStore, maker: Any) -> None:
    journal = await store.begin(maker.task(), 0)
    await write_entries(journal, *(maker.entry(seq, 1) for seq in range(4)))
    await journal.restart()
    assert (journal.attempt, journal.entries) == (1, [])
    await write_entries(journal, *(maker.entry(seq, 2) for seq in range(2)))
    await write_result(journal, maker.trajectory())
    assert maker.same(store.journal("t0/0"), [maker.entry(seq, 2) for seq in range(2)])
    assert maker.same(store.journal("t0/0", attempt=0), [maker.entry(seq, 1) for seq in range(4)])
    assert store.episode("t0/0").attempt == 1


async def test_a_gap_and_what_comes_after_the_end_are_refused(store: RunStore, maker: Any) -> None:
    journal = await store.begin(maker.task(), 0)
    with pytest.raises(StoreError, match="t0/0 is running already"):
        await store.begin(maker.task(), 0)
    with pytest.raises(StoreError, match="t0/0: entry 1 was given, but the next entry is 0"):
        await write_entries(journal, maker.entry(1))
    assert store.journal("t0/0") == []
    await write_result(journal, maker.trajectory())
    with pytest.raises(StoreError, match="t0/0 is done"):
        await write_entries(journal, maker.entry(0))
    with pytest.raises(StoreError, match="t0/0 is done"):
        await journal.restart()


async def test_a_task_that_has_changed_is_refused(tmp_path: Path, maker: Any) -> None:
    with RunStore.create(tmp_path, maker.header()) as store:
        await store.begin(maker.task(0, question="2 + 2"), 0)
        folder = store.folder
    with RunStore.open(folder) as store:
        with pytest.raises(StoreError, match="task `t0` is not what it was when this run began"):
            await store.begin(maker.task(0, question="2 + 3"), 0)
        assert (await store.begin(maker.task(0, question="2 + 2"), 0)).entries == []


async def test_what_json_cannot_say_fails_its_own_episode_alone(store: RunStore, maker: Any) -> None:
    journals = [await store.begin(maker.task(index), 0) for index in range(2)]
    bad = JournalEntry(
        seq=0, state="A", event="e", dest="B", at=0.0, seconds=0.0,
        record=UserRecord(turn=UserTurn(content="x", facts={"thing": object()})),
    )  # fmt: skip
    results = await asyncio.gather(
        write_entries(journals[0], bad), write_entries(journals[1], maker.entry(0)), return_exceptions=True
    )
    assert isinstance(results[0], SpecCodeError)
    assert results[1] is None
    await write_entries(journals[0], maker.entry(0))
    assert len(store.journal("t0/0")) == len(store.journal("t1/0")) == 1


async def test_planned_episodes_are_pending_until_begun(store: RunStore, maker: Any) -> None:
    tasks = [maker.task(index) for index in range(3)]
    await store.plan(tasks, 2)
    await store.plan(tasks, 2)
    await write_entries(await store.begin(tasks[1], 1), maker.entry(0))
    assert [(row.id, row.status) for row in store.episodes()] == [
        ("t0/0", "pending"), ("t0/1", "pending"), ("t1/0", "pending"),
        ("t1/1", "running"), ("t2/0", "pending"), ("t2/1", "pending"),
    ]  # fmt: skip
    assert store.journal("t1/1")[-1].dest == "GENERATING"
    assert store.task("t2") == tasks[2]


async def test_a_second_writer_is_refused_and_readers_are_not(store: RunStore, maker: Any) -> None:
    with pytest.raises(StoreError, match=r"is being written by process \d+; wait for it or stop it"):
        RunStore.open(store.folder)
    journal = await store.begin(maker.task(), 0)
    with RunStore.open(store.folder, readonly=True) as reader:
        assert reader.status == "running"
        assert reader.header == store.header
        await write_entries(journal, maker.entry(0))
        assert maker.same(reader.journal("t0/0"), [maker.entry(0)])
        with pytest.raises(StoreError, match="was opened for reading"):
            await reader.begin(maker.task(1), 0)  # type: ignore[attr-defined]


async def test_status_says_how_the_run_was_left(tmp_path: Path, maker: Any) -> None:
    store = RunStore.create(tmp_path, maker.header())
    await store.begin(maker.task(), 0)
    assert store.status == "running"
    store.close()
    assert store.status == "interrupted"
    store = RunStore.open(store.folder)
    await write_result(await store.begin(maker.task(), 0), maker.trajectory())
    store.close()
    store.close()
    assert store.status == "done"
    connection = sqlite3.connect(store.folder / "run.db")
    assert connection.execute("SELECT count(*) FROM openings").fetchone() == (2,)
    connection.close()


async def test_a_closed_store_refuses_at_once(store: RunStore, maker: Any) -> None:
    journal = await store.begin(maker.task(), 0)
    store.close()
    with pytest.raises(StoreError, match=r"run\.db is closed"):
        await write_entries(journal, maker.entry(0))


async def test_closing_writes_what_is_under_way_and_wakes_everybody(tmp_path: Path, maker: Any) -> None:
    store = RunStore.create(tmp_path, maker.header())
    journals = [await store.begin(maker.task(index), 0) for index in range(50)]
    waiting = [asyncio.create_task(write_entries(journal, maker.entry(0, n))) for n, journal in enumerate(journals)]
    await asyncio.sleep(0)
    store.close()
    assert await asyncio.gather(*waiting) == [None] * 50
    assert [len(store.journal(f"t{index}/0")) for index in range(50)] == [1] * 50


async def test_a_run_is_not_made_twice(store: RunStore) -> None:
    with pytest.raises(StoreError, match="exists already; resume it"):
        RunStore.create(store.folder.parent, store.header)


@pytest.mark.parametrize(
    ("pragma", "words"),
    [
        ("user_version = 8", "has store version 8, and this engine reads versions 6 and 7: upgrade episode-engine"),
        (
            "user_version = 4",
            "has store version 4, and this engine reads versions 6 and 7: use the engine that wrote it",
        ),
        (
            "user_version = 0",
            "has store version 0, and this engine reads versions 6 and 7: use the engine that wrote it",
        ),
        ("application_id = 7", "is not a run: it is another SQLite file"),
    ],
)
def test_another_version_is_refused_by_name(tmp_path: Path, maker: Any, pragma: str, words: str) -> None:
    store = RunStore.create(tmp_path, maker.header())
    store.close()
    connection = sqlite3.connect(store.folder / "run.db")
    connection.execute(f"PRAGMA {pragma}")
    connection.close()
    for readonly in (True, False):
        with pytest.raises(StoreError, match=words):
            RunStore.open(store.folder, readonly=readonly)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"run\.db does not exist"):
        RunStore.open(tmp_path)
    (tmp_path / "run.db").write_bytes(b"no database, but long enough to be one" * 100)
    with pytest.raises(StoreError, match="is not a run, or its first page is damaged"):
        RunStore.open(tmp_path, readonly=True)


async def test_images_are_kept_once_under_their_digest(store: RunStore) -> None:
    import hashlib
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (5, 3), (255, 0, 0)).save(buffer, "PNG")
    data = buffer.getvalue()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    parts = [await store.put_image(data) for _ in range(2)]
    assert parts[0] == parts[1]
    assert parts[0].model_dump() == {"type": "image", "image": digest, "mime": "image/png", "width": 5, "height": 3}
    assert astuple(store.image(digest)) == (digest, "image/png", 5, 3, data)
    with pytest.raises(StoreError, match="6 bytes are not an image"):
        await store.put_image(b"<html>")
    with pytest.raises(StoreError, match="has no image sha256:00"):
        store.image("sha256:00")
    connection = sqlite3.connect(store.folder / "run.db")
    connection.execute("UPDATE images SET bytes = x'00'")
    connection.commit()
    connection.close()
    with pytest.raises(StoreError, match="is damaged"):
        store.image(digest)
