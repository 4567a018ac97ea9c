"""Shipped specs that train: the published ones have the published settings, and what needs a taught model says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from slow_cases import slow_after

from engine.plugins.sglang.spec import SGLangBackendSpec
from engine.schemas.loss import ClippedLoss
from engine.spec.load import load_spec
from engine.validate import check_spec
from engine.validate.context import CheckContext
from engine.validate.train import random_weights
from engine.validate.work import Work

ROOT = Path(__file__).parents[1]
SPECS = ROOT / "specs"
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


def test_a_shipped_spec_that_needs_a_taught_model_says_which_command_makes_it() -> None:
    """And each other shipped spec that trains has a model with real weights."""
    random = {}
    for path in sorted(SPECS.glob("*.yaml")):
        if not path.name.endswith(".scenarios.yaml"):
            for finding in random_weights(CheckContext(load_spec(path), Work())):
                random[path.name] = str(finding.fix)
    assert sorted(random) == [
        f"train_{name}.yaml" for name in ("agent", "color_square", "condense", "credit", "critic")
    ]
    for name, words in random.items():
        script = (
            "make_tiny_vlm.py models/tiny-vlm"
            if name == "train_color_square.yaml"
            else "make_tiny_lm.py models/tiny-lm"
        )
        assert f"python scripts/{script} --teach" in words, words
        assert f"--set model.path={script.split()[1]}" in words
        assert (ROOT / "scripts" / script.split()[0]).is_file()
