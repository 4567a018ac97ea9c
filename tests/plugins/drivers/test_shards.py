"""Parts of a driver's store: what is published, when, and what a crash leaves."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import pytest
from journals import write_entries, write_result
from store_kit import make_entry, make_header, make_task, make_trajectory, plain

from engine.errors import StoreError
from engine.plugins.drivers.places import ShardPlace
from engine.plugins.drivers.publisher import Publisher
from engine.plugins.drivers.shards import Part, create_shards, list_parts, read_header, shards_of
from engine.store import RunStore

HEADER = make_header()


async def finish(store: RunStore, task: int, sample: int, *, attempt: int = 0, seed: int = 1) -> None:
    """Run one episode of two journal entries."""
    begun = await store.begin(make_task(task), sample, attempt=attempt)
    for seq in range(2):
        await write_entries(begun, make_entry(seq, seed))
    await write_result(begun, make_trajectory(task, sample, seed=seed))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a sharded run."""
    RunStore.create(tmp_path, HEADER).close()
    folder = tmp_path / HEADER.run_id
    create_shards(folder, HEADER)
    return folder


async def test_a_group_is_published_when_all_of_its_episodes_are_done(run: Path) -> None:
    with RunStore.create(run / "drivers", HEADER, name="0") as store:
        await store.plan([make_task(0), make_task(1)], 2)
        await finish(store, 0, 0)
        publisher = Publisher(store.folder, shards_of(run) or "", "0")
        assert publisher.ready() == []
        await finish(store, 0, 1)
        assert publisher.ready() == ["t0"]
        assert publisher.publish(["t0"]) == "part-0-000000"
        assert publisher.ready() == []
        assert publisher.publish(["t0"]) is None
    assert sorted(file.name for file in (run / "shards").iterdir()) == [
        "episodes-0-000000.parquet",
        "part-0-000000.db",
        "part-0-000000.parquet",
        "run.json",
        "status.json",
    ]


async def test_a_part_has_the_episodes_as_the_driver_wrote_them(run: Path, tmp_path: Path) -> None:
    with RunStore.create(run / "drivers", HEADER, name="0") as store:
        await finish(store, 0, 0, attempt=2)
        await finish(store, 1, 0)
        Publisher(store.folder, str(run / "shards"), "0").publish(["t0"])
        own = tmp_path / "part"
        own.mkdir()
        (run / "shards" / "part-0-000000.db").rename(own / "run.db")
        with RunStore.open(own, readonly=True) as part:
            assert [row.id for row in part.episodes()] == ["t0/0"]
            assert [*part.episodes()] == [store.episode("t0/0")]
            assert next(part.episodes()).attempt == 2
            assert plain(part.trajectory("t0/0")) == plain(store.trajectory("t0/0"))
            assert plain(part.journal("t0/0")) == plain(store.journal("t0/0"))
            assert part.task("t0") == store.task("t0")
    rows = duckdb.sql(
        f"SELECT episode_id, branch, len(input_ids) FROM '{run}/shards/part-*.parquet' ORDER BY ALL"
    ).fetchall()
    assert rows == [("t0/0", 0, 10), ("t0/0", 1, 10)]
    summary = duckdb.sql(
        f"SELECT id, attempt, reward, solved, tokens FROM '{run}/shards/episodes-*.parquet'"
    ).fetchall()
    assert summary == [("t0/0", 2, 1.0, True, 10)]


async def test_images_that_episodes_name_go_with_them(run: Path) -> None:
    from io import BytesIO

    from PIL import Image

    file = BytesIO()
    Image.new("RGB", (4, 4), "red").save(file, "PNG")
    with RunStore.create(run / "drivers", HEADER, name="0") as store:
        image = await store.put_image(file.getvalue())
        task = make_task(0, picture=image.image)
        begun = await store.begin(task, 0)
        await write_entries(begun, make_entry(0))
        await write_result(begun, make_trajectory(0, 0))
        await finish(store, 1, 0)
        publisher = Publisher(store.folder, str(run / "shards"), "0")
        publisher.publish(["t1"])
        publisher.publish(["t0"])
    part = run / "shards"
    for name, digests in (("part-0-000000", []), ("part-0-000001", [image.image])):
        folder = run.parent / name
        folder.mkdir()
        (part / f"{name}.db").rename(folder / "run.db")
        assert RunStore.open(folder, readonly=True).image_digests() == digests


async def test_a_restarted_driver_goes_on_with_the_next_part(run: Path) -> None:
    with RunStore.create(run / "drivers", HEADER, name="0") as store:
        for task in range(3):
            await finish(store, task, 0)
        Publisher(store.folder, str(run / "shards"), "0").publish(["t0"])
        again = Publisher(store.folder, str(run / "shards"), "0")
        assert again.ready() == ["t1", "t2"]
        assert again.publish(["t1"]) == "part-0-000001"
        # The process dies after the part, before it noted it: it is published again.
        log = store.folder / "published.jsonl"
        log.write_bytes(log.read_bytes()[:-20])
        third = Publisher(store.folder, str(run / "shards"), "0")
        assert third.ready() == ["t1", "t2"]
        assert third.publish(["t1"]) == "part-0-000002"
        assert third.ready() == ["t2"]
    assert list_parts(ShardPlace(run / "shards")) == [
        Part(driver="0", number=0),
        Part(driver="0", number=1),
        Part(driver="0", number=2),
    ]


async def test_a_part_without_its_last_file_does_not_exist(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunStore.create(run / "drivers", HEADER, name="0") as store:
        await finish(store, 0, 0)
        publisher = Publisher(store.folder, str(run / "shards"), "0")
        put = ShardPlace.put
        monkeypatch.setattr(
            ShardPlace, "put", lambda self, file, name: put(self, file, name) if name.endswith(".db") else 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            publisher.publish(["t0"])
        assert list_parts(ShardPlace(run / "shards")) == []
        monkeypatch.undo()
        assert publisher.publish(["t0"]) == "part-0-000000"
        assert list_parts(ShardPlace(run / "shards")) == [Part(driver="0", number=0)]


def test_a_missing_shard_is_named(run: Path) -> None:
    for number in (0, 2):
        (run / "shards" / Part(driver="3b", number=number).mark).touch()
    with pytest.raises(
        StoreError, match=r"shard part-3b-000001 is missing in .*/shards: there is no episodes-3b-000001.parquet"
    ):
        list_parts(ShardPlace(run / "shards"))


def test_the_place_of_shards_is_of_one_run_and_one_version(run: Path, tmp_path: Path) -> None:
    assert read_header(ShardPlace(run / "shards")) == HEADER
    other = make_header("other-20260101-000000-abcd")
    with pytest.raises(
        StoreError, match=f"has the shards of run {HEADER.run_id}; give run {other.run_id} a place of its own"
    ):
        create_shards(tmp_path, other, str(run / "shards"))
    (run / "sharded.json").write_text(json.dumps({"version": 2, "shards": "shards"}))
    with pytest.raises(
        StoreError, match=r"sharded.json has layout version 2 of shards.*version 1: upgrade episode-engine"
    ):
        shards_of(run)
    assert shards_of(tmp_path) is None
    with pytest.raises(StoreError, match="driver name `a-b`: use small letters and digits"):
        Publisher(run, str(run / "shards"), "a-b")


def test_a_url_that_cannot_be_opened_says_what_to_install_or_check() -> None:
    with pytest.raises(StoreError, match="cannot open nothing://x"):
        ShardPlace("nothing://x")


def test_a_file_system_of_fsspec_is_a_place(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"one")
    place = ShardPlace("memory://shards-of-a-test/run")
    assert place.names() == []
    place.put(file, "a")
    place.put(file, "b")
    assert place.names() == ["a", "b"]
    assert place.read(["a", "b"]) == [b"one", b"one"]
    place.get("b", tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == b"one"
    with pytest.raises(StoreError, match=r"cannot read memory://shards-of-a-test/run/z: it does not exist"):
        place.read(["z"])
