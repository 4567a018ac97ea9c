"""Whole trainings of a tiny model: it gets better, stops, goes on, and says what is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import code_for_training as spec_code
import pytest
import yaml
from command_line import engine_apart, engine_environment, engine_process, trajectories_of
from msgspec.structs import force_setattr
from safetensors.torch import load_file
from trainings import begin_training, metric_lines, policy_weights
from typer.testing import CliRunner

from engine.cli.main import app
from engine.errors import FailingError, TrainError
from engine.runner.batch import Batch
from engine.runner.groups import GroupSchedule
from engine.store import RunStore
from engine.store import training as folders
from engine.store.rows.export import export_rows
from engine.train.checkpoint import checkpoints_of
from engine.train.trainer import Trainer

HERE = Path(spec_code.__file__).parent


def resume(trainer: Trainer, steps: int | None = None) -> Trainer:
    loaded = folders.read_header(trainer.folder).loaded_spec()
    if steps is not None:
        assert loaded.spec.train is not None
        train = loaded.spec.train.model_copy(update={"steps": steps})
        force_setattr(loaded, "spec", loaded.spec.model_copy(update={"train": train}))
    return Trainer(loaded, trainer.folder)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return set(one) == set(other) and all(bool((one[name] == other[name]).all()) for name in one)


@pytest.mark.slow
async def test_the_model_gets_better(train_spec: Any, tmp_path: Path) -> None:
    train = {"steps": 10, "tasks_per_step": 4, "optimizer": {"lr": 0.01}, "dynamic_sampling": False}
    trainer = begin_training(train_spec(train=train, rollout={"samples_per_task": 8}), tmp_path / "runs")
    result = await trainer.run()
    told = metric_lines(trainer.folder)
    assert [line["step"] for line in told] == list(range(1, 11))
    assert (result.steps, result.interrupted, result.faults) == (10, False, [])
    first, last = told[0], told[-1]
    # each of the two turns earns its own share of vowels
    assert first["reward/mean"] == pytest.approx(first["reward/turn/0"] + first["reward/turn/1"], rel=1e-6)
    assert last["reward/mean"] > first["reward/mean"] + 0.3
    for line in told:
        assert line["episodes/count"] == 32
        assert line["staleness/max"] == 0.0
        assert line["sampler/diff_max"] < 1e-4  # float32 on both sides: trainer and sampler are one model
        assert line["policy/ratio_max"] == pytest.approx(1.0, abs=1e-6)
        assert line["tokens/trained"] > 0
        assert {"time/rollout", "time/update", "time/sync", "loss", "grad_norm", "policy/entropy"} <= set(line)


@pytest.mark.slow
async def test_a_generous_limit_changes_no_loss_and_no_weight(train_spec: Any, tmp_path: Path) -> None:
    """Two trainings whose longest possible episodes differ by a factor of 1000; the second is stopped after a step and resumed."""
    train = {"rollout_correction": {"kind": "none"}, "minibatches": 2, "checkpoints": {"every": 1}}
    limits = {"turn_tokens": 6, "assistant_turns": 2}
    trainers = []
    for name, most in (("tight", 64), ("wide", 64_000)):
        spec = train_spec(name, train=train | {"steps": 3}, limits=limits | {"episode_tokens": most})
        trainers.append(begin_training(spec, tmp_path / name, f"train.steps={3 if name == 'tight' else 1}"))
        await trainers[-1].run()
    trainers[1] = resume(trainers[1], steps=3)
    await trainers[1].run()
    told = [
        [(line["loss"], line["grad_norm"], line["loss/length"]) for line in metric_lines(each.folder)]
        for each in trainers
    ]
    assert told[0] == told[1]
    assert {length for _, _, length in told[0]} == {told[0][0][2]}
    assert same(policy_weights(trainers[0].folder), policy_weights(trainers[1].folder))


@pytest.mark.slow
async def test_a_resumed_training_is_the_one_that_never_stopped(train_spec: Any, tmp_path: Path) -> None:
    # the sampler's own log-probs depend on who shares its batches, in the last digits; uncorrected, nothing learns of them
    train = {"checkpoints": {"every": 2, "keep": 5}, "rollout_correction": {"kind": "none"}, "minibatches": 2}
    whole = begin_training(train_spec(train=train | {"steps": 4}), tmp_path / "whole")
    await whole.run()
    parted = begin_training(train_spec(train=train | {"steps": 2}), tmp_path / "parted")
    await parted.run()
    again = resume(parted, steps=4)
    result = await again.run()
    assert result.steps == 4
    assert [path.name for path in checkpoints_of(whole.folder)] == ["step-000002", "step-000004"]
    assert same(policy_weights(whole.folder), policy_weights(again.folder))
    told = ("step", "reward/mean", "episode/tokens", "tokens/trained", "loss", "grad_norm", "policy/entropy", "lr")
    for one, other in zip(metric_lines(whole.folder), metric_lines(again.folder), strict=True):
        assert [one[name] for name in told] == [other[name] for name in told]


@pytest.mark.slow
async def test_penalties_in_the_reward_are_repeated_and_are_in_no_ledger(train_spec: Any, tmp_path: Path) -> None:
    """A step that is repeated from the batch log has the same loss to the bit; exported rows and scores are those of the rewards."""
    train = {
        "steps": 4, "checkpoints": {"every": 2, "keep": 5}, "rollout_correction": {"kind": "none"},
        "kl": {"coefficient": 0.5, "in": "reward"}, "optimizer": {"lr": 0.01},
    }  # fmt: skip
    backend = {"kind": "local", "dtype": "float32", "max_batch": 16, "deterministic": True}
    whole = begin_training(train_spec(name="whole", train=train, backend=backend), tmp_path / "whole")
    await whole.run()
    parted = begin_training(train_spec(name="parted", train=train | {"steps": 3}, backend=backend), tmp_path / "parted")
    await parted.run()
    (checkpoints_of(parted.folder)[-1] / "state.json").unlink()  # a kill before the checkpoint of step 3
    again = resume(parted, steps=4)
    assert (await again.run()).repeated_steps == 1
    assert same(policy_weights(whole.folder), policy_weights(again.folder))
    names = ("step", "loss", "grad_norm", "policy/kl_ref", "reward/mean")
    for one, other in zip(metric_lines(whole.folder), metric_lines(again.folder), strict=True):
        assert [one[name] for name in names] == [other[name] for name in names]
    assert metric_lines(whole.folder)[-1]["policy/kl_ref"] > 0
    plain = begin_training(
        train_spec(name="plain", train=train | {"steps": 1, "kl": {}}, backend=backend), tmp_path / "plain"
    )
    await plain.run()
    rows = []
    for trainer in (whole, plain):
        with RunStore.open(trainer.folder / "rollouts", readonly=True) as store:
            rows.append({row["episode_id"]: row for row in export_rows(store)})
    shared = rows[0].keys() & rows[1].keys()
    assert len(shared) == 8  # the first step's episodes: both trainings sample them with the same weights
    for episode in shared:
        assert rows[0][episode].keys() == rows[1][episode].keys()
        for column in ("input_ids", "advantages", "token_rewards", "turn_rewards"):
            assert rows[0][episode][column].tolist() == rows[1][episode][column].tolist()


async def test_stopped_in_the_middle_it_keeps_what_is_done(train_spec: Any, tmp_path: Path) -> None:
    trainer = begin_training(train_spec(train={"steps": 500}), tmp_path / "runs")
    stop = asyncio.Event()

    def told(step: int, values: Any) -> None:
        if step == 3:
            stop.set()

    trainer._on_step = told
    result = await trainer.run(stop=stop)
    assert result.interrupted
    assert result.steps >= 3
    assert result.checkpoint is not None
    assert json.loads((result.checkpoint / "state.json").read_text())["step"] == result.steps
    assert len(metric_lines(trainer.folder)) == result.steps


async def test_asynchronous_training_stays_within_its_staleness(
    train_spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each update waits until the groups under way have ended, so the weights that sample a group do not depend on its speed."""
    collect = GroupSchedule.batch

    async def settled(schedule: GroupSchedule) -> Batch:
        batch = await collect(schedule)
        await schedule.drain()
        return batch

    monkeypatch.setattr(GroupSchedule, "batch", settled)
    spec = train_spec(train={"steps": 6, "asynchrony": {"max_staleness": 2}, "dynamic_sampling": False})
    trainer = begin_training(spec, tmp_path / "runs")
    await trainer.run()
    assert [line["staleness/max"] for line in metric_lines(trainer.folder)] == [0, 1, 2, 2, 2, 2]
    versions: dict[str, set[int]] = {}
    for trajectory in trajectories_of(trainer.folder / "rollouts"):
        for branch in trajectory.branches:
            sampled = branch.weight_versions[branch.loss_mask == 1].tolist()
            versions.setdefault(trajectory.task_id, set()).update(sampled)
    # six groups begin at once, and two more after each update
    assert sorted(map(sorted, versions.values())) == [[0]] * 6 + [[1]] * 2 + [[2]] * 2 + [[3]] * 2


@pytest.mark.slow
async def test_the_best_checkpoint_by_evaluation_stays(train_spec: Any, tmp_path: Path) -> None:
    train = {
        "steps": 4, "checkpoints": {"every": 1, "keep": 1},
        "eval": {"every": 2, "samples": 2, "limit": 3, "sampling": {"temperature": 0.0}},
    }  # fmt: skip
    trainer = begin_training(train_spec(train=train), tmp_path / "runs")
    result = await trainer.run()
    told = metric_lines(trainer.folder)
    assert [line["step"] for line in told if "eval/reward" in line] == [0, 2, 4]
    assert result.best == max(line["eval/reward"] for line in told if line["step"] and "eval/reward" in line)
    kept = {path.name for path in checkpoints_of(trainer.folder)}
    assert kept == {"step-000004", f"step-{result.best_step:06d}"}
    with RunStore.open(trainer.folder / "evals" / "step-000002", readonly=True) as store:
        assert store.header.evaluation
        assert len(list(store.trajectories())) == 6


async def test_epochs_set_the_number_of_steps(train_spec: Any, tmp_path: Path) -> None:
    """Six tasks, two groups a step: an epoch is three steps, and the schedule knows its end."""
    train = {
        "epochs": 1.5,
        "tasks_per_step": 2,
        "dynamic_sampling": False,
        "optimizer": {"lr": 1e-3, "schedule": "linear"},
    }
    trainer = begin_training(train_spec(train=train), tmp_path / "runs")
    assert (await trainer.run()).steps == 5
    assert [line["lr"] for line in metric_lines(trainer.folder)] == pytest.approx(
        [1e-3 * (1 - step / 5) for step in range(5)]
    )
    with RunStore.open(trainer.folder / "rollouts", readonly=True) as store:
        tasks = [
            trajectory.task_id.partition("~")[0] for trajectory in store.trajectories() if trajectory.sample_index == 0
        ]
    assert sorted(set(tasks)) == [f"t{number}" for number in range(6)]
    assert len(tasks) == 10  # each task once, then four of them again


@pytest.mark.slow
async def test_several_evaluations_have_their_own_tasks_and_steps(train_spec: Any, tmp_path: Path) -> None:
    tasks = {"source": "inline", "rows": [{"id": "e0", "say": "another word"}], "id": "id"}
    sets = {"easy": {"tasks": tasks}, "hard": {"tasks": tasks, "every": 2, "samples": 2}}
    train = {"steps": 3, "eval": {"every": 3, "sets": sets, "best": "hard"}}
    trainer = begin_training(train_spec(train=train), tmp_path / "runs")
    result = await trainer.run()
    told = metric_lines(trainer.folder)
    for name, steps in (("easy", [0, 3]), ("hard", [0, 2, 3])):
        assert [line["step"] for line in told if f"eval/{name}/reward" in line] == steps
    assert "eval/reward" not in told[0]
    assert result.best == max(line["eval/hard/reward"] for line in told if line["step"] and "eval/hard/reward" in line)
    runs = sorted(path.name for path in (trainer.folder / "evals").iterdir())
    assert runs == ["step-000000-easy", "step-000000-hard", "step-000002-hard", "step-000003-easy", "step-000003-hard"]
    with RunStore.open(trainer.folder / "evals" / "step-000002-hard", readonly=True) as store:
        assert [trajectory.task_id for trajectory in store.trajectories()] == ["e0", "e0"]


async def test_equal_groups_teach_nothing_and_are_no_error(train_spec: Any, tmp_path: Path) -> None:
    spec = train_spec(train={"steps": 2, "max_sampling_rounds": 2}, user={"use": "code_for_training:Bored"})
    trainer = begin_training(spec, tmp_path / "runs")
    result = await trainer.run()
    assert result.steps == 2
    assert [(line["groups/used"], line["groups/equal"], "loss" in line) for line in metric_lines(trainer.folder)] == [
        (0, 4, False)
    ] * 2
    assert [(line["groups/sampled"], line["updates"]) for line in metric_lines(trainer.folder)] == [(4, 0)] * 2


async def test_nothing_but_failures_is_an_error_that_says_which(train_spec: Any, tmp_path: Path) -> None:
    trainer = begin_training(train_spec(user={"use": "code_for_training:Broken"}), tmp_path / "runs")
    with pytest.raises(
        FailingError, match=r"the first 16 finished episodes failed with one cause, user_error \(user\) at .*spec.yaml"
    ):
        await trainer.run()


async def test_divergence_stops_it_and_the_last_good_weights_are_kept(
    train_spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = begin_training(train_spec(train={"steps": 5}), tmp_path / "runs")
    from engine.train import learner

    true, calls = learner.objective, []

    def spoilt(spec: Any, tokens: Any) -> Any:
        loss, metrics = true(spec, tokens)
        calls.append(1)
        return (loss * float("nan") if len(calls) == 3 else loss), metrics

    monkeypatch.setattr(learner, "objective", spoilt)
    with pytest.raises(TrainError, match=r"the loss is nan .* the update was not applied") as caught:
        await trainer.run()
    assert caught.value.kind == "diverged"
    (kept,) = checkpoints_of(trainer.folder)
    assert kept.name == "step-000002"
    assert all(
        bool(tensor.isfinite().all())
        for tensor in load_file(kept / "policy/shard-00001-model-00001-of-00001.safetensors").values()
    )


@pytest.mark.slow  # by default: a training with LoRA in test_frozen_roles
async def test_adapters_train_too(train_spec: Any, tmp_path: Path) -> None:
    train = {
        "steps": 3,
        "lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        "kl": {"coefficient": 0.01},
    }
    trainer = begin_training(train_spec(train=train), tmp_path / "runs")
    result = await trainer.run()
    told = metric_lines(trainer.folder)
    assert told[0]["policy/kl_ref"] == pytest.approx(0.0, abs=1e-6)
    assert told[-1]["policy/kl_ref"] > 0
    assert all(line["sampler/diff_max"] < 1e-4 for line in told)
    assert result.checkpoint is not None
    assert (result.checkpoint / "adapter" / "adapter_config.json").is_file()
    assert not (result.checkpoint / "model").exists()


def test_without_a_section_it_says_what_to_write(train_spec: Any, tmp_path: Path) -> None:
    spec = train_spec()
    data = yaml.safe_load(spec.read_text())
    del data["train"]
    spec.write_text(yaml.safe_dump(data))
    found = CliRunner().invoke(app, ["train", str(spec), "--out", str(tmp_path / "runs")])
    assert found.exit_code == 1
    assert "no `train:` section; `train: {}` takes every default" in found.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_from_the_command_line_killed_and_taken_up_again(train_spec: Any, tmp_path: Path) -> None:
    spec = train_spec(train={"steps": 6, "checkpoints": {"every": 1}})
    process = engine_process("train", spec, "--out", tmp_path / "runs", modules=[HERE])
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3/"):
            break
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    (folder,) = folders.trainings(tmp_path / "runs")
    done = engine_apart("train", "--resume", folder, modules=[HERE])
    assert done.returncode == 0, done.stdout + done.stderr
    lines = metric_lines(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert "Checkpoint:" in done.stdout
    model = checkpoints_of(folder)[-1] / "model"
    words = ["eval", spec, "--model", model, "--limit", "2", "--json", "--out", tmp_path / "evals"]
    measured = engine_apart(*words, modules=[HERE])
    assert measured.returncode == 0, measured.stderr
    assert json.loads(measured.stdout)["estimates"]["reward"]["tasks"] == 2


@pytest.mark.slow
def test_two_processes_train_as_one(train_spec: Any, tmp_path: Path) -> None:
    """What they learn of the same episodes is the same; sharded weights reach the sampler, and a checkpoint whole."""
    train = {"steps": 3, "minibatches": 2, "checkpoints": {"every": 3}, "memory": {"max_tokens_per_microbatch": 40}}
    # With a small epsilon Adam's first steps are the gradient's signs: rounding would turn those of the smallest entries around.
    train["optimizer"] = {"lr": 0.003, "eps": 0.01}
    spec = train_spec(train=train)
    environment = engine_environment(HERE, OMP_NUM_THREADS="1")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    told = {}
    for name, how in (("one", [sys.executable]), ("two", launch)):
        command = [*how, "-m", "engine.cli.main", "train", str(spec), "--out", str(tmp_path / name)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        (folder,) = folders.trainings(tmp_path / name)
        told[name] = metric_lines(folder)
    for one, two in zip(told["one"], told["two"], strict=True):
        assert one["reward/mean"] == two["reward/mean"]  # the very same episodes, so the same weights were sampled with
        for name in ("loss", "grad_norm", "policy/entropy", "policy/confidence"):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6)
        assert two["sampler/diff_max"] < 1e-4
    (two,) = folders.trainings(tmp_path / "two")
    command = [*launch, "-m", "engine.cli.main", "train", "--resume", str(two)]
    assert load_file(checkpoints_of(two)[-1] / "model" / "model.safetensors")["model.norm.weight"].shape == (64,)
    header = json.loads((two / "train.json").read_text())
    header["spec"]["train"]["steps"] = 4
    (two / "train.json").write_text(json.dumps(header))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((two / "metrics.jsonl").read_text().splitlines()) == 4
