"""The scenarios of the shipped specs pass, and take every transition."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slow_cases import slow_after
from typer.testing import CliRunner

from engine.cli.main import app
from engine.plugins.scenarios.suite import Formats, run_suite
from engine.spec.load import load_spec
from engine.validate import check_spec

ROOT = Path(__file__).parents[3]
SPECS = ROOT / "specs"


@pytest.mark.slow  # by default: those of train_agent but one, below
@pytest.mark.parametrize(("name", "options"), [("train_agent", []), ("agent_tools", ["--require-coverage"])])
def test_scenarios_of_programs_pass(name: str, options: list[str], tiny_tokenizer_dir: Path) -> None:
    model = ["--set", f"model.path={tiny_tokenizer_dir}"] if name == "agent_tools" else []
    result = CliRunner().invoke(app, ["test", str(SPECS / f"{name}.yaml"), *options, *model])
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_scenarios_of_programs_but_the_one_that_waits_for_seconds_pass(tmp_path: Path) -> None:
    parts = (SPECS / "train_agent.scenarios.yaml").read_text().split("\n\n")
    quick = [part for part in parts if "- name: a program that does not end\n" not in part]
    assert len(quick) == len(parts) - 1
    (tmp_path / "quick.yaml").write_text("\n\n".join(quick))
    played = run_suite(SPECS / "train_agent.yaml", Formats(), file=tmp_path / "quick.yaml")
    assert played.problems == []
    assert [result for result in played.results if not result.passed] == []
    assert len(played.results) == len(quick)


GAMES = [
    "countdown",
    "guess_number",
    "word_guess",
    "text_to_sql",
    "search",
    pytest.param("programs", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name", GAMES)
def test_a_game_has_no_findings_and_its_scenarios_cover_it(name: str, tiny_tokenizer_dir: Path) -> None:
    path = SPECS / f"{name}.yaml"
    assert [str(item) for item in check_spec(load_spec(path)) if item.severity != "info"] == []
    roomy = {
        "model.path": tiny_tokenizer_dir,
        "model.tool_calls": "plain",
        "model.tool_role": "tool",
        "limits.turn_tokens": 400,
    }
    settings = [part for key, value in roomy.items() for part in ("--set", f"{key}={value}")]
    result = CliRunner().invoke(app, ["test", str(path), "--require-coverage", "--json", *settings])
    (spec,) = json.loads(result.output)["specs"]
    assert [one for one in spec["results"] if not one["passed"]] == []
    assert (result.exit_code, spec["coverage"]["percent"]) == (0, 100.0)


@pytest.mark.slow
def test_the_grid_world_is_covered_with_its_own_model_that_sees() -> None:
    path = SPECS / "grid_world.yaml"
    assert [str(item) for item in check_spec(load_spec(path)) if item.severity != "info"] == []
    result = CliRunner().invoke(app, ["test", str(path), "--require-coverage"])
    assert (result.exit_code, "✗" in result.output) == (0, False), result.output


TRAININGS = ["train_arithmetic", "train_color_square", "train_credit"]


@pytest.mark.parametrize("name", TRAININGS)
def test_scenarios_of_a_training_take_every_transition(name: str) -> None:
    arguments = ["test", str(SPECS / f"{name}.yaml"), "--require-coverage"]
    if name == "train_arithmetic":  # its own model is a download
        arguments += ["--set", "model.path=tiny-qwen2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "16 of 16 transitions taken" in result.output


PUBLISHED = {"train_gsm8k_feedback": 16, "train_geo3k_tool": 13, "train_geo3k_feedback": 16}
"""Spec -> its transitions."""


@pytest.mark.parametrize("name", slow_after(1, PUBLISHED))
def test_scenarios_of_a_published_training_take_every_transition(name: str) -> None:
    result = CliRunner().invoke(app, ["test", str(SPECS / f"{name}.yaml"), "--require-coverage"])
    assert result.exit_code == 0, result.output
    assert f"{PUBLISHED[name]} of {PUBLISHED[name]} transitions taken" in result.output
