"""The specs of the environments in which the environment answers: valid, and every transition is taken, with any tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.cli.main import app
from engine.spec.load import load_spec
from engine.validate import check_spec

SPECS = Path(__file__).parents[2] / "specs"
NAMES = [
    "countdown",
    "guess_number",
    "word_guess",
    "text_to_sql",
    "search",
    pytest.param("programs", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name", NAMES)
def test_its_spec_has_no_findings_and_its_scenarios_cover_it(name: str, tiny_tokenizer_dir: Path) -> None:
    path = SPECS / f"{name}.yaml"
    assert [str(item) for item in check_spec(load_spec(path)) if item.severity != "info"] == []
    roomy = {
        "model.path": tiny_tokenizer_dir,
        "model.tool_calls": "plain",
        "model.tool_role": "tool",
        "limits.turn_tokens": 400,
    }
    settings = [part for key, value in roomy.items() for part in ("--set", f"{key}={value}")]
    result = CliRunner().invoke(app, ["test", str(path), "--require-coverage", "--format", "json", *settings])
    (spec,) = json.loads(result.output)["specs"]
    assert [one for one in spec["results"] if not one["passed"]] == []
    assert (result.exit_code, spec["coverage"]["percent"]) == (0, 100.0)


@pytest.mark.slow
def test_the_grid_world_is_covered_with_its_own_model_that_sees() -> None:
    path = SPECS / "grid_world.yaml"
    assert [str(item) for item in check_spec(load_spec(path)) if item.severity != "info"] == []
    result = CliRunner().invoke(app, ["test", str(path), "--require-coverage"])
    assert (result.exit_code, "✗" in result.output) == (0, False), result.output
