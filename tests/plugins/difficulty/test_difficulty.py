"""The difficulty filter: tasks that are always or never solved are drawn less often, and there is always a next task."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_group_schedule import TASKS, FakeRunner, make_trajectory, spec_of
from test_surviving import EXACT, Killed, kill_at, lines, sampled, trained
from trainings import begin_training, policy_weights, resume_training

from engine.errors import SpecError
from engine.plugins.difficulty.draws import DifficultyFilter
from engine.plugins.difficulty.spec import DifficultySpec
from engine.runner.batch import Group
from engine.runner.groups import GroupRunner, GroupSchedule
from engine.runner.runner import Runner
from engine.runner.task_order import TaskOrder
from engine.spec.load import load_spec
from engine.train.batch_log import BatchLog, BatchRecord
from engine.train.batches import GroupBuilder
from engine.train.metrics import read_metrics


def filter_of(**spec: Any) -> DifficultyFilter:
    return DifficultyFilter(DifficultySpec(**spec), TaskOrder(TASKS, shuffle=False, seed=0), seed=0)


def test_the_rate_is_that_of_the_newest_episodes_over_epochs() -> None:
    found = filter_of(window=4, keep=0.0)
    found.add({"0": [2, 2]})
    assert found.rate(0) is None  # two of four episodes
    found.add({"5": [2, 2], "1": [0, 4], "2": [1, 4]})  # draw 5 is of task 0 in the second epoch
    assert [found.rate(index) for index in range(4)] == [1.0, 0.0, 0.25, None]
    assert [found.skips(number) for number in range(10, 15)] == [True, True, False, False, False]
    found.add({"10": [1, 2]})
    assert (found.rate(0), found.skips(15)) == (0.75, False)  # of draws 5 and 10
    assert found.metrics(5, 3, 1) == {
        "difficulty/skipped": 3.0,
        "difficulty/forced": 1.0,
        "difficulty/easy": 0.0,
        "difficulty/hard": 1.0,
        "difficulty/measured": 3.0,
    }


def test_bounds_and_what_counts_as_solved() -> None:
    found = filter_of(window=2, low=0.2, high=0.8, keep=0.0, solved_at=0.3)
    episodes = [make_trajectory(TASKS[0], sample, reward) for sample, reward in enumerate((0.3, 0.29, 1.0))]
    group = Group(number=0, task_id=TASKS[0].id, version=0, trajectories=episodes, rows=[], small=False)
    assert found.results([group]) == {"0": [2, 3]}
    assert filter_of().results([group]) == {"0": [1, 3]}
    found.add({"0": [9, 10], "1": [1, 10], "2": [5, 10]})
    assert [found.skips(number) for number in range(3)] == [True, True, False]


def test_a_part_of_the_draws_is_made_all_the_same() -> None:
    found = filter_of(window=1, keep=0.25)
    found.add({"0": [1, 1]})
    draws = range(0, 5 * 4000, 5)
    made = sum(not found.skips(number) for number in draws)
    assert 0.22 < made / 4000 < 0.28
    again = filter_of(window=1, keep=0.25)
    again.add({"0": [1, 1]})
    assert [again.skips(number) for number in draws] == [found.skips(number) for number in draws]


@pytest.mark.parametrize("keep", [0.0, 0.3])
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("solved", [(1, 1, 1, 1, 1), (0, 0.5, 1, 0.5, 0), (0, 0, 0, 0, 0.5)])
async def test_batches_are_full_and_every_draw_is_accounted_for(
    keep: float, staleness: int, solved: tuple[float, ...]
) -> None:
    """Tasks without a signal give way to those with one; where all are without, batches go on with them and say so."""
    spec, wanted = spec_of(dynamic_sampling=False, asynchrony={"max_staleness": staleness})
    order = TaskOrder(TASKS, shuffle=False, seed=0)
    found = DifficultyFilter(DifficultySpec(window=2, keep=keep), order, seed=1)
    fake: Any = FakeRunner(lambda task, sample: float(sample < 2 * solved[int(task[1])]), lambda task, sample: 1)
    groups = GroupRunner(fake, GroupBuilder(spec, wanted, None).group, asyncio.Semaphore(100))
    schedule = GroupSchedule(groups, order, wanted, samples=2, max_live_episodes=100, draws=found)
    seen: Counter[int] = Counter()
    tasks: list[str] = []
    forced = 0
    for step in range(12):
        batch = await schedule.batch()
        assert len(batch.used) == 2
        record = BatchRecord.of(batch, order, found.results([*batch.used, *batch.left_out]))
        seen.update(record.numbers)
        if step >= 6:
            tasks += [group.task_id.partition("~")[0] for group in batch.used]
            forced += batch.forced
        found.add(record.solved)
        fake.version += 1
        schedule.trained(fake.version)
    await schedule.close()
    assert set(seen.values()) == {1}
    mixed = {f"t{index}" for index, rate in enumerate(solved) if rate == 0.5}
    if not mixed:
        assert forced > 0 or keep > 0.0
    elif keep == 0.0:
        assert set(tasks) == mixed
        assert forced == 0
    else:
        assert sum(task in mixed for task in tasks) > len(tasks) * len(mixed) / len(TASKS)


@pytest.fixture
def filtered_spec(train_spec: Any) -> Any:
    def make() -> Path:
        backend = {"kind": "local", "dtype": "float32", "max_batch": 16, "deterministic": True}
        train = EXACT | {"steps": 6, "tasks_per_step": 2, "dynamic_sampling": False}
        train |= {"difficulty": {"window": 4, "low": 0.3, "keep": 0.2, "solved_at": 0.75}}
        return Path(train_spec(train=train, backend=backend))

    return make


@pytest.mark.slow  # by default: a killed training in test_surviving
@pytest.mark.parametrize("call", [27, *(pytest.param(call, marks=pytest.mark.exhaustive) for call in (17, 45))])
async def test_a_killed_training_skips_the_same_draws(
    call: int, filtered_spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = begin_training(filtered_spec(), tmp_path / "whole")
    await whole.run()
    skipped = [record.skipped for record in BatchLog(whole.folder).read()]
    assert sum(map(len, skipped)) > 2
    assert [line["difficulty/skipped"] for line in read_metrics(whole.folder)] == [float(len(each)) for each in skipped]
    parted = begin_training(filtered_spec(), tmp_path / "parted")
    with monkeypatch.context() as patch:
        kill_at(patch, Runner, "count", call, after=False)
        with pytest.raises(Killed):
            await parted.run()
    again = resume_training(parted.folder)
    assert (await again.run()).steps == 6
    assert [record.skipped for record in BatchLog(again.folder).read()] == skipped
    assert (lines(again), trained(again)) == (lines(whole), trained(whole))
    assert all(
        bool((policy_weights(again.folder)[name] == tensor).all())
        for name, tensor in policy_weights(whole.folder).items()
    )
    assert set(sampled(again).values()) == {1}


def test_bounds_that_leave_no_task_are_refused(train_spec: Any) -> None:
    with pytest.raises(SpecError, match=r"`low` \(0.5\) must be less than `high` \(0.5\)"):
        load_spec(train_spec(train={"difficulty": {"low": 0.5, "high": 0.5}}))
