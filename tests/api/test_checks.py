"""What is wrong with specs, in Python: as much as `engine validate` finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import engine_here
from installed_plugins import needs_plugin

import engine

REPLIES = [{"task": "*", "replies": ["It is 42."]}]


@pytest.mark.parametrize("loaded", [False, True])
def test_a_budget_is_compared_with_the_worst_case(make_spec: Callable[..., Path], loaded: bool) -> None:
    path = make_spec(REPLIES)
    spec = engine.load(path) if loaded else path
    assert "budget.exceeded" not in [item.rule for item in engine.check(spec, budget={"tokens": 1e12})]
    (found,) = [item for item in engine.check(spec, budget=["tokens=1"]) if item.rule == "budget.exceeded"]
    assert found.severity == "error"
    with pytest.raises(engine.EngineError, match="there is no budget `token`; did you mean `tokens`"):
        engine.check(spec, budget={"token": 1})


@needs_plugin("trainers")
def test_another_trainer_is_asked(make_spec: Callable[..., Path]) -> None:
    spec = make_spec(REPLIES, train={"kl": {"coefficient": 0.1, "in": "reward"}})
    plain, asked = ({(item.rule, item.path) for item in engine.check(spec, trainer=name)} for name in (None, "verl"))
    assert asked - plain == {
        ("trainer.refused", ("train", "kl", "in")),
        ("trainer.approximated", ("train", "dynamic_sampling")),
    }
    with pytest.raises(engine.EngineError, match="there is no trainer `verla`"):
        engine.check(spec, trainer="verla")


@needs_plugin("scenarios")
def test_a_file_of_scenarios_is_compared_with_its_spec(make_spec: Callable[..., Path]) -> None:
    spec = make_spec(REPLIES)
    file = spec.with_name(f"{spec.stem}.scenarios.yaml")
    file.write_text("scenarios:\n- {name: one, replies: [x], expect: {states: [DON]}}\n")
    assert [(item.rule, item.path) for item in engine.check(file)] == [("scenario.unknown-state", ("scenarios", 0))]


def test_files_of_others_give_what_the_command_prints(make_spec: Callable[..., Path]) -> None:
    folder = make_spec(REPLIES).parent
    code, printed, _ = engine_here("validate", folder, "--worst-case", "--format", "json", cwd=folder)
    reports = engine.check_files([folder], worst_case=True)
    assert json.loads(printed) == {"valid": code == 0, "specs": [report.plain() for report in reports]}
    assert reports[0].worst is not None


def test_code_of_others_is_imported_only_when_asked(make_spec: Callable[..., Path]) -> None:
    spec = make_spec(REPLIES, environment={"use": "loud:World"})
    spec.with_name("loud.py").write_text("print('imported')\nclass World:\n    def reset(self, task, seed): ...\n")
    heard: list[str] = []
    engine.check_files([spec], heard=heard.append)
    assert heard == []
    engine.check_files([spec], imports=True, heard=heard.append)
    assert heard == ["imported code: imported"]


def test_a_page_says_what_a_rule_finds() -> None:
    page = engine.rule_pages()["machine.unreachable"]
    assert (page.severity, page.text.startswith("# `machine.unreachable`\n")) == ("error", True)
