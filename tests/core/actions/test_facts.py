"""The facts of an action or a limit are declared once, and everything that reads them agrees."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import engine
from engine import plugin
from engine.actions.action import Action
from engine.actions.facts import ACTIONS
from engine.limits import COUNTERS, EPISODE_SECONDS, LIMITS
from engine.machine.variables import VARIABLES
from engine.schemas.limits import Limit, LimitsSpec
from engine.schemas.model import ModelSpec
from engine.schemas.role import ModelUserLimits
from engine.schemas.sections import section_fields

ROOT = Path(engine.__file__).parent


@pytest.mark.parametrize("name", [name for name, facts in ACTIONS.items() if facts.events is not None])
def test_an_action_is_called_as_its_entry_says(name: str) -> None:
    module, _, attribute = ACTIONS[name].use.partition(":")
    action = getattr(import_module(module), attribute)
    assert issubclass(action, Action)
    assert (action.name, action.events) == (name, ACTIONS[name].events)


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.name)
def test_a_limit_names_a_key_of_the_spec_an_action_and_a_guard_variable(limit: Limit) -> None:
    owner = {"limits": LimitsSpec, "model": ModelSpec, "user": ModelUserLimits}[limit.owner]
    assert limit.name.rpartition(".")[2] in {*owner.model_fields, *(key for key, _, _ in section_fields(owner))}  # type: ignore[attr-defined]
    assert limit.action is None or limit.action in ACTIONS
    assert (limit.count is not None) or limit.cuts or limit is EPISODE_SECONDS
    if limit.variable is not None:
        variable, _, field = limit.variable.partition(".")
        assert field in VARIABLES[variable].fields
    if limit.per_use is not None:
        assert limit.action is not None
        assert limit.variable is not None


def test_every_limit_of_a_spec_is_in_the_table() -> None:
    fields = {LimitsSpec: "limits", ModelUserLimits: "user"}
    for owner, name in fields.items():
        listed = {limit.name.rpartition(".")[2] for limit in LIMITS if limit.owner == name}
        keys = {*owner.model_fields, *(key for key, _, _ in section_fields(owner))}  # type: ignore[attr-defined]
        settings = {
            "tool_result_keep",
            "tool_result_mark",
            "on_overflow",
        }  # of `tool_result_tokens`, of `episode_tokens`
        assert listed == keys - settings


def test_no_other_module_lists_the_events_of_an_action_or_the_count_limits() -> None:
    lists = {facts.events for facts in ACTIONS.values() if facts.events} | {tuple(item.name for item in COUNTERS)}
    found = {
        (path.relative_to(ROOT).as_posix(), values)
        for path in ROOT.rglob("*.py")
        if any(all(value in text for value in values) for text in [path.read_text()] for values in lists)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Tuple | ast.List | ast.Set)
        and (values := tuple(item.value for item in node.elts if isinstance(item, ast.Constant))) in lists
    }
    found = {(path, values) for path, values in found if path != "plugins/agents/record.py"}  # its record is an event
    named = {use.partition(":")[0].replace(".", "/") + ".py" for use in plugin.entries("actions").values()}
    assert {path for path, _ in found} == {"actions/facts.py", *(path.removeprefix("engine/") for path in named)}


def test_reading_the_facts_does_not_import_the_actions() -> None:
    code = "import sys, engine.validate.context; print([m for m in sys.modules if m.startswith('engine.actions.')])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == "['engine.actions.action_facts', 'engine.actions.facts']"
