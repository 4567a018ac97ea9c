"""`engine validate` of a file of scenarios holds it to the spec beside it, and plays nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import engine_output

ROOT = Path(__file__).parents[3]
SPEC = """\
spec: episode/v1
name: demo
model: {path: org/m}
machine: single_turn
tasks: {source: inline, id: question, rows: [{question: a}]}
prompt: [{role: user, content: "{{question}}"}]
"""
GOOD = "scenarios:\n  - {name: one, task: a, replies: [x], expect: {states: [PENDING, GENERATING, DONE]}}\n"


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(SPEC)


def run(*arguments: str) -> tuple[int, list[str]]:
    code, output = engine_output("validate", *arguments)
    return code, [line for line in output.splitlines() if "|" not in line and "fix:" not in line]


def test_a_glob_may_name_specs_and_scenarios() -> None:
    Path("s.scenarios.yaml").write_text(GOOD)
    assert run("s.yaml", "s.scenarios.yaml") == (0, ["1 spec and 1 file of scenarios valid"])
    assert run("s.scenarios.yaml") == (0, ["1 file of scenarios valid"])


def test_its_form_is_checked() -> None:
    Path("s.scenarios.yaml").write_text("scenarios:\n  - {nam: one, replies: [], expect: {states: []}}\n")
    status, lines = run("s.scenarios.yaml")
    assert status == 1
    assert lines == [
        "s.scenarios.yaml:2:5: error[spec.missing-key] `scenarios[0]` needs `name`",
        "s.scenarios.yaml:2:6: error[spec.unknown-key] unknown key `nam`",
        "1 file of scenarios, 1 invalid: 2 errors",
    ]
    Path("s.scenarios.yaml").write_text("scenarios: [\n")
    assert run("s.scenarios.yaml")[0] == 2


def test_each_scenario_must_fit_the_spec() -> None:
    Path("s.scenarios.yaml").write_text(
        "scenarios:\n"
        "  - {name: one, task: b, replies: [x], expect: {states: []}}\n"
        "  - {name: two, replies: [x], expect: {states: [PENDIN]}}\n"
        "  - {name: three, set: {limits.user_turns: x}, replies: [x], expect: {states: []}}\n"
    )
    status, lines = run("s.scenarios.yaml")
    assert status == 1
    assert lines == [
        "s.scenarios.yaml:2:23: error[scenario.unknown-task] the spec has no task `b`",
        "s.scenarios.yaml:3:49: error[scenario.unknown-state] there is no state `PENDIN`",
        "s.scenarios.yaml:4:44: error[spec.wrong-type] `limits.user_turns` must be a whole number; it is `x`",
        "1 file of scenarios, 1 invalid: 3 errors",
    ]


def test_a_spec_that_is_not_there_or_not_valid_is_told() -> None:
    Path("other.scenarios.yaml").write_text(GOOD)
    assert run("other.scenarios.yaml") == (
        1,
        [
            "other.scenarios.yaml:1:1: error[scenario.no-spec] there is no spec `other.yaml` for these scenarios",
            "1 file of scenarios, 1 invalid: 1 error",
        ],
    )
    Path("other.yaml").write_text("spec: episode/v2\n")
    status, lines = run("other.scenarios.yaml")
    assert status == 1
    assert lines[0].startswith(
        "other.scenarios.yaml:1:1: error[scenario.bad-spec] the spec `other.yaml` is not valid, so its scenarios cannot"
    )


@pytest.mark.slow
def test_the_repositorys_own_are_valid_and_nothing_heavy_is_imported() -> None:
    code = (
        "import json, sys\nfrom pathlib import Path\nfrom engine.validate.examine import examine\n"
        "files = sorted(Path('specs').glob('*.scenarios.yaml'))\n"
        "print(json.dumps([len(files) > 5, [str(d) for f in files for d in examine(f).diagnostics],\n"
        "    sorted({'torch', 'transformers'} & set(sys.modules))]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == [True, [], []]
