"""The engine without each of its plugins, and without all: other commands work, and naming the plugin gives the command that installs it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from one_deleted import OWN, ROOT, copy_without, python
from written_specs import Spec, save_spec, scripted_spec

from engine.known_plugins import KNOWN
from engine.plugin import installed

NAMING: dict[str, Spec] = {
    "adapters": {
        "environment": {"adapter": "gymnasium", "use": "FrozenLake-v1"},
        "tools": [{"adapter": "mcp", "use": "serve"}],
    },
    "agents": {"agent": {"run": "true"}},
    "chat_apis": {
        "backend": {"kind": "openai", "url": "http://127.0.0.1:9/v1", "model": "m"},
        "rollout": {"max_cost": 1},
    },
    "condense": {"condense": {"expand": True}},
    "credit_methods": {"rewards": {"credit": {"method": "score"}}},
    "critic": {"train": {"critic": {"kind": "probe"}}},
    "difficulty": {"train": {"difficulty": {"window": 4}}},
    "drivers": {"rollout": {"drivers": 2}},
    "evaluation": {"train": {"eval": {}}},
    "confinement": {"tools": [{"use": "engine.plugins.confinement.sandbox:Python"}]},
    "harbor": {"tasks": {"source": "harbor", "path": "tasks"}},
    "isolation": {"environment": {"use": "engine.environments.arithmetic:Arithmetic", "isolation": "process"}},
    "launch": {"backend": {"kind": "sglang", "launch": {"gpus": 0}}},
    "local": {"backend": {"kind": "local"}},
    "lora": {"train": {"lora": {}}},
    "notices": {"notify": {"to": [{"kind": "command", "run": "true"}]}},
    "plan": {"train": {"plan": {}}},
    "preparing": {"tasks": {"source": "inline", "rows": [{"id": "a"}], "id": "id", "overlong": "drop"}},
    "retention": {"rollout": {"keep": {"steps": 2}}},
    "roles": {"user": {"prompt": [{"role": "user", "content": "{{reply}}"}]}},
    "report": {"train": {"report_to": ["tensorboard"]}},
    "sft": {"train": {"kind": "sft", "data": {"path": "rows.jsonl"}}},
    "traces": {"traces": {}},
    "sglang": {"backend": {"kind": "sglang", "urls": ["http://127.0.0.1:9"]}},
    "vllm": {"backend": {"kind": "vllm", "urls": ["http://127.0.0.1:9"]}},
    "weights": {"backend": {"kind": "sglang", "urls": ["http://127.0.0.1:9"]}, "train": {}},
}
"""Plugin -> keys of a spec that name it. What commands name it is in `KNOWN`."""
CONDENSING: Spec = {
    "preset": "single_turn",
    "states": {"CONDENSING": {"action": "condense"}},
    "transitions": [
        {"trigger": "answered", "source": "GENERATING", "dest": "CONDENSING"},
        {"trigger": ["condensed", "unchanged"], "source": "CONDENSING", "dest": "GENERATING"},
    ],
}
"""A machine with an action of a plugin, and its events."""
RUNNING: Spec = {
    "preset": "single_turn",
    "states": {"RUNNING": {"action": "run_agent"}},
    "transitions": [
        {"trigger": "answered", "source": "GENERATING", "dest": "RUNNING"},
        {"trigger": "request", "source": "RUNNING", "dest": "GENERATING"},
        {"trigger": ["exited", "died", "timeout"], "source": "RUNNING", "dest": "DONE"},
    ],
}
FURTHER: dict[str, list[Spec]] = {
    "agents": [{"machine": "agent"}, {"machine": RUNNING}],
    "condense": [{"limits": {"on_overflow": "condense", "condensations": 2}}, {"machine": CONDENSING}],
}
"""Plugin -> keys of further specs that name it in another way."""
NAMED_WITH = {"launch": "sglang", "weights": "sglang"}
"""Plugin -> another one that its spec in `NAMING` names too, and that is missed first."""
UNNAMED = {"learning_signal", "plots", "servers"}
"""Plugins that only take part in what happens anyway, or that only others need."""
IMPORTS = "engine.plugins.{}"


def specs_naming(name: str) -> list[Spec]:
    """Keys of the specs that name a plugin, one spec each."""
    return [*([NAMING[name]] if name in NAMING else []), *FURTHER.get(name, ())]


def named_by(name: str, spec: str) -> list[list[str]]:
    """Command lines that name a plugin, without a spec that does."""
    lines = [command.split() for command in KNOWN[name].get("commands", ())]
    lines += [["export", "latest", "--format", kind] for kind in KNOWN[name].get("export_formats", ())]
    lines += [["validate", spec, "--format", kind] for kind in KNOWN[name].get("findings_formats", ())]
    lines += [["graph", spec, "--format", kind] for kind in KNOWN[name].get("graph_formats", ())]
    return lines + [["validate", spec, "--trainer", trainer] for trainer in KNOWN[name].get("trainers", ())[:1]]


def request(names: list[str], folder: Path, tokenizer: Path) -> dict[str, Any]:
    """The commands that work without the plugins, and then one for each thing of them that can be named."""
    plain = scripted_spec("plain", tokenizer, ["Done."], tool_calls=None) | {"machine": "single_turn"}
    valid = str(save_spec(folder / "plain.yaml", plain))
    commands = [["--help"], ["validate", valid], ["run", valid, "--quiet", "--out", str(folder / "runs")]]
    for name in names:
        commands += named_by(name, valid)
        for number, keys in enumerate(specs_naming(name)):
            commands.append(["validate", str(save_spec(folder / f"{name}{number}.yaml", plain | keys))])
    skipped = set(names)
    while needing := {name for name, face in installed().plugins.items() if skipped & set(face.needs)} - skipped:
        skipped |= needing
    return {"skipped": [IMPORTS.format(name) for name in skipped], "commands": commands}


def answers(
    names: list[str], copy: Path, folder: Path, tokenizer: Path, off: str = "", skipped: list[str] | None = None
) -> Any:
    asked = request(names, folder, tokenizer)
    asked["skipped"] = skipped or asked["skipped"]
    script = str(Path(__file__).parent / "without_plugins.py")
    done = python(copy, script, json.dumps(asked), str(copy), at=folder, off=off)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def missed(name: str) -> str:
    return f"it belongs to the plugin `{name}`, which is not installed: {KNOWN[name]['install'][0]}"


def check(names: list[str], found: Any) -> None:
    assert found["unimportable"] == {}
    for code, text in found["answers"][:3]:
        assert (code, "check.plugin" in text) == (0, False), text
    named = iter(found["answers"][3:])
    for name in names:
        for _ in named_by(name, ""):
            code, text = next(named)
            assert (code, missed(name) in " ".join(text.replace("│", " ").split())) == (2, True), text
        first = NAMED_WITH.get(name)
        told = missed(first if first and first in names else name)
        for _ in specs_naming(name):
            code, text = next(named)
            assert (code, text.count("error["), told in text) == (1, 1, True), text


ALONE = [name for name in OWN if name != "servers"]
"""Plugins that others do not need: several may be left out, and each is still named."""
FEW = 6
"""Groups of plugins that CI leaves out together."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        *(ALONE[at::FEW] for at in range(FEW)),
        ["servers"],
        *(pytest.param([name], marks=pytest.mark.exhaustive) for name in ALONE),
    ],
    ids=" ".join,
)
def test_without_their_folders(names: list[str], tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    copy = copy_without(names, tmp_path / "copy")
    check(names, answers(names, copy, tmp_path, tiny_tokenizer_dir))


@pytest.mark.slow
def test_without_any_folder(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    copy = copy_without(OWN, tmp_path / "copy")
    check(OWN, answers(OWN, copy, tmp_path, tiny_tokenizer_dir))


@pytest.mark.slow
@pytest.mark.parametrize("off", [*(pytest.param(name, marks=pytest.mark.exhaustive) for name in OWN), "*"])
def test_left_out_by_the_variable(off: str, tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """As without the folder; what is imported is shown there."""
    names = OWN if off == "*" else [off]
    check(names, answers(names, ROOT, tmp_path, tiny_tokenizer_dir, off=off, skipped=["engine"]))


@pytest.mark.slow
def test_an_import_of_a_plugin_by_the_core_is_found(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    copy = copy_without(["doctor"], tmp_path / "copy")
    with (copy / "engine" / "deadline.py").open("a") as module:
        module.write("\n\ndef late() -> None: ...\n\n\nimport engine.plugins.doctor\n")
    asked = request(["doctor"], tmp_path, tiny_tokenizer_dir) | {"commands": []}
    done = python(copy, str(Path(__file__).parent / "without_plugins.py"), json.dumps(asked), str(copy), at=tmp_path)
    unimportable = json.loads(done.stdout.splitlines()[-1])["unimportable"]
    assert unimportable["engine.deadline"] == "ModuleNotFoundError: No module named 'engine.plugins.doctor'"


def test_every_plugin_can_be_named() -> None:
    named = {name for name in KNOWN if named_by(name, "")}
    assert set(OWN) == named | set(NAMING) | UNNAMED == set(KNOWN)


def test_no_module_of_the_core_names_a_plugin() -> None:
    root = Path(sys.modules["engine"].__file__ or "").parent
    files = [file for file in root.rglob("*.py") if "plugins" not in file.relative_to(root).parts]
    assert [
        file for file in files if "import engine.plugins" in (text := file.read_text()) or "from engine.plugins" in text
    ] == []


def test_a_plugin_imports_only_those_that_its_face_needs() -> None:
    root = Path(sys.modules["engine"].__file__ or "").parent / "plugins"
    strange = set()
    for file in root.rglob("*.py"):
        name = file.relative_to(root).parts[0]
        named = set(re.findall(r"(?:from|import) engine\.plugins\.(\w+)", file.read_text())) - {name}
        strange |= {(name, other) for other in named if other not in installed().plugins[name].needs}
    assert strange == set()
