"""Whole trainings against the real server: what it samples with is what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.spec.load import load_spec
from engine.store import RunStore
from engine.store.header import RunHeader
from engine.train import folder as folders
from engine.train.trainer import Trainer

Running = Any
LORA = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def spec_of(folder: Path, server: Running, model: Path, train: dict[str, Any]) -> Path:
    spec = {
        "spec": "episode/v1",
        "name": "served",
        "model": {"path": str(model)},
        "backend": {"kind": "sglang", "urls": [server.url]},
        "tasks": {"source": "inline", "rows": [{"id": f"t{n}", "say": f"word {n}"} for n in range(6)], "id": "id"},
        "prompt": [{"role": "user", "content": "Say {{say}}."}],
        "user": {"use": "code_for_training:Listener"},
        "machine": {"preset": "tools_and_user", "transitions": [
            {"trigger": "truncated", "source": "GENERATING", "dest": "AWAITING_USER_FEEDBACK"}]},
        "limits": {"turn_tokens": 6, "assistant_turns": 2, "episode_tokens": 64},
        "rewards": {"credit": {"method": "turn_return", "gamma": 0.5}},
        "rollout": {"samples_per_task": 4, "seed": 3},
        "train": {"device": "cpu", "steps": 3, "tasks_per_step": 2, "optimizer": {"lr": 0.01}, "dynamic_sampling": False} | train,
    }  # fmt: skip
    path = folder / "served.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


@pytest.mark.parametrize(
    "train",
    [
        {"weight_sync": {"method": "disk"}},
        {"weight_sync": {"method": "tensors", "pause_generation": False}},
        {"weight_sync": {"method": "tensors"}, "lora": LORA},
        {"weight_sync": {"method": "collective"}},
        {"weight_sync": {"method": "adapter"}, "lora": LORA},
    ],
    ids=["disk", "tensors in flight", "lora as tensors", "collective", "adapter"],
)
async def test_each_step_samples_with_the_weights_of_the_step_before(
    sglang_server: Running, tiny_model_dir: Path, tmp_path: Path, own_weights: None, train: dict[str, Any]
) -> None:
    loaded = load_spec(spec_of(tmp_path, sglang_server, tiny_model_dir, train), [])
    trainer = Trainer(loaded, folders.begin(tmp_path / "runs", RunHeader.of(loaded)))
    result = await trainer.run()
    told = [json.loads(line) for line in (trainer.folder / "metrics.jsonl").read_text().splitlines()]
    assert result.steps == 3
    for line in told:
        assert line["sampler/diff_max"] < 1e-4
        assert line["staleness/max"] == 0.0
    versions: set[int] = set()
    with RunStore.open(trainer.folder / "rollouts", readonly=True) as store:
        for trajectory in store.trajectories():
            for branch in trajectory.branches:
                versions |= set(branch.weight_versions[branch.loss_mask == 1].tolist())
    assert versions == {0, 1, 2}


async def test_rollouts_run_ahead_while_weights_change_in_flight(
    sglang_server: Running, tiny_model_dir: Path, tmp_path: Path, own_weights: None
) -> None:
    train = {
        "steps": 4,
        "asynchrony": {"max_staleness": 2},
        "weight_sync": {"method": "tensors", "pause_generation": False},
    }
    loaded = load_spec(spec_of(tmp_path, sglang_server, tiny_model_dir, train), [])
    trainer = Trainer(loaded, folders.begin(tmp_path / "runs", RunHeader.of(loaded)))
    result = await trainer.run()
    told = [json.loads(line) for line in (trainer.folder / "metrics.jsonl").read_text().splitlines()]
    assert (result.steps, result.faults) == (4, [])
    assert max(line["staleness/max"] for line in told) <= 2
