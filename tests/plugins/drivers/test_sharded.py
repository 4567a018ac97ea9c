"""A sharded run is read as the same run in one store: any split over drivers, with duplicates, while it goes on."""

from __future__ import annotations

import asyncio
import json
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from journals import write_entries, write_result
from msgspec.structs import replace
from store_kit import make_entry, make_header, make_task, make_trajectory, plain

from engine.errors import StoreError
from engine.plugins.drivers.publisher import Publisher
from engine.plugins.drivers.sharded import ShardedRun, note_status
from engine.plugins.drivers.shards import Part, create_shards
from engine.plugins.show.listing.heads import heads
from engine.plugins.show.listing.listing import Listing
from engine.schemas.trajectory import Outcome
from engine.store import RunStore, find_run
from engine.store.rows.export import export_rows

HEADER = make_header()
TASKS, SAMPLES = 4, 2


async def finish(store: RunStore, task: int, sample: int, *, attempt: int = 0, reward: float = 1.0) -> None:
    """Run an episode to its end; what is in it follows from (task, sample, attempt)."""
    seed = 10 * attempt + 1
    begun = await store.begin(make_task(task), sample, attempt=attempt)
    for seq in range(3):
        await write_entries(begun, make_entry(seq, seed))
    outcome = Outcome(state="DONE", event="satisfied", solved=reward > 0, reward=reward, rewards={"reward": reward})
    await write_result(begun, make_trajectory(task, sample, seed=seed, outcome=outcome))


def make_run(folder: Path, place: str | None = None) -> Path:
    """The folder of a sharded run in which nothing was begun."""
    RunStore.create(folder, HEADER).close()
    create_shards(folder / HEADER.run_id, HEADER, place)
    return folder / HEADER.run_id


def driver(run: Path, name: str) -> RunStore:
    return RunStore.create(run / "drivers", HEADER, name=name)


def contents(store: RunStore) -> Any:
    """Everything that readers get of a run, without what depends on the clock or on where an episode is stored."""
    rows = [replace(row, number=0, started=None, ended=None) for row in store.episodes()]
    return (
        rows,
        [plain(each) for each in store.trajectories()],
        {row.id: plain(store.journal(row.id)) for row in rows},
        [json.dumps(row, default=lambda value: value.tolist(), sort_keys=True) for row in export_rows(store)],
        {row.task_id: plain(store.task(row.task_id)) for row in rows},
        store.finished(),
        [(head.episode_id, head.outcome) for head in heads(store)],
    )


split = st.lists(
    st.tuples(
        st.integers(0, TASKS - 1),  # the group that is leased
        st.sampled_from("012"),  # the driver
        st.booleans(),  # whether it was published
        st.booleans(),  # whether the driver's own store is still there
    ),
    max_size=8,
)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(leases=split)
def test_any_split_over_drivers_reads_as_the_run_in_one_store(
    tmp_path_factory: pytest.TempPathFactory, leases: list[tuple[int, str, bool, bool]]
) -> None:
    """The last lease of each group has the greatest attempt: earlier ones were lost after their driver had finished the group."""
    folder = tmp_path_factory.mktemp("split")
    leases = [*((task, "0", True, True) for task in range(TASKS)), *leases]

    async def write() -> None:
        numbers = count()
        attempts: dict[int, int] = {}
        for task, name, published, kept in leases:
            attempt = attempts.get(task, -1) + 1
            published = published or not kept  # else nothing of it is left
            attempts[task] = attempt
            with driver(run, f"{name}x{next(numbers)}") as store:
                for sample in range(SAMPLES):
                    await finish(store, task, sample, attempt=attempt, reward=float(attempt))
                if published:
                    Publisher(store.folder, str(run / "shards"), store.folder.name).publish([f"t{task}"])
            if not kept:
                shutil.rmtree(store.folder)
            RunStore.open(run, readonly=True)  # a reader in the middle changes nothing
        for task, attempt in attempts.items():
            for sample in range(SAMPLES):
                await finish(one, task, sample, attempt=attempt, reward=float(attempt))

    run = make_run(folder)
    with RunStore.create(folder, HEADER, name="one") as one:
        asyncio.run(write())
        expected = contents(one)
    read = RunStore.open(run, readonly=True)
    assert isinstance(read, ShardedRun)
    assert contents(read) == expected
    shutil.rmtree(Path(read.path).parent)  # the list can be removed at any time
    assert contents(RunStore.open(run, readonly=True)) == expected


async def test_equal_attempts_of_two_drivers_are_one_episode(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for name in ("1", "0"):
        with driver(run, name) as store:
            await finish(store, 0, 0, reward=float(name))
            Publisher(store.folder, str(run / "shards"), name).publish(["t0"])
    (row,) = RunStore.open(run, readonly=True).episodes()
    assert (row.id, row.reward) == ("t0/0", 0.0)  # of driver 0, although that of driver 1 came first


async def test_a_run_that_goes_on_is_read_as_it_is(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with RunStore.open(run) as own:
        await own.plan([make_task(0), make_task(1)], 1)
    with driver(run, "0") as store, Listing([run]) as listing:
        assert [(row.episode, row.status) for row in listing.page().rows] == [("t0/0", "pending"), ("t1/0", "pending")]
        begun = await store.begin(make_task(0), 0)
        await write_entries(begun, make_entry(0))
        read = RunStore.open(run, readonly=True)
        assert read.status == "running"
        assert [entry.dest for entry in read.journal("t0/0")] == ["GENERATING"]
        row = listing.page().rows[0]
        assert (row.status, row.state) == ("running", "GENERATING")
        await write_entries(begun, make_entry(1))
        await write_entries(begun, make_entry(2))
        await write_result(begun, make_trajectory(0, 0))
        page = listing.page("outcome.reward > 0.5")
        assert [row.episode for row in page.rows] == ["t0/0"]
        Publisher(store.folder, str(run / "shards"), "0").publish(["t0"])
        assert [row.episode for row in listing.page("outcome.solved", "let me see").rows] == ["t0/0"]
        assert listing.totals().done == 1
    assert RunStore.open(run, readonly=True).status == "interrupted"


async def test_an_episode_that_its_driver_gave_up_is_read_from_another(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with driver(run, "0") as store:
        await finish(store, 0, 0, reward=5.0)
        assert RunStore.open(run, readonly=True).episode("t0/0").reward == 5.0
    with driver(run, "1") as other:
        await finish(other, 0, 0, reward=7.0)
    assert RunStore.open(run, readonly=True).episode("t0/0").reward == 5.0
    shutil.rmtree(run / "drivers" / "0")
    (run / "drivers" / "1").rename(run / "drivers" / "0")
    assert RunStore.open(run, readonly=True).episode("t0/0").reward == 7.0


@pytest.mark.parametrize("url", [False, True])
async def test_a_folder_or_url_of_shards_alone_is_a_run(tmp_path: Path, url: bool) -> None:
    place = f"memory://{tmp_path.name}/r" if url else str(tmp_path / "bucket")
    run = make_run(tmp_path, place)
    with driver(run, "0") as store:
        for task in range(2):
            await finish(store, task, 0)
            Publisher(store.folder, place, "0").publish([f"t{task}"])
        expected = contents(store)
    note_status(run)  # as `engine run` does at its end
    shutil.rmtree(run)
    read = RunStore.open(find_run(place), readonly=True)
    assert contents(read) == expected
    assert read.status == "done"
    with Listing([find_run(place)]) as listing:
        assert [row.episode for row in listing.page("turns.assistant == 2").rows] == ["t0/0", "t1/0"]


async def test_what_is_wrong_with_shards_is_said_with_the_place(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    shards = run / "shards"
    with driver(run, "0") as store:
        for task in range(3):
            await finish(store, task, 0)
            Publisher(store.folder, str(shards), "0").publish([f"t{task}"])
    shutil.rmtree(run / "drivers")
    RunStore.open(run, readonly=True)
    aside = tmp_path / "aside"
    (shards / Part(driver="0", number=2).mark).rename(aside)
    with pytest.raises(
        StoreError, match=r"shard part-0-000002 is missing in .*/shards: it was there when the run was last read"
    ):
        RunStore.open(run, readonly=True)
    aside.rename(shards / Part(driver="0", number=2).mark)
    (shards / "part-0-000001.db").rename(aside)
    read = RunStore.open(run, readonly=True)
    assert read.trajectory("t0/0").episode_id == "t0/0"
    with pytest.raises(
        StoreError, match=r"shard part-0-000001 is not complete: .*part-0-000001.db does not exist. Copy it"
    ):
        read.trajectory("t1/0")
    aside.rename(shards / "part-0-000001.db")
    with pytest.raises(StoreError, match="a sharded run has no scores; leave out --score"):
        read.trajectory("t1/0", "other")

    other = make_header("other-20260101-000000-abcd")
    RunStore.create(tmp_path, other).close()
    create_shards(tmp_path / other.run_id, other)
    with RunStore.create(tmp_path / other.run_id / "drivers", other, name="9") as strange:
        await finish(strange, 0, 0)
        Publisher(strange.folder, str(tmp_path / other.run_id / "shards"), "9").publish(["t0"])
    for file in (tmp_path / other.run_id / "shards").glob("*-9-*"):
        shutil.copy(file, shards)
    with pytest.raises(
        StoreError,
        match=rf"episodes-9-000000.parquet is a shard of run {other.run_id} \(spec `run`\).*of run {HEADER.run_id}; move",
    ):
        RunStore.open(run, readonly=True)
    with pytest.raises(StoreError, match=r"cannot (open|read|list) .*nothing"):
        RunStore.open(find_run(f"memory://{tmp_path.name}/nothing"), readonly=True)


async def test_the_query_of_the_docs_takes_each_row_once(tmp_path: Path) -> None:
    docs = (Path(__file__).parents[3] / "docs" / "rows.md").read_text(encoding="utf-8")
    query = docs.rpartition("```sql")[2].partition("```")[0]
    run = make_run(tmp_path)
    for name, attempt in (("1", 0), ("0", 1), ("2", 0)):
        with driver(run, name) as store:
            await finish(store, 0, 0, attempt=attempt)
            Publisher(store.folder, str(run / "shards"), name).publish(["t0"])
    found = duckdb.sql(query.replace("'shards/", f"'{run}/shards/"))
    rows = found.order("branch").fetchall()
    at = found.columns.index("input_ids")
    expected = make_trajectory(0, 0, seed=11).branches
    assert [list(row[at]) for row in rows] == [branch.input_ids.tolist() for branch in expected]
