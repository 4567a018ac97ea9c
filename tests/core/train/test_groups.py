"""Groups that are consumed, and batches of a training that is killed again and again, whatever its order of episodes."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import slow_but
from test_group_schedule import TASKS, FakeRunner, make_trajectory, spec_of

from engine.errors import StoreError
from engine.runner.batch import Batch
from engine.runner.groups import GroupRunner, GroupSchedule
from engine.runner.task_order import ConsumedGroups, TaskOrder
from engine.schemas.trajectory import Trajectory
from engine.train.batch_log import BatchLog, BatchRecord, to_repeat
from engine.train.batches import GroupBuilder


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 30), max_size=6), max_size=8))
def test_consumed_groups_are_a_set_of_numbers(batches: list[list[int]]) -> None:
    consumed, plain = ConsumedGroups(), set[int]()
    for numbers in batches:
        consumed.add(numbers)
        plain.update(numbers)
        assert [number in consumed for number in range(40)] == [number in plain for number in range(40)]
        assert consumed.next == min(set(range(40)) - plain)
        assert all(number > consumed.next for number in consumed.beyond)
    assert consumed.copy() == consumed


class Store:
    """The episodes that earlier launches finished, and the versions of those that were running: `StoredEpisodes` in memory."""

    def __init__(self) -> None:
        self.done: dict[str, Trajectory] = {}
        self.began_with: dict[str, int] = {}

    def finished(self, task_id: str, sample: int) -> Trajectory | None:
        return self.done.get(f"{task_id}/{sample}")

    def begun(self, task_id: str) -> dict[int, bool]:
        return {}

    def versions(self, task_id: str) -> tuple[int, int] | None:
        found = [version for name, version in self.began_with.items() if name.rpartition("/")[0] == task_id]
        return (min(found), max(found)) if found else None


class Killable(FakeRunner):
    """A runner whose episodes go on in the next launch with the version that their tokens began with."""

    def __init__(self, store: Store, rewards: Any, ticks: Any) -> None:
        super().__init__(rewards, ticks)
        self.store = store

    async def episode(self, task: Any, sample: int) -> Trajectory:
        name = f"{task.id}/{sample}"
        assert name not in self.store.done  # a finished episode is never run again
        version = self.store.began_with.setdefault(name, self.version)
        told = await super().episode(task, sample)
        self.store.done[name] = make_trajectory(task, sample, told.outcome.reward, version=version)
        return self.store.done[name]


@pytest.mark.parametrize("over", slow_but([1.0, 1.25, 1.5], 1.25))
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32), staleness=st.integers(0, 3), equal=st.sampled_from([0.0, 0.3]))
def test_no_group_trains_twice_and_none_is_lost_however_often_it_is_killed(
    over: float, seed: int, staleness: int, equal: float
) -> None:
    chance = random.Random(seed)
    store, consumed, trained = Store(), ConsumedGroups(), list[int]()
    accounted: set[int] = set()
    version = 0
    started = 0

    def rewards(task: str, sample: int) -> float:
        return 1.0 if random.Random(f"{seed}/{task}").random() < equal else float(sample)

    def ticks(task: str, sample: int) -> int:
        return random.Random(f"{seed}/{task}/{sample}").choice([0, 1, 2, 5, 40])

    async def launch(steps: int, lost: int) -> None:
        """Train `steps` steps, then run for `lost` more ticks of the loop and be killed."""
        nonlocal version, started
        spec, wanted = spec_of(
            tasks_per_step=4, max_sampling_rounds=8, asynchrony={"max_staleness": staleness, "oversample": over}
        )
        fake: Any = Killable(store, rewards, ticks)
        fake.version = version
        schedule = GroupSchedule(
            GroupRunner(fake, GroupBuilder(spec, wanted, None).group, asyncio.Semaphore(100), store.finished),
            TaskOrder(TASKS, shuffle=False, seed=0),
            wanted,
            samples=2,
            max_live_episodes=100,
            version=version,
            consumed=consumed,
            stored=store,  # type: ignore[arg-type]
        )
        for _ in range(steps):
            batch: Batch = await schedule.batch()
            assert 0.0 <= batch.metrics()["staleness/max"] <= staleness
            trained.extend(group.number for group in batch.used)
            numbers = [group.number for group in [*batch.used, *batch.left_out]] + batch.cancelled + batch.stale
            assert not accounted & set(numbers)
            accounted.update(numbers)
            consumed.add(numbers)
            version += 1
            fake.version = version
            schedule.trained(version)
        last = asyncio.ensure_future(schedule.batch())
        for _ in range(lost):
            await asyncio.sleep(0)
        last.cancel()
        await asyncio.gather(last, return_exceptions=True)
        started = max(started, schedule._next)
        await schedule.close()

    for _ in range(6):
        asyncio.run(launch(chance.randint(0, 2), chance.randint(0, 60)))
    asyncio.run(launch(6, 0))
    assert len(trained) == len(set(trained))
    finished = {name.rpartition("/")[0] for name in store.done}
    order = TaskOrder(TASKS, shuffle=False, seed=0)
    waiting = {number for number in range(started) if number not in consumed}
    assert accounted | waiting == set(range(started))
    assert finished <= {order[number].id for number in accounted | waiting}


def record(step: int, **more: Any) -> BatchRecord:
    return BatchRecord(step, step, [step], [], [], {str(step): f"t{step}"}, **more)


def test_a_line_that_a_crash_cut_off_is_removed(tmp_path: Path) -> None:
    log = BatchLog(tmp_path)
    assert log.read() == []
    log.append(record(1))
    with (tmp_path / "batches.jsonl").open("a") as file:
        file.write('{"step": 2, "ver')
    assert log.read() == [record(1)]
    log.append(record(2))
    assert log.read() == [record(1), record(2)]
    (tmp_path / "batches.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(StoreError, match=r"batches\.jsonl:1 is damaged"):
        log.read()


def test_steps_after_a_checkpoint_are_repeated_up_to_a_gap() -> None:
    records = [record(1), record(2), record(2, step_made=False), record(3), record(5)]
    assert [each.step for each in to_repeat(records, 0)] == [1, 2, 3]
    assert [each.step for each in to_repeat(records, 2)] == [3]
    assert to_repeat(records, 3) == []
