"""Whole trainings against the real server: what it samples with is what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import trajectories_of
from trainings import begin_training, metric_lines
from written_specs import TALKS_ON_WHEN_CUT, listener_spec, save_spec

from engine.spec.load import load_spec

Running = Any
LORA = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def spec_of(folder: Path, server: Running, model: Path, train: dict[str, Any]) -> Path:
    spec = {
        **listener_spec("served", model),
        "backend": {"kind": "sglang", "urls": [server.url]},
        "machine": TALKS_ON_WHEN_CUT,
        "limits": {"turn_tokens": 6, "assistant_turns": 2, "episode_tokens": 64},
        "rewards": {"credit": {"method": "turn_return", "gamma": 0.5}},
        "rollout": {"samples_per_task": 4, "seed": 3},
        "train": {"device": "cpu", "steps": 3, "tasks_per_step": 2, "optimizer": {"lr": 0.01}, "dynamic_sampling": False} | train,
    }  # fmt: skip
    return save_spec(folder / "served.yaml", spec)


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
    trainer = begin_training(loaded, tmp_path / "runs")
    result = await trainer.run()
    told = metric_lines(trainer.folder)
    assert result.steps == 3
    for line in told:
        assert line["sampler/diff_max"] < 1e-4
        assert line["staleness/max"] == 0.0
    versions: set[int] = set()
    for trajectory in trajectories_of(trainer.folder / "rollouts"):
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
    trainer = begin_training(loaded, tmp_path / "runs")
    result = await trainer.run()
    told = metric_lines(trainer.folder)
    assert (result.steps, result.faults) == (4, [])
    assert max(line["staleness/max"] for line in told) <= 2
