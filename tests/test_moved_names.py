"""Old names of public modules: an import names the new module, and an entry point is read as the new one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from command_line import engine_apart

from engine import moved_names
from engine.moved_names import MOVED, current, new_module
from engine.spec.code.entry import load_entry

DATA = Path(__file__).parent / "data"


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
    assert sys.meta_path.count(moved_names) == 1


def test_an_entry_point_is_read_as_the_new_one_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOVED, "engine.old:Error", "engine.errors:EngineError")
    from engine.errors import EngineError

    with pytest.warns(FutureWarning, match="`engine.old:Error` is `engine.errors:EngineError` now"):
        assert load_entry("engine.old:Error", None) is EngineError
    with pytest.warns(FutureWarning):
        assert current("engine.checks.registry:rule") == "engine.validate.registry:rule"
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


EARLIER = (DATA / "earlier_names.txt").read_text().split()
"""The names of the docs' Python examples and of the shipped specs, before any of them moved."""


@pytest.mark.parametrize("use", EARLIER)
def test_an_earlier_public_name_is_there_or_its_import_says_where(use: str) -> None:
    module, _, name = use.partition(":")
    new = new_module(module)
    if new is not None:
        with pytest.raises(ImportError, match=r"`engine\.plugins\.[\w.]+` now"):
            import_module(module)
    found = find_spec(new or module)
    assert found is not None
    assert found.origin is not None
    in_text = re.search(rf"\b{name}\b", Path(found.origin).read_text())  # some modules need a trainer to be imported
    assert in_text or find_spec(f"{found.name}.{name}") is not None


def test_a_project_of_an_earlier_version_runs_and_its_tests_say_what_to_import(tmp_path: Path) -> None:
    project = tmp_path / "shop-user"
    shutil.copytree(DATA / "earlier_project", project)
    tests = (project / "test_shop_user.txt").rename(project / "test_shop_user.py")
    valid = engine_apart("validate", "--import", "shop-user/spec.yaml", cwd=tmp_path)
    assert (valid.returncode, valid.stdout) == (0, "1 spec valid\n"), valid.stderr
    assert engine_apart("run", "shop-user/spec.yaml", "-q", cwd=tmp_path).returncode == 0

    def failing() -> str:
        done = subprocess.run(
            [sys.executable, "-m", "unittest", "discover", "-s", str(project)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        return done.stderr if done.returncode else ""

    for old, new in (("engine.checks", "engine.validate"), ("engine.scenarios", "engine.plugins.scenarios")):
        assert f"ModuleNotFoundError: `{old}` is `{new}` now" in failing()
        tests.write_text(tests.read_text().replace(f"from {old}", f"from {new}"))
    assert failing() == ""


def test_validate_finds_an_old_entry_point_with_its_place(tmp_path: Path) -> None:
    old = "engine.integrations.environments.reasoning_gym:problems"
    (tmp_path / "s.yaml").write_text(
        "spec: episode/v1\nname: demo\nmodel: {path: tiny-qwen2}\nbackend: {kind: scripted, replies: [x]}\n"
        f"tasks: {{source: python, use: '{old}', with: {{datasets: [basic_arithmetic], size: 2}}}}\n"
        'machine: single_turn\nprompt: [{role: user, content: "{{question}}"}]\n'
    )
    done = engine_apart("validate", "s.yaml", cwd=tmp_path)
    assert (
        f"s.yaml:5:30: warning[code.moved] `{old}` is `engine.plugins.adapters.reasoning_gym:problems` now"
        in done.stdout
    )
    assert (done.returncode, done.stderr) == (0, "")
