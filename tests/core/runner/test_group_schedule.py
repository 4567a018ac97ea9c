"""Which groups are begun when, and which of them train: whatever they earn and however long they take."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EngineError, StoreError, TrainError
from engine.runner.batch import Batch, Group
from engine.runner.groups import GroupRequest, GroupRunner, GroupSchedule
from engine.runner.task_order import TaskOrder
from engine.schemas.credit import read_credit
from engine.schemas.environment import Task
from engine.schemas.episode import EpisodeSpec
from engine.schemas.generation import FinishReason
from engine.schemas.reward import Posting
from engine.schemas.train import TrainSpec
from engine.schemas.trajectory import Branch, Failure, Outcome, Span, Trajectory, Turn
from engine.storable import words_of
from engine.train.batches import GroupBuilder
from engine.train.loss_columns import whitened_advantages

TASKS = [Task(id=f"t{number}", index=number, fields={}) for number in range(5)]


def make_trajectory(
    task: Task, sample: int, reward: float, *, version: int = 0, failure: Failure | None = None
) -> Trajectory:
    """One turn of two sampled tokens after a prompt of three."""
    branch = Branch.read(
        {
            "index": 0,
            "spans": [Span(kind="prompt", start=0, end=3), Span(kind="generated", start=3, end=5, turn=0)],
            "input_ids": [1, 2, 3, 4, 5],
            "loss_mask": [0, 0, 0, 1, 1],
            "logprobs": [0, 0, 0, -1, -2],
            "weight_versions": [-1, -1, -1, version, version],
            "turn_ids": [-1, -1, -1, 0, 0],
        }
    )
    postings = [Posting(seq=0, turn=0, name="right", delta=reward, after=reward, at_turn=0, op="add")]
    turn = Turn(
        index=0, branch=0, start=3, end=5, finish=FinishReason(type="stop"), event="answered", rewards={"right": reward}
    )
    outcome = Outcome(
        state="DONE", event="answered", reward=reward, rewards={"right": reward}, failure=failure,
        trainable=failure is None or failure.blame == "policy", solved=reward > 0.5,
    )  # fmt: skip
    return Trajectory(
        run_id="r", episode_id=f"{task.id}/{sample}", task_id=task.id, sample_index=sample, seed=0, history="branch",
        outcome=outcome, messages=[], turns=[turn], branches=[branch], postings=postings,
        counts={"sampled_tokens": 2},
    )  # fmt: skip


class FakeRunner:
    """Stands where the runner stands: says what each episode earns and how many ticks of the loop it takes."""

    def __init__(self, rewards: Any, ticks: Any) -> None:
        self.rewards = rewards
        self.ticks = ticks
        self.version = 0
        self.max_live_episodes = 0
        self.most_alive = 0
        self.begun: list[str] = []
        self.faults: list[str] = []
        self.cancelled: list[str] = []

    async def episode(self, task: Task, sample: int, attempt: int = 0) -> Trajectory | None:
        try:
            return await self._trajectory(task, sample)
        except EngineError:
            raise
        except RuntimeError as error:
            self.faults.append(f"{task.id}/{sample}: {words_of(error)}")
            return None

    def count(self, trajectory: Trajectory) -> None:
        """Nothing depends on it."""

    async def _trajectory(self, task: Task, sample: int) -> Trajectory:
        self.begun.append(f"{task.id}/{sample}")
        version = self.version
        self.max_live_episodes += 1
        self.most_alive = max(self.most_alive, self.max_live_episodes)
        try:
            for _ in range(self.ticks(task.id, sample)):
                await asyncio.sleep(0)
            reward = self.rewards(task.id, sample)
            if isinstance(reward, BaseException):
                raise reward
            if isinstance(reward, Failure):
                return make_trajectory(task, sample, 0.0, version=version, failure=reward)
            return make_trajectory(task, sample, reward, version=version)
        except asyncio.CancelledError:
            self.cancelled.append(f"{task.id}/{sample}")
            raise
        finally:
            self.max_live_episodes -= 1


def spec_of(**train: Any) -> tuple[EpisodeSpec, TrainSpec]:
    wanted = TrainSpec.model_validate({"tasks_per_step": 2, "shuffle": False} | train)
    return EpisodeSpec.model_validate(
        {"spec": "episode/v1", "name": "x", "model": {"path": "org/m"}, "tasks": {"source": "inline", "rows": []}}
    ), wanted


def schedule_of(
    fake: FakeRunner, *, samples: int = 2, max_live_episodes: int = 100, batches: int | None = None, **train: Any
) -> GroupSchedule:
    spec, wanted = spec_of(**train)
    order = TaskOrder(TASKS, shuffle=wanted.shuffle, seed=wanted.seed)
    return GroupSchedule(
        GroupRunner(fake, GroupBuilder(spec, wanted, None).group, asyncio.Semaphore(max_live_episodes)),
        order,
        wanted,
        samples=samples,
        max_live_episodes=max_live_episodes,
        batches=batches,
    )


def ids(groups: Sequence[Group]) -> list[str]:
    return [group.task_id for group in groups]


def differing(task: str, sample: int) -> float:
    return float(sample % 2)


async def steps(fake: FakeRunner, schedule: GroupSchedule, count: int) -> list[Batch]:
    batches = []
    for _ in range(count):
        batch = await schedule.batch()
        batches.append(batch)
        await asyncio.sleep(0)  # what learning gives others the time for
        fake.version += 1
        schedule.trained(fake.version)
    await schedule.close()
    return batches


async def test_synchronous_steps_take_the_tasks_in_order_and_sample_nothing_ahead() -> None:
    fake = FakeRunner(differing, lambda task, sample: 1)
    schedule = schedule_of(fake)
    first = await schedule.batch()
    assert ids(first.used) == ["t0", "t1"]
    for _ in range(20):
        await asyncio.sleep(0)
    assert fake.begun == ["t0/0", "t0/1", "t1/0", "t1/1"]  # nothing until the weights are new
    schedule.trained(1)
    second, third = await schedule.batch(), None
    schedule.trained(2)
    third = await schedule.batch()
    assert (ids(second.used), ids(third.used)) == (["t2", "t3"], ["t4", "t0~1"])


async def test_groups_that_teach_nothing_are_left_out_and_others_take_their_place() -> None:
    fake = FakeRunner(lambda task, sample: 1.0 if task in ("t0", "t2") else float(sample), lambda task, sample: 1)
    batch = await schedule_of(fake).batch()
    assert ids(batch.used) == ["t1", "t3"]
    assert ids(batch.left_out) == ["t0", "t2"]
    told = batch.metrics()
    assert told["reward/mean"] == (4 * 1.0 + 2 * 1.0) / 8  # those left out count in what the policy earns
    assert (told["groups/used"], told["groups/equal"], told["tokens/trained"]) == (2.0, 2.0, 8.0)


async def test_kept_where_the_spec_says_so() -> None:
    batch = await schedule_of(FakeRunner(lambda task, sample: 1.0, lambda *_: 1), dynamic_sampling=False).batch()
    assert ids(batch.used) == ["t0", "t1"]
    assert [row.on_tokens(row.advantages).tolist() for row in batch.rows] == [[0.0] * 5] * 4


@pytest.mark.parametrize("dynamic_sampling", [True, False])
async def test_groups_without_advantage_are_counted_whether_they_are_kept_or_not(dynamic_sampling: bool) -> None:
    """t0 and t2 are equal; with dynamic sampling others take their place."""
    fake = FakeRunner(lambda task, sample: 1.0 if task in ("t0", "t2") else float(sample), lambda *_: 1)
    batch = await schedule_of(fake, dynamic_sampling=dynamic_sampling, tasks_per_step=3, max_sampling_rounds=2).batch()
    told = batch.metrics()
    wanted = (3.0, 2.0, 5.0) if dynamic_sampling else (3.0, 2.0, 3.0)
    assert (told["groups/used"], told["groups/equal"], told["groups/sampled"]) == wanted


CRASH = Failure(kind="env_error", message="x", blame="environment")
LAST_ONLY = {"t0": 3, "t2": 2, "t3": 0}
"""How many of four episodes fail in which group: t0 keeps one, t2 keeps two."""


def failing(task: str, sample: int) -> float | Failure:
    return CRASH if sample < LAST_ONLY.get(task, 0) else float(sample)


@pytest.mark.parametrize(
    ("train", "credit", "left_out"),
    [
        ({}, {}, ["t0"]),
        ({"dynamic_sampling": False}, {}, ["t0"]),
        ({}, {"method": "outcome", "baseline": "mean", "scale": "std"}, ["t0"]),
        ({"min_group": 3}, {}, ["t0", "t2"]),
        ({"min_group": 1}, {}, []),
        # without a baseline an episode needs no others
        ({}, {"method": "outcome", "baseline": "none"}, []),
    ],
    ids=str,
)
async def test_a_group_that_failures_left_too_small_for_a_baseline_does_not_train(
    train: dict[str, Any], credit: dict[str, Any], left_out: list[str]
) -> None:
    runner: Any = FakeRunner(failing, lambda *_: 1)
    spec, wanted = spec_of(**train)
    rewards = spec.rewards.model_copy(update={"credit": read_credit(credit)})
    rows = GroupBuilder(spec.model_copy(update={"rewards": rewards}), wanted, None)
    order = TaskOrder(TASKS, shuffle=False, seed=0)
    groups = GroupRunner(runner, rows.group, asyncio.Semaphore(100))
    batch = await GroupSchedule(groups, order, wanted, samples=4, max_live_episodes=100).batch()
    assert ids(batch.left_out) == left_out
    assert batch.metrics()["groups/small"] == len(left_out)
    assert batch.metrics()["groups/equal"] == 0.0
    if credit.get("baseline") != "none" and wanted.min_group != 1:  # no advantage is a raw return
        for group in batch.used:
            assert sum(row.advantages.sum() for row in group.rows) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("credit", [{}, {"method": "outcome", "baseline": "mean"}])
async def test_groups_of_one_by_the_spec_train(credit: dict[str, Any]) -> None:
    spec, wanted = spec_of(dynamic_sampling=False)
    rewards = spec.rewards.model_copy(update={"credit": read_credit(credit)})
    builder = GroupBuilder(spec.model_copy(update={"rewards": rewards}), wanted, None)
    request = GroupRequest(number=0, task=TASKS[0], samples=1, version=0)
    group = builder.group(request, [make_trajectory(TASKS[0], 0, 1.0)])
    assert (len(group.rows), group.small) == (1, False)


async def test_a_batch_of_groups_that_are_too_small_says_so() -> None:
    fake = FakeRunner(lambda task, sample: CRASH if sample else 1.0, lambda *_: 1)
    batch = await schedule_of(fake, max_sampling_rounds=1).batch()
    assert (batch.used, batch.metrics()["groups/small"]) == ([], 2.0)
    said = "no episode of 2 groups can be trained on: solved 2, failed: env_error (environment) 2; the first failure: x; 2 groups have fewer trainable episodes than `train.min_group`"
    assert said in str(batch.no_data([]))


async def test_refilling_has_an_end() -> None:
    fake = FakeRunner(lambda task, sample: 1.0, lambda task, sample: 1)
    batch = await schedule_of(fake, max_sampling_rounds=3).batch()
    assert (batch.used, len(batch.left_out)) == ([], 6)


async def test_what_is_under_way_when_refilling_ends_does_not_train_a_version_later() -> None:
    fake = FakeRunner(
        lambda task, sample: float(sample) if task in ("t4", "t0~1", "t1~1") else 1.0,
        lambda task, sample: {"t3": 20, "t4": 40}.get(task, 1),
    )
    first, second = await steps(fake, schedule_of(fake, max_sampling_rounds=2), 2)
    assert (ids(first.used), ids(first.left_out), first.cancelled) == ([], ["t0", "t1", "t2", "t3"], [4])
    assert fake.cancelled == ["t4/0", "t4/1"]
    assert ids(second.used) == ["t0~1", "t1~1"]


async def test_what_is_no_fault_of_the_policys_never_trains() -> None:
    broken = Failure(kind="tool_timeout", blame="tool", message="no")
    fake = FakeRunner(lambda task, sample: broken if sample == 0 else float(sample == 1), lambda *_: 1)
    batch = await schedule_of(fake, samples=3).batch()
    assert sorted({row.episode.episode_id for row in batch.rows}) == ["t0/1", "t0/2", "t1/1", "t1/2"]
    assert batch.metrics()["episodes/masked"] == 2.0
    # the two others are each other's baseline: the broken one has no part in it
    assert [row.on_tokens(row.advantages)[3] > 0 for row in batch.rows] == [True, False, True, False]


async def test_the_engines_own_fault_stops_no_other_and_the_stores_stops_all() -> None:
    fake = FakeRunner(lambda task, sample: RuntimeError("boom") if sample == 0 else float(sample == 1), lambda *_: 1)
    schedule = schedule_of(fake, samples=3)
    batch = await schedule.batch()
    assert len(batch.rows) == 4
    assert fake.faults == ["t0/0: RuntimeError: boom", "t1/0: RuntimeError: boom"]
    full = schedule_of(FakeRunner(lambda *_: StoreError("disk full"), lambda *_: 1))
    with pytest.raises(StoreError, match="disk full"):
        await full.batch()
    await full.close()


async def test_over_sampling_takes_who_is_ready_and_cancels_stragglers() -> None:
    fake = FakeRunner(differing, lambda task, sample: 1000 if task == "t0" else 1)
    schedule = schedule_of(fake, asynchrony={"oversample": 1.5})
    batch = await schedule.batch()
    assert ids(batch.used) == ["t1", "t2"]
    assert batch.cancelled == [0]
    assert sorted(fake.cancelled) == ["t0/0", "t0/1"]
    await schedule.close()


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("batches", [1, 2, 5])
async def test_near_the_end_no_group_begins_that_no_step_would_use(staleness: int, batches: int) -> None:
    fake = FakeRunner(differing, lambda task, sample: 3)
    schedule = schedule_of(fake, asynchrony={"max_staleness": staleness}, batches=batches)
    found = await steps(fake, schedule, batches)
    for _ in range(20):
        await asyncio.sleep(0)
    await schedule.close()
    assert sum(len(batch.used) for batch in found) == 2 * batches
    assert len(fake.begun) == 2 * 2 * batches
    assert fake.cancelled == []


async def test_no_more_episodes_are_alive_than_may_be() -> None:
    fake = FakeRunner(differing, lambda task, sample: 3 + sample)
    batches = await steps(fake, schedule_of(fake, samples=4, max_live_episodes=5, tasks_per_step=4), 3)
    assert fake.most_alive == 5
    assert [len(batch.used) for batch in batches] == [4, 4, 4]


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 2**32), staleness=st.integers(0, 3), wanted=st.integers(1, 4), equal=st.sampled_from([0.0, 0.3]),
    max_live_episodes=st.integers(1, 30), over=st.sampled_from([1.0, 1.5]),
)  # fmt: skip
def test_no_token_that_trains_is_older_than_it_may_be(
    seed: int, staleness: int, wanted: int, equal: float, max_live_episodes: int, over: float
) -> None:
    def ticks(task: str, sample: int) -> int:
        return random.Random(f"{seed}/{task}/{sample}").choice([0, 1, 2, 5, 40])

    def rewards(task: str, sample: int) -> float:
        return 1.0 if random.Random(f"{seed}/{task}").random() < equal else float(sample)

    fake = FakeRunner(rewards, ticks)
    schedule = schedule_of(
        fake, max_live_episodes=max_live_episodes, tasks_per_step=wanted, max_sampling_rounds=8,
        asynchrony={"max_staleness": staleness, "oversample": over},
    )  # fmt: skip
    batches = asyncio.run(steps(fake, schedule, 8))
    seen = [group.task_id for batch in batches for group in batch.used]
    assert len(seen) == len(set(seen))  # no group trains twice
    for batch in batches:
        assert len(batch.used) == wanted or len(batch.used) + len(batch.left_out) >= 8 * wanted
        assert 0.0 <= batch.metrics()["staleness/max"] <= staleness
    if over == 1.0:
        numbers = [group.number for batch in batches for group in [*batch.used, *batch.left_out]]
        assert sorted(numbers) == list(range(len(numbers)))  # in the order of their beginning, none passed over


async def test_asynchronous_rollouts_go_on_while_the_trainer_steps() -> None:
    fake = FakeRunner(differing, lambda task, sample: 1)
    schedule = schedule_of(fake, asynchrony={"max_staleness": 1})
    await schedule.batch()
    for _ in range(20):
        await asyncio.sleep(0)
    # (1 + 0 + 1) * 2 groups in all, and no more until the version rises
    assert [name.partition("/")[0] for name in fake.begun[::2]] == ["t0", "t1", "t2", "t3"]
    fake.version = 1
    schedule.trained(1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(fake.begun) == 12
    batch = await schedule.batch()
    assert (ids(batch.used), batch.metrics()["staleness/max"]) == (["t2", "t3"], 1.0)
    await schedule.close()


def test_each_time_round_is_another_order_and_the_same_for_a_seed() -> None:
    one, same, other = (TaskOrder(TASKS, shuffle=True, seed=seed) for seed in (3, 3, 4))
    first = [one[number].id for number in range(15)]
    assert first == [same[number].id for number in range(15)]
    assert same[7].id == first[7]  # any of them, without those before it
    assert first != [other[number].id for number in range(15)]
    rounds = [sorted(name.partition("~")[0] for name in first[at : at + 5]) for at in (0, 5, 10)]
    assert rounds == [["t0", "t1", "t2", "t3", "t4"]] * 3
    assert [name.partition("~")[2] for name in first] == [""] * 5 + ["1"] * 5 + ["2"] * 5
    with pytest.raises(TrainError, match="no tasks"):
        TaskOrder([], shuffle=False, seed=0)


def doubled(row: dict[str, Any], scale: float) -> np.ndarray:
    """A bonus: by place."""
    return np.arange(len(row["input_ids"])) * scale


def nothing(row: dict[str, Any]) -> list[float]:
    """A bonus of a wrong length."""
    return [1.0]


def test_bonuses_are_added_to_sampled_tokens_alone() -> None:
    spec, wanted = spec_of(
        advantage_bonuses=[{"use": f"{__name__}:doubled", "with": {"scale": 0.5}, "coefficient": 2.0}]
    )
    group = [make_trajectory(TASKS[0], sample, float(sample)) for sample in range(2)]
    plain = GroupBuilder(spec, spec_of()[1], None).rows(group)
    rows = GroupBuilder(spec, wanted, None).rows(group)
    added = [row.on_tokens(row.advantages - before.advantages) for row, before in zip(rows, plain, strict=True)]
    assert [each.tolist() for each in added] == [[0, 0, 0, 3, 4]] * 2
    with pytest.raises(TrainError, match=r"must return one finite number for each of the row's 5 tokens"):
        GroupBuilder(spec, spec_of(advantage_bonuses=[{"use": f"{__name__}:nothing"}])[1], None).rows(group)


def test_advantages_of_a_batch_to_mean_0_and_deviation_1() -> None:
    def whitened(*rows: list[float]) -> list[np.ndarray]:
        return whitened_advantages([np.array(of_row, np.float32) for of_row in rows])

    found = whitened([1, 3], [5])
    spread = (8 / 3) ** 0.5
    np.testing.assert_allclose(found[0], [-2 / spread, 0], atol=1e-6)
    np.testing.assert_allclose(found[1], [2 / spread], atol=1e-6)
    assert [each.tolist() for each in whitened([2, 2])] == [[0, 0]]
    assert whitened([])[0].tolist() == []


def test_staleness_is_counted_by_token() -> None:
    trajectory = make_trajectory(TASKS[0], 0, 1.0, version=3)
    other = make_trajectory(TASKS[0], 1, 0.0, version=4)
    spec, wanted = spec_of()
    rows = GroupBuilder(spec, wanted, None).rows([trajectory, other])
    rows[1].branch.weight_versions[4] = 5
    batch = Batch(5, [Group(0, "t0", 3, [trajectory, other], rows)])
    told = batch.metrics()
    assert (told["staleness/max"], told["staleness/mean"]) == (2.0, (2 + 2 + 1 + 0) / 4)
    assert (told["reward/right"], told["reward/turn/0"]) == (0.5, 0.5)
