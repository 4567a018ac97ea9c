"""`engine test` plays what lies beside specs, tells what differs, and says so with its exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import engine_output

ROOT = Path(__file__).parents[3]
SPECS = ROOT / "specs"


def run(*arguments: object) -> tuple[int, str]:
    return engine_output("test", *arguments)


@pytest.fixture
def folder(tmp_path: Path, tiny_tokenizer_dir: Path) -> Path:
    spec = {
        "spec": "episode/v1",
        "name": "one",
        "model": {"path": str(tiny_tokenizer_dir)},
        "tasks": {"source": "inline", "rows": [{"id": "a"}]},
        "prompt": [{"role": "user", "content": "Say yes."}],
        "machine": "single_turn",
    }
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(spec))
    return tmp_path


def write(folder: Path, *scenarios: dict[str, Any]) -> Path:
    path = folder / "one.scenarios.yaml"
    path.write_text(yaml.safe_dump({"scenarios": list(scenarios)}, sort_keys=False))
    return path


YES = {"name": "yes", "replies": ["Yes."], "expect": {"messages": [{"role": "assistant", "content": "Yes."}]}}
NO = {"name": "no", "replies": ["Yes."], "expect": {"messages": [{"role": "assistant", "content": "No."}]}}


def test_scenarios_that_come_out_as_stated_pass(folder: Path) -> None:
    path = write(folder, YES)
    for named in (folder, folder / "one.yaml", path):
        status, output = run(named)
        assert status == 0
        assert "✓ yes" in output
        assert "5 scenarios of 1 spec passed" in output  # four are generated


def test_a_difference_is_told_as_a_diff(folder: Path) -> None:
    path = write(folder, YES, NO)
    status, output = run(folder)
    assert status == 1
    lines = [line.strip() for line in output.splitlines()]
    start = lines.index(f"{path}:9:3")
    assert lines[start + 1 : start + 5] == [
        "--- expected  +++ actual",
        "@@ messages @@",
        "-assistant: No.",
        "+assistant: Yes.",
    ]
    assert lines[-1] == "6 scenarios of 1 spec: 1 failed"


def test_transitions_that_no_scenario_takes_are_listed_and_may_be_required(folder: Path) -> None:
    write(folder, YES)
    status, output = run(folder)
    assert (status, "never: GENERATING --truncated--> DONE" in output) == (0, True)
    assert "6 of 10 transitions taken" in output
    assert run(folder, "--coverage-fail-under", 60)[0] == 0
    status, output = run(folder, "--coverage-fail-under", 61)
    assert (status, "60.0 %, 61 % are required" in output) == (1, True)
    assert run(folder, "--require-coverage")[0] == 1


def test_json_says_it_all(folder: Path) -> None:
    write(folder, YES, NO)
    status, output = run(folder, "--json", "--require-coverage")
    told = json.loads(output)
    (spec,) = told["specs"]
    assert (status, told["status"]) == (1, 1)
    assert spec["scenarios"] == str(folder / "one.scenarios.yaml")
    assert [(one["name"], one["passed"], one["line"]) for one in spec["results"][:2]] == [
        ("yes", True, 2),
        ("no", False, 9),
    ]
    assert all(one["name"].startswith("generated: ") for one in spec["results"][2:])
    assert spec["results"][1]["differences"] == [{"what": "messages", "diff": "-assistant: No.\n+assistant: Yes."}]
    assert spec["coverage"]["enough"] is False
    assert spec["coverage"]["transitions"][0] == {
        "source": "PENDING",
        "trigger": "ready",
        "dest": "GENERATING",
        "conditions": None,
        "taken": 5,
    }


def test_what_cannot_be_read_or_played_is_2(folder: Path) -> None:
    assert run(folder)[0] == 2  # no scenarios at all
    write(folder, YES, {**YES, "name": "lost", "task": "nobody"})
    status, output = run(folder)
    assert (status, "error[scenario.unknown-task] the spec has no task `nobody`" in output) == (2, True)
    assert run(folder / "two.yaml")[0] == 2
    (folder / "empty").mkdir()
    assert run(folder / "empty")[0] == 2


def test_only_some_are_played(folder: Path) -> None:
    write(folder, YES, NO)
    assert run(folder, "-k", "yes")[0] == 0
    assert run(folder, "-k", "nothing")[0] == 2


def test_nothing_is_left_behind(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> None:
    write(folder, YES)
    here = tmp_path_factory.mktemp("here")
    monkeypatch.chdir(here)
    before = sorted(folder.iterdir())
    assert run(folder)[0] == 0
    assert sorted(folder.iterdir()) == before
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("name", ["quickstart", "gsm8k_feedback"])
def test_the_specs_that_talk_are_covered_with_any_tokenizer(name: str, tiny_tokenizer_dir: Path) -> None:
    roomy = {"model.path": tiny_tokenizer_dir, "limits.episode_tokens": 4000, "limits.turn_tokens": 64}
    settings = [part for key, value in roomy.items() for part in ("--set", f"{key}={value}")]
    status, output = run(SPECS / f"{name}.yaml", "--require-coverage", "--json", *settings)
    (spec,) = json.loads(output)["specs"]
    assert [one for one in spec["results"] if not one["passed"]] == []
    assert len(spec["results"]) >= 14
    assert (status, spec["coverage"]["percent"]) == (0, 100.0)


@pytest.mark.model
def test_every_spec_that_ships_is_covered_with_its_own_tokenizer() -> None:
    status, output = run(SPECS, "--require-coverage")
    assert (status, "✗" in output) == (0, False), output


def test_a_made_row_that_lacks_a_field_of_the_prompt_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "rows_beside.py").write_text("def rows():\n    return [{'question': 'a'}, {'query': 'b'}]\n")
    spec = yaml.safe_load((folder / "one.yaml").read_text())
    spec |= {
        "tasks": {"source": "python", "use": "rows_beside:rows"},
        "prompt": [{"role": "user", "content": "{{question}}"}],
    }
    (folder / "one.yaml").write_text(yaml.safe_dump(spec))
    write(folder, {"name": "one", "replies": ["yes"], "expect": {"outcome": {}}})
    monkeypatch.setattr(sys, "path", list(sys.path))
    status, output = run(folder / "one.yaml")
    assert status != 0
    assert "row 2 has no field `question`" in output
