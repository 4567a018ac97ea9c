"""The specs that train: valid, every transition taken by their scenarios, and their models made as they say."""

from __future__ import annotations

from pathlib import Path

import pytest
from slow_cases import slow_after

from engine.schemas.backend_servers import SGLangBackendSpec
from engine.schemas.loss import ClippedLoss
from engine.spec.load import load_spec
from engine.spec.tasks import load_tasks
from engine.validate import check_spec

SPECS = Path(__file__).parents[3] / "specs"
NAMES = ["train_arithmetic", "train_color_square", "train_credit"]


@pytest.mark.parametrize("name", [*NAMES, "train_critic"])
def test_it_opens_with_the_schema_and_has_no_findings_but_that_its_model_is_to_be_taught(name: str) -> None:
    path = SPECS / f"{name}.yaml"
    assert path.read_text().startswith("# yaml-language-server: $schema=../schemas/json/episode.schema.json\n")
    loaded = load_spec(path)
    findings = [item.rule for item in check_spec(loaded) if item.severity != "info"]
    assert findings == ([] if name == "train_arithmetic" else ["train.random-weights"])
    assert loaded.spec.train is not None
    tasks = load_tasks(loaded)
    assert len({task.id for task in tasks}) == len(tasks) > loaded.spec.train.tasks_per_step


PUBLISHED = {
    "train_gsm8k_feedback": ("Qwen/Qwen2.5-3B-Instruct", (2, 1), (256, 16), 1e-6, 0.001, (0.2, 0.2), True, 4),
    "train_geo3k_tool": ("Qwen/Qwen3-VL-2B-Instruct", (3, None), (64, 8), 1e-6, 0.0, (0.2, 0.28), True, 4),
    "train_geo3k_feedback": ("Qwen/Qwen2.5-VL-3B-Instruct", (2, 1), (32, 4), 2e-6, 0.0, (0.4, 0.4), False, 2),
}


@pytest.mark.parametrize("name", slow_after(1, PUBLISHED))
def test_a_published_training_has_the_published_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    loaded = load_spec(SPECS / f"{name}.yaml")
    # with one update per batch clipping has no effect, here as there: the published values stay, and validate says so
    assert {item.rule for item in check_spec(loaded) if item.severity != "info"} == {"train.no-effect"}
    spec = loaded.spec
    train, backend = spec.train, spec.backend
    assert train is not None
    assert isinstance(backend, SGLangBackendSpec)
    assert backend.launch is not None
    assert isinstance(train.loss, ClippedLoss)
    model, turns, batch, rate, kl, clip, colocated, gpus = PUBLISHED[name]
    assert spec.model.path == model
    assert (spec.limits.assistant_turns, spec.limits.user_turns) == turns
    assert (train.tasks_per_step, spec.rollout.samples_per_task) == batch
    assert (train.optimizer.lr, train.kl.coefficient, (train.loss.clip_low, train.loss.clip_high)) == (rate, kl, clip)
    assert (train.colocate, len(backend.launch.indexes)) == (colocated, gpus)


def test_what_is_evaluated_is_not_trained_on() -> None:
    spec = load_spec(SPECS / "train_arithmetic.yaml").spec
    assert spec.train is not None
    assert spec.train.eval is not None
    assert spec.train.eval.tasks is not None
    assert spec.tasks.with_ == {"count": 256, "seed": 0, "most": 9}
    assert spec.train.eval.tasks["with"] == {"count": 64, "seed": 0, "most": 9, "held_out": True}


def test_credit_by_outcome_is_one_setting_away() -> None:
    spec = load_spec(SPECS / "train_credit.yaml", ["rewards.credit={method: outcome}"]).spec
    assert spec.rewards.credit.method == "outcome"
    assert load_spec(SPECS / "train_credit.yaml").spec.rewards.credit.method == "turn_return"
