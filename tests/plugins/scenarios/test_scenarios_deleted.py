"""The engine without the folder of this plugin: what needs it says so, and everything else works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from one_deleted import ROOT, copy_without, engine


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the engine without the plugin, with two specs of the project."""
    root = copy_without(["scenarios"], tmp_path_factory.mktemp("copy"))
    (root / "specs").mkdir()
    for name in ("guess_number.yaml", "guess_number.scenarios.yaml"):
        (root / "specs" / name).write_text((ROOT / "specs" / name).read_text())
    return root


def test_the_command_says_what_to_install(copy: Path) -> None:
    assert "engine" in engine(copy, "--help").stdout
    refused = engine(copy, "test", "specs")
    assert refused.returncode == 2
    assert "it belongs to the plugin `scenarios`, which is not installed: pip install" in refused.stderr


def test_a_spec_with_scenarios_beside_it_has_one_finding(copy: Path) -> None:
    checked = engine(copy, "validate", "--format", "json", "specs/guess_number.yaml")
    (spec,) = json.loads(checked.stdout)["specs"]
    (finding,) = [each for each in spec["diagnostics"] if each["rule"] == "scenario.no-plugin"]
    assert (checked.returncode, finding["severity"]) == (0, "info")
    assert finding["message"] == "the scenarios in guess_number.scenarios.yaml are not checked"
    assert finding["fix"].startswith("it belongs to the plugin `scenarios`, which is not installed: pip install")


def test_scenarios_that_are_named_are_an_error(copy: Path) -> None:
    checked = engine(copy, "validate", "specs/guess_number.scenarios.yaml")
    assert checked.returncode == 1
    assert "scenario.no-plugin" in checked.stdout + checked.stderr


def test_the_committed_json_schema_of_a_missing_plugin_stays(copy: Path) -> None:
    (copy / "docs").mkdir()
    engine(copy, "schema")
    assert (copy / "schemas/json/scenarios.schema.json").is_file()
    assert engine(copy, "schema", "--check").returncode == 0
