"""The published trainings that ship as specs: one whole step each, of a tiny model of the published model's class."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import vision_kit
from command_line import trajectories_of
from safetensors.torch import load_file
from trainings import metric_lines
from typer.testing import CliRunner

from engine.cli.main import app
from engine.environments.geo3k import SHIPPED
from engine.spec.load import load_spec

SPECS = Path(__file__).parents[3] / "specs"
PROBLEMS = "tasks={source: python, use: 'engine.environments.geo3k:problems', id: id, limit: 4}"
SUMS = f"tasks={{source: jsonl, path: {SHIPPED.parents[1] / 'gsm8k/train_sample.jsonl'}, limit: 4}}"


def tiny_qwen2(folder: Path) -> Path:
    """Qwen2, the class of Qwen2.5-3B-Instruct, with random weights."""
    from engine.plugins.local.tiny_lm import build

    return build(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "build", "architecture", "tasks"),
    [
        ("train_gsm8k_feedback", tiny_qwen2, "Qwen2ForCausalLM", SUMS),
        ("train_geo3k_tool", vision_kit.build_qwen3, "Qwen3VLForConditionalGeneration", PROBLEMS),
        ("train_geo3k_feedback", vision_kit.build_qwen25, "Qwen2_5_VLForConditionalGeneration", PROBLEMS),
    ],
)
def test_a_step(name: str, build: Any, architecture: str, tasks: str, tmp_path: Path) -> None:
    """Everything is the spec's, but for model, tasks, sizes and machine: loss, credit, KL, correction, optimizer, episodes."""
    model = build(tmp_path / "model")
    assert json.loads((model / "config.json").read_text())["architectures"] == [architecture]
    settings = [
        f"model.path={model}",
        "backend={kind: local, device: cpu, dtype: float32}",
        tasks,
        "rewards.scorer={use: 'code_for_vision_trainings:vowels'}",  # the tiny model never gives a right answer
        "limits.turn_tokens=8",
        "limits.episode_tokens=null",
        "rollout.samples_per_task=4",
        "rollout.concurrency=16",
        "train.steps=1",
        "train.tasks_per_step=2",
        "train.colocate=false",
        "train.device=cpu",
        "train.precision=float32",
        "train.memory.offload=none",
        "train.eval=null",
        "train.checkpoints.every=1",
    ]
    arguments = ["train", str(SPECS / f"{name}.yaml"), "--quiet", "--out", str(tmp_path / "runs"), "--run-name", "one"]
    for setting in settings:
        arguments += ["--set", setting]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    folder = tmp_path / "runs/one"
    (line,) = metric_lines(folder)
    episodes = trajectories_of(folder / "rollouts")
    # AReaL's bound lets the next steps' groups begin, but there is one step
    assert len(episodes) == line["episodes/count"] == 8
    assert [episode.outcome.failure for episode in episodes] == [None] * 8
    assert (line["step"], line["updates"], line["lr"]) == (
        1,
        1,
        load_spec(SPECS / f"{name}.yaml").spec.train.optimizer.lr,
    )
    assert line["tokens/trained"] > 0
    assert line["sampler/diff_max"] < 1e-4  # float32 on both sides
    assert line["staleness/max"] == 0
    assert math.isfinite(line["loss"])
    assert line["grad_norm"] > 0
    before = load_file(model / "model.safetensors")
    after = load_file(next(folder.glob("checkpoints/step-000001/model/*.safetensors")))
    moved = [name for name, tensor in after.items() if name in before and not torch.equal(tensor, before[name])]
    assert moved
