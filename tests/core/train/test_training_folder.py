"""A training's folder: made once, found by a word, and the specs that lie behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from installed_plugins import needs_plugin
from msgspec.structs import force_setattr

from engine.errors import TrainError
from engine.spec.load import load_spec
from engine.spec.tasks import load_tasks
from engine.store import training as folders
from engine.store.header import RunHeader


def header(loaded: Any, run_id: str) -> RunHeader:
    return RunHeader.of(loaded, run_id=run_id)


def test_a_word_finds_a_training(train_spec: Any, tmp_path: Path) -> None:
    loaded, out = load_spec(train_spec()), tmp_path / "runs"
    with pytest.raises(TrainError, match=r"no training `latest` in .*; give its folder"):
        folders.find_training("latest", out)
    one, two = (folders.begin(out, header(loaded, name)) for name in ("a-train-1", "a-train-2"))
    (out / "a-run").mkdir()  # not a training
    assert folders.trainings(out) == [one, two]
    assert folders.find_training("a-train-1", out) == one
    assert folders.find_training(str(two), tmp_path) == two
    assert folders.find_training("latest", out) in (one, two)
    with pytest.raises(TrainError, match=r"2 trainings begin with `a-train`: a-train-1, a-train-2"):
        folders.find_training("a-train", out)
    with pytest.raises(TrainError, match="no training `b`"):
        folders.find_training("b", out)
    with pytest.raises(TrainError, match="cannot make the training's folder"):
        folders.begin(out, header(loaded, "a-train-1"))
    assert folders.read_header(one).loaded_spec().spec == loaded.spec
    (one / "train.json").write_text("{")
    with pytest.raises(TrainError, match="cannot be read"):
        folders.read_header(one)


@needs_plugin("evaluation")
def test_an_evaluation_has_its_own_tasks_samples_and_sampling(train_spec: Any, tmp_path: Path) -> None:
    from engine.plugins.evaluation.spec import TrainEvalSpec
    from engine.plugins.evaluation.training import evaluation_of

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "held_out.jsonl").write_text('{"id": "x", "say": "this"}\n{"id": "y", "say": "that"}\n')
    base = train_spec("base")
    wanted = {"tasks": {"source": "jsonl", "path": "held_out.jsonl", "id": "id"}, "samples": 5, "limit": 1}
    (tmp_path / "data" / "child.yaml").write_text(
        yaml.safe_dump({"extends": str(base), "train": {"eval": wanted | {"sampling": {"temperature": 0.0}}}})
    )
    loaded = load_spec(tmp_path / "data" / "child.yaml")
    other = evaluation_of(loaded)
    # a relative path is relative to the file that it is written in
    assert [task.id for task in load_tasks(other)] == ["x"]
    assert (other.spec.rollout.samples_per_task, other.spec.sampling.temperature) == (5, 0.0)
    assert other.spec.limits == loaded.spec.limits
    assert (loaded.spec.rollout.samples_per_task, loaded.spec.sampling.temperature) == (4, 1.0)
    assert loaded.spec.train is not None
    section = TrainEvalSpec.section_of(loaded.spec.train)
    assert section is not None
    bad = loaded.spec.train.with_sections({TrainEvalSpec: section.model_copy(update={"sampling": {"heat": 1}})})
    force_setattr(loaded, "spec", loaded.spec.model_copy(update={"train": bad}))
    with pytest.raises(TrainError, match=r"(?s)train\.eval: .*heat"):
        evaluation_of(loaded)
