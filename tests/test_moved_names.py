"""Old names of public modules: an import names the new module, and an entry point is read as the new one."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

from engine.moved_names import MOVED, MovedModules, current, new_module
from engine.spec.code.entry import load_entry


@pytest.mark.parametrize("old", MOVED)
def test_the_old_name_is_gone_and_the_new_one_is_there(old: str) -> None:
    if ":" not in old:
        with pytest.raises(ImportError, match=f"`{MOVED[old]}`"):
            import_module(old)
    assert find_spec(MOVED[old].partition(":")[0]) is not None


def test_an_import_of_a_part_names_the_new_module() -> None:
    with pytest.raises(ImportError, match=r"`engine\.plugins\.trainers`") as raised:
        import_module("engine.integrations.trainers.verl.agent_loop")
    assert isinstance(raised.value, ModuleNotFoundError)
    assert new_module("engine.integrations.trainers.verl") == "engine.plugins.trainers.verl"
    assert new_module("engine.integrationsx") is None


def test_a_package_that_is_gone_names_what_was_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOVED, "engine.old.part", "engine.new")
    with pytest.raises(
        ImportError, match=r"there is no `engine\.old`; of what was in it, `engine\.old\.part` is `engine\.new` now"
    ):
        import_module("engine.old.part")


def test_other_modules_are_left_alone() -> None:
    assert find_spec("engine.no_such_module") is None
    assert sum(isinstance(each, MovedModules) for each in sys.meta_path) == 1


def test_an_entry_point_is_read_as_the_new_one_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOVED, "engine.old:Error", "engine.errors:EngineError")
    from engine.errors import EngineError

    with pytest.warns(FutureWarning, match="`engine.old:Error` is `engine.errors:EngineError` now"):
        assert load_entry("engine.old:Error", None) is EngineError
    with pytest.warns(FutureWarning):
        assert current("engine.checks.budget:read_budget") == "engine.validate.budget:read_budget"
    old = "engine.integrations.environments.reasoning_gym:problems"
    with pytest.warns(FutureWarning):
        assert load_entry(old, None).__module__ == "engine.plugins.adapters.reasoning_gym"
    with pytest.warns(FutureWarning):
        assert load_entry("engine.integrations.environments.verl:VerlTools", None).__module__.endswith("verl.tools")
    with pytest.warns(FutureWarning):
        assert (
            load_entry("engine.integrations.verl:Prompt", None).__module__
            == "engine.plugins.adapters.verl.interactions"
        )
    assert current("engine.errors:EngineError") == "engine.errors:EngineError"
