"""A training that ends anywhere and is resumed is the training that never ended: nothing is sampled, trained or lost twice."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import code_for_training as spec_code
import numpy as np
import pytest
from journals import write_entries
from safetensors.torch import load_file
from slow_cases import slow_but
from trainings import begin_training, policy_weights, resume_training

from engine.errors import FailingError, OutageError, StoreError, TrainError
from engine.runner.runner import Runner
from engine.schemas.journal import GenerationRecord
from engine.store import RunStore
from engine.store.header import RunHeader
from engine.train import trainer as trainer_module
from engine.train.batch_log import BatchLog
from engine.train.checkpoint import checkpoints_of, read_checkpoint, write_checkpoint
from engine.train.episode_steps import StoredEpisodes
from engine.train.learner import Learner
from engine.train.metrics import MetricsLog, read_metrics
from engine.train.trainer import Trainer

SAME = ("step", "reward/mean", "episode/tokens", "tokens/trained", "staleness/max", "loss", "grad_norm", "lr")


class Killed(BaseException):
    """Ends a training as a kill does: nothing of the trainer catches it."""


def lines(trainer: Trainer) -> list[dict[str, Any]]:
    return [{name: line.get(name) for name in SAME} for line in read_metrics(trainer.folder)]


def sampled(trainer: Trainer) -> Counter[tuple[str, int]]:
    """How often each turn of each episode was sampled, over all attempts."""
    counts: Counter[tuple[str, int]] = Counter()
    with RunStore.open(trainer.folder / "rollouts", readonly=True) as store:
        for row in store.episodes():
            for attempt in range(row.attempt + 1):
                journal = store.journal(row.id, attempt)
                turns = [entry for entry in journal if isinstance(entry.record, GenerationRecord)]
                counts.update((row.id, number) for number in range(len(turns)))
    return counts


def trained(trainer: Trainer) -> list[int]:
    return [number for record in BatchLog(trainer.folder).read() for number in record.used]


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, *, after: bool) -> None:
    """End the training before or after the given call of a method, from 1."""
    true, calls = getattr(owner, name), []

    def method(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call and not after:
            raise Killed
        told = true(*args, **kwargs)
        if len(calls) == call:
            raise Killed
        return told

    monkeypatch.setattr(owner, name, method)


EXACT = {"checkpoints": {"every": 2, "keep": 2}, "rollout_correction": {"kind": "none"}, "minibatches": 2, "steps": 3}


@pytest.fixture
def exact_spec(train_spec: Any) -> Any:
    """Writes a spec whose training has the same bits each time."""

    def make(**changes: Any) -> Path:
        backend = {"kind": "local", "dtype": "float32", "max_batch": 16, "deterministic": True}
        return Path(train_spec(train=EXACT | changes, backend=backend))

    return make


PLACES = {
    "before the batch is logged": (BatchLog, "append", 3, False),
    "after the batch is logged": (BatchLog, "append", 3, True),
    "before the checkpoint": (trainer_module, "write_checkpoint", 1, False),
    "between checkpoint and metrics": (trainer_module, "write_checkpoint", 1, True),
    "after the metrics": (MetricsLog, "write", 2, True),
    "before the first update": (Learner, "step", 1, False),
    "in the middle of an episode": (spec_code.Listener, "respond", 21, False),
}


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Any]:
    """Result of the training without a kill, computed once."""
    return {}


@pytest.mark.slow  # by default: episodes that were running continue, below
@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=[pytest.mark.exhaustive] if at % 2 else []) for at, place in enumerate(PLACES)]
)
async def test_killed_anywhere_and_resumed_it_is_the_training_that_was_not_killed(
    place: str, exact_spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: dict[str, Any]
) -> None:
    if not uninterrupted:
        whole = begin_training(exact_spec(), tmp_path / "whole")
        await whole.run()
        uninterrupted |= {"lines": lines(whole), "policy": policy_weights(whole.folder), "trained": trained(whole)}
    parted = begin_training(exact_spec(), tmp_path / "parted")
    with monkeypatch.context() as patch:
        owner, name, call, after = PLACES[place]
        if owner is spec_code.Listener:  # other threads call it: end the main loop's wait for episodes instead
            name, owner = "count", Runner
            call = 3
        kill_at(patch, owner, name, call, after=after)
        with pytest.raises(Killed):
            await parted.run()
    again = resume_training(parted.folder)
    result = await again.run()
    assert result.steps == 3
    assert lines(again) == uninterrupted["lines"]
    assert trained(again) == uninterrupted["trained"]
    policy = policy_weights(again.folder)
    assert all(bool((policy[name] == tensor).all()) for name, tensor in uninterrupted["policy"].items())
    assert set(sampled(again).values()) == {1}
    assert not (again.folder / "metrics.cut.jsonl").exists()


async def test_episodes_that_were_running_continue_at_their_turn(
    train_spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = begin_training(train_spec(train={"steps": 1, "dynamic_sampling": False}), tmp_path / "runs")
    respond, waiting, killed = spec_code.Listener.respond, list[str](), threading.Event()

    def waits(self: Any, view: Any) -> Any:
        """Three episodes wait in their second turn; then others may end."""
        if view.turn == 1 and len(waiting) < 3:
            waiting.append(view.episode_id)
            killed.wait(60)
        while view.turn == 1 and len(waiting) < 3 and not killed.is_set():
            time.sleep(0.001)
        return respond(self, view)

    with monkeypatch.context() as patch:
        patch.setattr(spec_code.Listener, "respond", waits)
        kill_at(patch, Runner, "count", 1, after=False)  # at the first episode that ends
        with pytest.raises(Killed):
            await trainer.run()
        killed.set()
    with RunStore.open(trainer.folder / "rollouts", readonly=True) as store:
        before = {name: len(store.journal(name)) for name, status in store.statuses().items() if status == "running"}
    assert set(waiting) <= set(before)
    assert all(before[name] >= 3 for name in waiting)  # two turns and the first answer
    again = resume_training(trainer.folder)
    result = await again.run()
    (line,) = read_metrics(again.folder)
    assert line["rollout/resumed_episodes"] == result.resumed["rollout/resumed_episodes"] >= 3
    assert line["rollout/dropped_stale_groups"] == 0
    # at most the turn that was under way, of 6 tokens, is sampled again
    assert line["rollout/regenerated_tokens"] <= 6 * len(before)
    assert set(sampled(again).values()) == {1}
    assert line["episodes/count"] == 8


@pytest.mark.slow
async def test_a_group_older_than_the_staleness_limit_is_dropped_and_counted(
    train_spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = begin_training(train_spec(train={"steps": 4, "checkpoints": {"every": 1}}), tmp_path / "runs")
    with monkeypatch.context() as patch:
        kill_at(patch, Learner, "step", 3, after=False)  # groups 4 and 5 are sampled with version 2
        with pytest.raises(Killed):
            await trainer.run()
    (newest,) = checkpoints_of(trainer.folder)[-1:]
    state = json.loads((newest / "state.json").read_text())
    assert (state["step"], state["version"], state["groups"]) == (2, 2, {"next": 4, "beyond": []})
    state["version"] = 5  # as if three other updates had been made since
    (newest / "state.json").write_text(json.dumps(state))
    again = resume_training(trainer.folder)
    await again.run()
    told = [line["rollout/dropped_stale_groups"] for line in read_metrics(again.folder)]
    assert told == [0, 0, 2, 0]
    assert trained(again) == [0, 1, 2, 3, 6, 7, 8, 9]


ERRORS = {
    "outage": OutageError("no server replied"),
    "failing": FailingError("all failed", "cause"),
    "store": StoreError("the disk is full"),
    "engine": RuntimeError("boom"),
}


@pytest.mark.parametrize("name", slow_but(ERRORS, "outage"))
async def test_whatever_ends_a_training_its_last_state_is_saved_and_named(
    name: str, train_spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = begin_training(train_spec(train={"steps": 5, "checkpoints": {"every": 100}}), tmp_path / "runs")
    true = Runner.count

    def count(self: Runner, trajectory: Any) -> None:
        true(self, trajectory)
        if trainer.state.step == 2:
            raise ERRORS[name]

    monkeypatch.setattr(Runner, "count", count)
    with pytest.raises(type(ERRORS[name])) as caught:
        await trainer.run()
    (kept,) = checkpoints_of(trainer.folder)
    assert kept.name == "step-000002"
    assert str(kept) in str(caught.value)


@pytest.mark.slow
async def test_a_simulator_that_breaks_for_good_costs_no_step(
    train_spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = begin_training(train_spec(train={"steps": 5, "checkpoints": {"every": 100}}), tmp_path / "runs")
    respond = spec_code.Listener.respond

    def broken(self: Any, view: Any) -> Any:
        if trainer.state.step == 2:
            raise RuntimeError("the simulator is down")
        return respond(self, view)

    with monkeypatch.context() as patch:
        patch.setattr(spec_code.Listener, "respond", broken)
        with pytest.raises(TrainError, match="no episode of 8 groups can be trained on") as caught:
            await trainer.run()
    assert caught.value.kind == "no_data"
    (kept,) = checkpoints_of(trainer.folder)
    assert kept.name == "step-000002"
    assert str(kept) in str(caught.value)
    again = resume_training(trainer.folder)
    result = await again.run()  # the groups that failed are not used again
    assert result.steps == 5
    assert not set(range(4, 12)) & set(trained(again))
    assert len(set(trained(again))) == 10


@pytest.mark.slow  # by default: a training that diverges in test_training
@pytest.mark.parametrize("several", ["minibatches", "update_epochs"])
async def test_the_updates_before_one_that_diverges_are_saved(
    several: str, train_spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = {"steps": 4, "checkpoints": {"every": 100}, several: 2}
    trainer = begin_training(train_spec(train=train), tmp_path / "runs")
    from engine.train import learner

    true: Any = vars(learner)["objective"]
    calls: list[int] = []

    def spoilt(*args: Any) -> Any:
        loss, metrics = true(*args)
        calls.append(1)
        return (loss * float("nan") if len(calls) == 6 else loss), metrics  # the second update of step 3

    with monkeypatch.context() as patch:
        patch.setattr(learner, "objective", spoilt)
        with pytest.raises(TrainError, match="the update was not applied") as caught:
            await trainer.run()
    (kept,) = checkpoints_of(trainer.folder)
    assert kept.name == "step-000003"  # step 3 counts, with one update
    assert str(kept) in str(caught.value)
    assert all(
        bool(tensor.isfinite().all())
        for tensor in load_file(kept / "policy/shard-00001-model-00001-of-00001.safetensors").values()
    )
    assert BatchLog(trainer.folder).read()[-1].updates == 1
    again = resume_training(trainer.folder)
    assert (await again.run()).steps == 4
    assert [line["updates"] for line in read_metrics(again.folder)] == [2, 2, 1, 2]
    assert trained(again) == list(range(8))


async def test_no_checkpoint_has_a_value_that_is_not_finite(train_spec: Any, tmp_path: Path) -> None:
    trainer = begin_training(train_spec(train={"steps": 1}), tmp_path / "runs")
    await trainer.run()
    (kept,) = checkpoints_of(trainer.folder)
    next(iter(trainer.learner.policy.net.model.parameters())).data[0] = float("inf")
    trainer.state.step = 2
    with pytest.raises(TrainError, match="has values that are not finite") as caught:
        write_checkpoint(trainer.folder, 1, trainer.state, trainer.learner)
    assert caught.value.kind == "diverged"
    assert [path.name for path in (trainer.folder / "checkpoints").iterdir()] == [kept.name]


OTHER_PARTS = [
    (
        {"parts": {"policy": 1, "optimizer": 1, "critic": 1}},
        "its part `critic` has version 1, and this training needs no",
    ),
    ({"parts": {"policy": 1}}, r"its part `optimizer` has version \(missing\), and this training needs version 1"),
    ({"format": 4}, "its format is 4; this engine reads format 3"),
]


async def test_a_checkpoint_with_other_parts_is_refused_by_name(train_spec: Any, tmp_path: Path) -> None:
    trainer = begin_training(train_spec(train={"steps": 1}), tmp_path / "runs")
    await trainer.run()
    (kept,) = checkpoints_of(trainer.folder)
    state = json.loads((kept / "state.json").read_text())
    for change, message in OTHER_PARTS:
        (kept / "state.json").write_text(json.dumps(state | change))
        with pytest.raises(TrainError, match=message):
            read_checkpoint(kept, trainer.learner)
    (kept / "state.json").write_text(json.dumps(state))
    assert read_checkpoint(kept, trainer.learner) == trainer.state


async def test_tasks_that_have_changed_are_refused(train_spec: Any, tmp_path: Path) -> None:
    trainer = begin_training(train_spec(train={"steps": 1}), tmp_path / "runs")
    await trainer.run()
    header = json.loads((trainer.folder / "train.json").read_text())
    header["spec"]["tasks"]["rows"].insert(0, {"id": "new", "say": "word"})
    (trainer.folder / "train.json").write_text(json.dumps(header))
    with pytest.raises(TrainError, match="the tasks have changed since this training began: group 0 was of task"):
        await resume_training(trainer.folder).run()


@pytest.mark.slow
async def test_steps_whose_episodes_are_gone_are_sampled_again(
    train_spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    trainer = begin_training(train_spec(train={"steps": 3, "checkpoints": {"every": 1, "keep": 9}}), tmp_path / "runs")
    await trainer.run()
    for kept in checkpoints_of(trainer.folder)[1:]:
        shutil.rmtree(kept)
    shutil.rmtree(trainer.folder / "rollouts")
    again = resume_training(trainer.folder)
    assert (await again.run()).steps == 3
    assert [line["step"] for line in read_metrics(again.folder)] == [1, 2, 3]
    assert [record.step for record in BatchLog(again.folder).read()] == [1, 2, 3]
    assert len((again.folder / "batches.cut.jsonl").read_text().splitlines()) == 2
    assert len((again.folder / "metrics.cut.jsonl").read_text().splitlines()) == 2


async def test_tokens_that_any_launch_sampled_again_are_counted(tmp_path: Path, maker_of_entries: Any) -> None:
    """Turns of 16 tokens: a first attempt with one turn, then another with a turn before and a turn in each of two launches."""
    task, header, entry = maker_of_entries
    store = RunStore.create(tmp_path, header)
    begun = await store.begin(task, 0)
    for seq in (0, 1):
        await write_entries(begun, entry(seq, at=time.time()))
    await begun.restart()
    await write_entries(begun, entry(0, at=time.time()))
    await write_entries(begun, entry(1, at=time.time()))
    store.close()
    for seq in (2, 4):  # first a tool's answer, in the next launch a turn
        store = RunStore.open(tmp_path / header.run_id)
        stored = StoredEpisodes(store, 1)
        assert stored.begun("t0")[0]
        begun = await store.begin(task, 0)
        for number in range(seq, seq + 2 if seq == 2 else seq + 1):
            await write_entries(begun, entry(number + (seq == 4), at=time.time(), seq=number))
        assert stored.regenerated_tokens("t0", 0) == (16 if seq == 2 else 16 + 16)
        store.close()


@pytest.fixture
def maker_of_entries() -> Any:
    """A task, the header of a run, and entries: a reset, then turns of 16 tokens at odd numbers and tool results at even ones."""
    from engine.schemas.environment import Reset, Task
    from engine.schemas.generation import FinishReason, Generation
    from engine.schemas.journal import JournalEntry, ResetRecord, ToolsRecord

    def entry(kind: int, *, at: float, seq: int | None = None) -> JournalEntry:
        generation = Generation(
            output_ids=np.arange(16, dtype=np.int32),
            logprobs=np.zeros(16, np.float32),
            finish=FinishReason(type="stop"),
        )
        record: Any = ToolsRecord(results=[]) if kind else ResetRecord(reset=Reset())
        if kind % 2:
            record = GenerationRecord(generation=generation)
        number = kind if seq is None else seq
        return JournalEntry(seq=number, state="A", event="b", dest="C", record=record, at=at, seconds=0.0)

    header = RunHeader(run_id="run", name="x", created=0.0, engine_version="1", spec={})
    return Task(id="t0", index=0, fields={}), header, entry
