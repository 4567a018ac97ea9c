"""`guard.fact-may-miss`: which paths and which answers leave a fact unset."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.spec.load import load_spec
from engine.validate import check_spec

SPEC = """
spec: episode/v1
name: demo
model: {path: org/m}
tasks: {source: inline, rows: [{q: a}]}
prompt: [{role: user, content: "{{q}}"}]
environment: {use: "world:world"}
machine:
  preset: step
  transitions:
    - {trigger: continue, source: STEPPING, dest: DONE, conditions: CONDITION}
    - {trigger: continue, source: STEPPING, dest: GENERATING}
"""
WORLD = """
from engine.environments.function import Dialogue, End, Say, environment
from engine.schemas.environment import Task


@environment
def world(task: Task) -> Dialogue:
    view = yield FIRST
    while True:
        if view.reply == "x":
            view = yield Say("no", facts={"wrong": 1})
        elif view.reply == "y":
            view = yield OTHER
        else:
            return End(solved=True)
"""


@pytest.mark.parametrize(
    ("first", "other", "condition", "found"),
    [
        ("'go'", "'no'", "facts.wrong > 2", True),
        ("'go'", "Say('no')", "facts.wrong > 2", True),
        ("'go'", "Say('no')", "turns.assistant > 1 || facts.wrong > 2", False),
        ("'go'", "Say('no')", "has(facts.wrong) && facts.wrong > 2", False),
        ("'go'", "Say('no')", "'\"wrong\" in facts && facts.wrong > 2'", False),
        ("Say('go', facts={'wrong': 0})", "'no'", "facts.wrong > 2", False),
        ("'go'", "Say('no', facts={'wrong': 2})", "facts.wrong > 2", False),
        ("'go'", "Say('no', facts=facts_of(view))", "facts.wrong > 2", False),
    ],
)
def test_an_answer_without_the_fact_may_come_before_one_with_it(
    tmp_path: Path, first: str, other: str, condition: str, found: bool
) -> None:
    (tmp_path / "world.py").write_text(WORLD.replace("FIRST", first).replace("OTHER", other))
    (tmp_path / "spec.yaml").write_text(SPEC.replace("CONDITION", condition))
    rules = [item.rule for item in check_spec(load_spec(tmp_path / "spec.yaml")) if item.severity != "info"]
    assert rules == ["guard.fact-may-miss"] * found
