"""The specs that train: valid, every transition taken by their scenarios, and their models made as they say."""

from __future__ import annotations

from pathlib import Path

import pytest
from installed_plugins import needs_plugin

from engine.spec.load import load_spec
from engine.spec.tasks import load_tasks
from engine.validate import check_spec

SPECS = Path(__file__).parents[3] / "specs"


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=needs_plugin("evaluation")) for name in ("train_arithmetic", "train_color_square")),
        "train_credit",
        pytest.param("train_critic", marks=needs_plugin("critic")),
    ],
)
def test_it_opens_with_the_schema_and_has_no_findings_but_that_its_model_is_to_be_taught(name: str) -> None:
    path = SPECS / f"{name}.yaml"
    assert path.read_text().startswith("# yaml-language-server: $schema=../schemas/json/episode.schema.json\n")
    loaded = load_spec(path)
    findings = [item.rule for item in check_spec(loaded) if item.severity != "info"]
    assert findings == ([] if name == "train_arithmetic" else ["train.random-weights"])
    assert loaded.spec.train is not None
    tasks = load_tasks(loaded)
    assert len({task.id for task in tasks}) == len(tasks) > loaded.spec.train.tasks_per_step


@needs_plugin("evaluation")
def test_what_is_evaluated_is_not_trained_on() -> None:
    from engine.plugins.evaluation.spec import TrainEvalSpec

    spec = load_spec(SPECS / "train_arithmetic.yaml").spec
    assert spec.train is not None
    section = TrainEvalSpec.section_of(spec.train)
    assert section is not None
    assert section.tasks is not None
    assert spec.tasks.with_ == {"count": 256, "seed": 0, "most": 9}
    assert section.tasks["with"] == {"count": 64, "seed": 0, "most": 9, "held_out": True}


def test_credit_by_outcome_is_one_setting_away() -> None:
    spec = load_spec(SPECS / "train_credit.yaml", ["rewards.credit={method: outcome}"]).spec
    assert spec.rewards.credit.method == "outcome"
    assert load_spec(SPECS / "train_credit.yaml").spec.rewards.credit.method == "turn_return"
