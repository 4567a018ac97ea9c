"""Adapters: their names, where they run, and what is checked of `use`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from chat_kit import make_tokenizer
from command_line import engine_apart

from engine.errors import SpecError
from engine.schemas.entry import ADAPTERS, EnvironmentSpec, IsolationSpec
from engine.spec.access import Access
from engine.spec.code.entry import load_entry
from engine.spec.load import LoadedSpec, load_spec
from engine.validate import check_spec
from engine.validate.code.source import Definition, Sources, declared_events

GAME = "def build_env(sample=None, args=None): ...\n"


def load(folder: Path, environment: dict[str, Any], **changes: Any) -> LoadedSpec:
    (folder / "env_game.py").write_text(GAME)
    spec = {
        "spec": "episode/v1",
        "name": "demo",
        "model": {"path": "org/m"},
        "tasks": {"source": "inline", "rows": [{"q": "a"}]},
        "prompt": [{"role": "user", "content": "{{q}}"}],
        "environment": {"adapter": "slime", "use": "env_game.py:build_env", **environment},
        "machine": "step",
        **changes,
    }
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    return load_spec(folder / "spec.yaml")


def errors(loaded: LoadedSpec) -> list[str]:
    return [f"{item.rule}: {item.message}" for item in check_spec(loaded) if item.rule.startswith("code.")]


def test_a_spec_with_an_adapter_is_valid(tmp_path: Path) -> None:
    assert errors(load(tmp_path, {})) == []


def test_an_unknown_adapter_is_refused_and_the_names_are_listed(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no `adapter: slimy`") as caught:
        load(tmp_path, {"adapter": "slimy"})
    assert "`slime`" in str(caught.value)
    (error,) = caught.value.diagnostics
    assert error.path == ("environment", "adapter")


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("games/env.py:build_env", "there is no file `games/env.py`"),
        ("env_game.py", "`env_game.py` names no function or class"),
        ("env_gam:build_env", "there is no module `env_gam`"),
        ("env_game:build", "`env_game` has no `build`"),
    ],
)
def test_what_use_names_must_be_there(tmp_path: Path, use: str, message: str) -> None:
    (found,) = errors(load(tmp_path, {"use": use}))
    assert found.startswith("code.adapter: ")
    assert message in found


@pytest.mark.parametrize(
    ("own", "whole", "mode"),
    [
        (None, None, "process"),
        ("thread", None, "thread"),
        (None, "thread", "thread"),
        ({"memory": "1GB"}, None, "process"),
        (None, {"memory": "1GB"}, "process"),
    ],
)
def test_a_worker_process_is_the_default(tmp_path: Path, own: Any, whole: Any, mode: str) -> None:
    parts = {"isolation": own} if own else {}
    loaded = load(tmp_path, parts, **({"isolation": whole} if whole else {}))
    found = loaded.spec.environment_isolation
    assert found.mode == mode
    if "memory" in str((own, whole)):
        assert found.memory == IsolationSpec.model_validate({"memory": "1GB"}).memory
    assert [item.rule for item in check_spec(loaded) if item.rule == "isolation.no-effect"] == []


@pytest.mark.parametrize(("where", "said"), [({}, True), ({"isolation": "thread"}, False)])
def test_without_worker_processes_an_adapter_says_what_to_install(
    tmp_path: Path, where: dict[str, Any], said: bool
) -> None:
    load(tmp_path, where)
    checked = engine_apart("validate", tmp_path / "spec.yaml", cwd=tmp_path, ENGINE_PLUGINS_OFF="isolation")
    message = (
        "error[code.adapter] the adapter `slime` runs with `isolation: process`: it belongs to the plugin `isolation`"
    )
    assert (message in checked.stdout + checked.stderr) is said


@pytest.mark.parametrize("name", ADAPTERS.of_plugins())
def test_its_class_says_what_the_table_says(name: str) -> None:
    """Each is importable without its library, and its events are readable as text."""
    facts = ADAPTERS.of_plugins()[name]
    assert facts.name == name
    adapter = load_entry(facts.runs, None)
    assert callable(adapter.reset)
    if callable(getattr(adapter, "step", None)):
        definition = Sources(None, Access()).entry(facts.runs).definition
        assert isinstance(definition, Definition)
        assert declared_events(definition.node) == adapter.events
    assert EnvironmentSpec(adapter=facts.name, use="x").effects == facts.effects


ENVIRONMENTS = """\
class Plain:
    def reset(self, task, seed): ...

class With(Plain):
    def reset(self, task, seed): ...
    def tools(self): return [print]

class Inherits(With):
    pass
"""


@pytest.mark.parametrize("imports", [True, False])
@pytest.mark.parametrize(
    ("environment", "brings"),
    [
        ({"adapter": "verl", "use": "tools.yaml"}, True),
        ({"adapter": "slime", "use": "env_game.py:build_env"}, False),
        ({"adapter": "verifiers", "use": "env_game.py:load_environment"}, None),
        ({"use": "own_env:With"}, True),
        ({"use": "own_env:Plain"}, False),
        ({"use": "own_env:Inherits"}, True),
    ],
)
def test_tools_of_an_environment_are_known(
    tmp_path: Path, environment: dict[str, Any], brings: bool | None, imports: bool
) -> None:
    """`model.no-tools` and `tools.missing` count the tools that an environment brings, where that is known."""
    (tmp_path / "own_env.py").write_text(ENVIRONMENTS)
    (tmp_path / "tools.yaml").write_text("tools: []\n")
    make_tokenizer(tmp_path / "model", "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}")
    (tmp_path / "model" / "config.json").write_text("{}")
    own = {} if "adapter" in environment else {"adapter": None}
    loaded = load(tmp_path, {**own, **environment}, machine="tools", model={"path": "model"})
    loaded = replace(loaded, access=Access(imports=imports))
    found = {item.rule for item in check_spec(loaded)}
    assert ("model.no-tools" in found, "tools.missing" in found) == (brings is True, brings is False)


def test_tools_at_says_where(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text("tools: []\n")
    make_tokenizer(tmp_path / "model", "{% for m in messages %}{{ m.content }}{% endfor %}")
    (tmp_path / "model" / "config.json").write_text("{}")
    loaded = load(tmp_path, {"adapter": "verl", "use": "tools.yaml"}, machine="tools", model={"path": "model"})
    (found,) = [item for item in check_spec(loaded) if item.rule == "model.no-tools"]
    assert found.origin is not None
    assert (tmp_path / "spec.yaml").read_text().splitlines()[found.origin.line - 1].strip() == "use: tools.yaml"
