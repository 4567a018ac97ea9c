"""Several drivers in one process: their episodes together are those of one run, and each is made once."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ended_runs import run_to_end
from local_coordinator import Here
from written_specs import save_spec, scripted_spec

from engine.plugins.drivers.actors import Coordinator
from engine.plugins.drivers.feed import Feed
from engine.plugins.drivers.leases import LeaseAnswer, Leases
from engine.plugins.drivers.run import prepare_leases, result_of
from engine.plugins.drivers.session import Setup, machine_id, of_driver, run_driver, share_of
from engine.plugins.drivers.shards import create_shards
from engine.plugins.drivers.spec import DriversSpec
from engine.runner.guarded import FILE, read_reason
from engine.schemas.environment import Task
from engine.spec.load import LoadedSpec, load_spec
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore

GROUPS, SAMPLES = 9, 2


def spec_of(tmp_path: Path, tokenizer: Path, drivers: int = 2) -> LoadedSpec:
    spec: dict[str, Any] = {
        **scripted_spec("many", tokenizer, ["Four."], GROUPS, ask="What is 2 plus 2?"),
        "machine": "tools",
        "rollout": {"samples_per_task": SAMPLES, "concurrency": 4, "seed": 7, "drivers": drivers},
    }
    path = save_spec(tmp_path / "spec.yaml", spec)
    return load_spec(path)


def setup_of(loaded: LoadedSpec, header: RunHeader, folder: Path) -> Setup:
    return Setup(
        loaded=loaded,
        header=header,
        folder=str(folder),
        drivers=DriversSpec.of(loaded.spec).drivers,
        kept=None,
        shards=None,
        keep_going=False,
        path=[],
        cwd=str(Path.cwd()),
        environ={},
    )


def rows(folder: Path, *, once: bool = True) -> dict[str, tuple[Any, ...]]:
    """What an episode gave, by its id; raises if one is there twice, unless it may be there more than `once`."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in sorted(folder.glob("run.db")) or sorted(folder.glob("drivers/*/run.db")):
        with RunStore.open(path.parent, readonly=True) as store:
            for each in store.trajectories():
                assert not once or each.episode_id not in found
                ids = [branch.input_ids.tolist() for branch in each.branches]
                found[each.episode_id] = (each.seed, each.run_id, ids, each.outcome.event, list(each.path))
    return found


async def alone(loaded: LoadedSpec, header: RunHeader, folder: Path) -> dict[str, tuple[Any, ...]]:
    return rows((await run_to_end(loaded, folder, header=header)).store.folder)


async def test_two_drivers_make_the_episodes_of_one_run_each_once(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    loaded = spec_of(tmp_path, tiny_tokenizer_dir)
    header = RunHeader.of(loaded)
    folder = tmp_path / "many"
    folder.mkdir()
    leases = Leases(folder / "leases.db", GROUPS)
    here = Here(leases)
    setup = setup_of(loaded, header, folder)
    ended = await asyncio.gather(*(run_driver(setup, slot, here) for slot in range(2)))
    assert [done.store for done in ended] == ["0", "1"]
    assert sum(done.summary.episodes for done in ended) == GROUPS * SAMPLES
    assert leases.counts.done == GROUPS
    assert rows(folder) == await alone(spec_of(tmp_path, tiny_tokenizer_dir, drivers=1), header, tmp_path / "alone")
    groups = [{episode.rpartition("/")[0] for episode in rows(folder / "drivers" / name)} for name in ("0", "1")]
    assert not groups[0] & groups[1]  # a group stays on one driver


async def test_a_run_that_was_stopped_goes_on_with_another_number_of_drivers(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    loaded = spec_of(tmp_path, tiny_tokenizer_dir)
    header = RunHeader.of(loaded)
    folder = tmp_path / "many"
    folder.mkdir()
    leases = Leases(folder / "leases.db", GROUPS)
    setup = setup_of(loaded, header, folder)
    await asyncio.gather(*(run_driver(setup, slot, Here(leases, stop_at=1)) for slot in range(2)))
    assert 1 <= leases.counts.done < GROUPS
    leases.restart(1, [])
    again = setup_of(spec_of(tmp_path, tiny_tokenizer_dir, drivers=1), header, folder)
    done = await run_driver(again, 0, Here(leases))
    assert leases.counts.done == GROUPS
    assert done.stopped is None
    # an episode of a group that was cut off may be in both stores: readers count it once
    ids = {f"t{at}/{sample}" for at in range(GROUPS) for sample in range(SAMPLES)}
    assert rows(folder, once=False).keys() == ids


async def test_a_lost_host_whose_shards_are_left_is_counted_and_an_episode_in_two_stores_once(
    tmp_path: Path, tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPISODE_ENGINE_CACHE", str(tmp_path / "cache"))
    loaded = spec_of(tmp_path, tiny_tokenizer_dir)
    header, tasks = RunHeader.of(loaded), load_tasks(loaded)
    with RunStore.create(tmp_path, header, name="many") as store:
        place = create_shards(store.folder, header, str(tmp_path / "published"))
    leases = Leases(store.folder / "leases.db", GROUPS)
    setup = replace(setup_of(loaded, header, store.folder), shards=place)
    here = Here(leases)
    ended = await asyncio.gather(*(run_driver(setup, slot, here) for slot in range(2)))
    assert all(done.summary.episodes for done in ended)
    whole = result_of(store.folder, loaded, tasks, ended, stopped=False).summary
    assert whole.episodes == whole.outcomes.total() == GROUPS * SAMPLES

    shutil.rmtree(store.folder / "drivers" / "1")
    assert result_of(store.folder, loaded, tasks, ended[:1], stopped=False).summary.outcomes == whole.outcomes
    leases.close()
    prepare_leases(store.folder, tasks, 2, SAMPLES)
    again = Leases(store.folder / "leases.db", GROUPS)
    assert again.counts.done == GROUPS  # its groups are not run again

    taken = Leases(tmp_path / "others.db", GROUPS)
    twice = await asyncio.gather(run_driver(replace(setup, drivers=3), 2, Here(taken)))
    assert twice[0].summary.episodes == GROUPS * SAMPLES
    assert (
        result_of(store.folder, loaded, tasks, [*ended[:1], *twice], stopped=False).summary.episodes == GROUPS * SAMPLES
    )


async def test_a_group_whose_rows_are_gone_is_free_after_a_resume(
    tmp_path: Path, tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPISODE_ENGINE_CACHE", str(tmp_path / "cache"))
    loaded = spec_of(tmp_path, tiny_tokenizer_dir)
    header, tasks = RunHeader.of(loaded), load_tasks(loaded)
    with RunStore.create(tmp_path, header, name="many") as store:
        create_shards(store.folder, header)
    leases = Leases(store.folder / "leases.db", GROUPS)
    setup, here = setup_of(loaded, header, store.folder), Here(leases)
    ended = await asyncio.gather(*(run_driver(setup, slot, here) for slot in range(2)))
    leases.close()
    shutil.rmtree(store.folder / "drivers" / "1")
    prepare_leases(store.folder, tasks, 2, SAMPLES)
    again = Leases(store.folder / "leases.db", GROUPS)
    assert again.counts.done == ended[0].summary.episodes // SAMPLES
    assert again.counts.free == ended[1].summary.episodes // SAMPLES


def test_parts_of_the_places_add_up_and_none_is_empty() -> None:
    assert [share_of(10, 4, slot) for slot in range(4)] == [3, 3, 2, 2]
    assert [share_of(2, 4, slot) for slot in range(4)] == [1, 1, 1, 1]


def test_a_driver_has_its_part_of_concurrency_and_of_live_episodes(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    rollout = of_driver(spec_of(tmp_path, tiny_tokenizer_dir), 3, 0).spec.rollout
    assert (rollout.concurrency, rollout.live_episodes) == (2, 3)


async def test_a_feed_reports_a_group_after_its_rows_are_published(tmp_path: Path) -> None:
    tasks = [Task(id="a", index=0, fields={}), Task(id="b", index=1, fields={})]
    told: list[tuple[str, Any]] = []

    async def call(number: int, wanted: int, done: Sequence[int], faulty: Sequence[int]) -> LeaseAnswer:
        told.append(("call", (list(done), list(faulty))))
        return (
            LeaseAnswer(word="run", leases=((0, 2), (1, 0)))
            if number == 1
            else LeaseAnswer(word="over" if done else "run")
        )

    def publish(task_ids: list[str]) -> None:
        told.append(("publish", task_ids))

    feed = Feed(call, tasks, 1, room=2, finished={"b/0"}, publish=publish)
    serving = asyncio.create_task(feed.serve())
    assert await feed.next() == (tasks[0], 0, 2000)  # a second lease: its attempts begin at 2000
    feed.ended(tasks[0], 0, finished=True)
    assert await feed.next() is None
    await serving
    assert told[0] == ("call", ([], []))
    assert ("publish", ["b", "a"]) in told
    assert told.index(("publish", ["b", "a"])) < told.index(("call", ([1, 0], [])))


async def test_what_one_driver_finds_wrong_with_the_template_all_are_told(
    tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    (tmp_path / "coordinator").mkdir()
    coordinator = Coordinator(str(tmp_path / "coordinator"), GROUPS, 60.0, shared=False)
    answers = []
    for slot, whole in ((0, None), (1, "why"), (0, None)):
        await coordinator.join(slot, machine_id(), [])
        report = {"incarnation": str(slot), "whole": whole}
        answers.append((await coordinator.call(slot, 1, 0, [], [], report))[2])
    assert answers == [None, "why", "why"]

    loaded = spec_of(tmp_path, tiny_tokenizer_dir)
    folder = tmp_path / "many"
    folder.mkdir()
    here = Here(Leases(folder / "leases.db", GROUPS), whole="why")
    setup = setup_of(loaded, RunHeader.of(loaded), folder)
    await asyncio.gather(*(run_driver(setup, slot, here) for slot in range(2)))
    assert [read_reason(folder / "drivers" / store / FILE) for store in "01"] == ["why", "why"]
    assert {report["whole"] for report in here.reports.values()} == {"why"}
