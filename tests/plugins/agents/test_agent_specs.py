"""The specs of agent programs: valid, their scenarios run the real programs, and one of them learns."""

from __future__ import annotations

import runpy
import statistics
from pathlib import Path

import pytest

from engine.environments.agents import parcels_agent, sums_agent
from engine.environments.parcels import GATES
from engine.spec.load import load_spec
from engine.validate import check_spec

ROOT = Path(__file__).parents[3]
SPECS = ROOT / "specs"


@pytest.mark.parametrize("name", ["agent_tools", "train_agent"])
def test_it_opens_with_the_schema_and_has_no_findings_but_that_its_model_is_to_be_taught(name: str) -> None:
    path = SPECS / f"{name}.yaml"
    assert path.read_text().startswith("# yaml-language-server: $schema=../schemas/json/episode.schema.json\n")
    findings = [item.rule for item in check_spec(load_spec(path)) if item.severity != "info"]
    assert findings == (["train.random-weights"] if name == "train_agent" else [])


def test_the_calculator_of_the_program_computes_and_refuses() -> None:
    found = {
        text: sums_agent.calculate(text)
        for text in ("3 + 4 * 5", "-(2 - 9) / 2", "1 / 0", "__import__('os')", "3 +", "'a' * 9")
    }
    assert found["3 + 4 * 5"] == "23"
    assert found["-(2 - 9) / 2"] == "3.5"
    assert all(
        value.startswith("error: ") for text, value in found.items() if text not in ("3 + 4 * 5", "-(2 - 9) / 2")
    )


def test_the_program_and_the_tasks_have_the_same_gates() -> None:
    assert parcels_agent.GATES == GATES


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2))])
async def test_the_reward_of_a_program_rises(seed: int, tmp_path: Path) -> None:
    """specs/train_agent.yaml as it ships, with the model that its comment makes."""
    from trainings import begin_training  # it imports torch, which the other tests do not need

    from engine.train.metrics import read_metrics

    made = runpy.run_path(str(ROOT / "scripts/make_tiny_lm.py"))
    model = made["build"](tmp_path / "model", seed)
    made["teach"](model, 200, seed)
    loaded = load_spec(
        SPECS / "train_agent.yaml", [f"model.path={model}", f"train.seed={seed}", f"rollout.seed={seed}"]
    )
    trainer = begin_training(loaded, tmp_path / "runs")
    await trainer.run()
    rewards = [line["reward/mean"] for line in read_metrics(trainer.folder)]
    assert statistics.mean(rewards[:3]) < -0.2
    assert statistics.mean(rewards[-5:]) > statistics.mean(rewards[:3]) + 1.0
