"""Trainings from Python: a training and what it leaves, continued, stopped by a cancellation, refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from installed_plugins import needs_plugin
from written_specs import save_spec

import engine
from engine import Dialogue, End, Task, environment
from engine.api.progress import Panel

pytestmark = needs_plugin("local")


@environment
def vowels(task: Task) -> Dialogue:
    view = yield "Say vowels."
    return End(rewards={"vowels": sum(letter in "aeiou" for letter in view.reply) / (len(view.reply) or 1)})


class Notes:
    """A `Progress` that records its lines for the test."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.steps: list[str] = []
        self.stepped = asyncio.Event()

    def say(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.said.append(text)

    def step(self, text: str) -> None:
        self.steps.append(text)
        self.stepped.set()

    @contextmanager
    def watching(self, panel: Panel) -> Iterator[None]:
        assert (panel.line() or "").endswith(" · loading")
        yield


@pytest.fixture
def spec(tmp_path: Path, tiny_model_dir: Path) -> engine.Spec:
    document: dict[str, Any] = {
        "spec": "episode/v1",
        "name": "vowels",
        "model": {"path": str(tiny_model_dir)},
        "backend": {"kind": "local", "dtype": "float32"},
        "tasks": {"source": "inline", "rows": [{"n": 1}, {"n": 2}]},
        "environment": {"use": "engine.environments.arithmetic:Arithmetic"},
        "machine": "step",
        "limits": {"turn_tokens": 6},
        "rollout": {"samples_per_task": 4, "out": str(tmp_path / "runs")},
        "train": {"steps": 2, "tasks_per_step": 1, "dynamic_sampling": False, "optimizer": {"lr": 0.003}},
    }
    return engine.load(save_spec(tmp_path / "vowels.yaml", document), environment=vowels)


def test_a_training_has_metrics_checkpoints_and_its_run_and_is_continued(spec: engine.Spec, tmp_path: Path) -> None:
    notes = Notes()
    training = engine.fit(spec, name="first", progress=notes)
    assert training.folder == tmp_path / "runs" / "first"
    assert training.metrics["step"].to_pylist() == [1, 2]
    rewards = training.metrics["reward/mean"].to_pylist()
    assert rewards == pytest.approx([sum(row) / 4 for row in _rewards(training)])
    assert [path.name for path in training.checkpoints] == ["step-000002"]
    assert training.result is not None
    assert (training.result.steps, training.spec.spec.train.steps) == (2, 2)
    assert notes.said[0] == f"loading {spec.spec.model.path} …"
    assert [line.partition(" · ")[0] for line in notes.steps] == ["step 1/2", "step 2/2"]
    assert f"<td>{rewards[0]:.3f} → {rewards[1]:.3f} " in training._repr_html_()
    with pytest.raises(engine.EngineError, match="exists: `--resume auto`"):
        engine.fit(spec, name="first", progress=False)
    longer = engine.fit(resume=training.folder, overrides={"train.steps": 3}, progress=False)
    assert longer.metrics["reward/mean"].to_pylist()[:2] == rewards
    assert repr(engine.Training(training.folder)) == "<Training first: 3 steps>"


def _rewards(training: engine.Training) -> list[list[float]]:
    episodes = [episode.reward for episode in training.run.episodes]
    return [episodes[start : start + 4] for start in range(0, len(episodes), 4)]


async def test_a_cancelled_training_is_stored_and_a_refused_one_leaves_no_folder(
    spec: engine.Spec, tmp_path: Path
) -> None:
    many = engine.load(spec, {"train.steps": 500})
    notes = Notes()
    work = asyncio.ensure_future(engine.fit_async(many, name="cut", progress=notes))
    await asyncio.wait_for(notes.stepped.wait(), 60)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    cut = engine.Training(tmp_path / "runs" / "cut")
    assert [f"step-{cut.metrics.num_rows:06d}"] == [path.name for path in cut.checkpoints]
    with pytest.raises(ValueError, match="give a spec, or a training to resume"):
        engine.fit(progress=False)
    with pytest.raises(engine.EngineError):
        engine.fit(engine.load(spec, {"backend": {"kind": "scripted"}}), name="none", progress=False)
    assert not (tmp_path / "runs" / "none").exists()
