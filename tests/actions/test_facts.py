"""What is known of an action or a limit stands once, and everything that reads it agrees."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import engine
from engine.actions.base import BuiltInAction
from engine.actions.facts import ACTIONS, COUNT_LIMIT_OF, COUNT_LIMITS, CountLimit
from engine.machine.variables import VARIABLES
from engine.schemas.limits import LimitsSpec

ROOT = Path(engine.__file__).parent


@pytest.mark.parametrize("name", [name for name, facts in ACTIONS.items() if facts.events is not None])
def test_an_action_is_called_as_its_entry_says(name: str) -> None:
    module, _, attribute = ACTIONS[name].use.partition(":")
    action = getattr(import_module(module), attribute)
    assert issubclass(action, BuiltInAction)
    assert (action.name, action.events, action._counted) == (name, ACTIONS[name].events, COUNT_LIMIT_OF.get(name))


@pytest.mark.parametrize("limit", COUNT_LIMITS, ids=lambda limit: limit.name)
def test_a_count_limit_names_a_field_an_action_and_a_guard_variable(limit: CountLimit) -> None:
    variable, _, field = limit.variable.partition(".")
    assert limit.name in LimitsSpec.model_fields
    assert field in VARIABLES[variable].fields
    assert limit.action in ACTIONS
    assert COUNT_LIMIT_OF[limit.action] is limit  # one count limit an action


def test_no_other_module_lists_the_events_of_an_action_or_the_count_limits() -> None:
    lists = {facts.events for facts in ACTIONS.values() if facts.events} | {tuple(item.name for item in COUNT_LIMITS)}
    found = {
        (path.relative_to(ROOT).as_posix(), values)
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Tuple | ast.List | ast.Set)
        and (values := tuple(item.value for item in node.elts if isinstance(item, ast.Constant))) in lists
    }
    assert {path for path, _ in found} == {"actions/facts.py"}


def test_reading_the_facts_does_not_import_the_actions() -> None:
    code = "import sys, engine.checks.context; print([m for m in sys.modules if m.startswith('engine.actions.')])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == "['engine.actions.facts']"
