"""The example of a plugin in a package of its own: examples/tilt_loss."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import code_for_training
import pytest
import yaml
from layers import ROOT, engine, install, write_plugin
from trainings import metric_lines
from written_specs import TALKS_ON_WHEN_CUT, listener_spec

SPEC = """\
spec: episode/v1
name: s
model: {path: org/m}
tasks: {source: inline, rows: [{question: x}]}
prompt: [{role: user, content: "{{question}}"}]
machine: single_turn
"""


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package installed; pip builds it in a copy, because it leaves files beside it."""
    folder = tmp_path_factory.mktemp("layer")
    shutil.copytree(ROOT / "examples" / "tilt_loss", folder / "source")
    install(folder / "source", folder / "site")
    return folder / "site"


def findings(layer: Path, folder: Path, tilt: str | None = None) -> list[str]:
    """What `engine validate` says of a spec with this loss, notes left out, a line each."""
    train = f"train: {{loss: {{kind: tilt, {tilt}}}}}\n" if tilt else ""
    (folder / "s.yaml").write_text(SPEC + train)
    answer = engine(layer, "validate", "s.yaml", "--format", "json", cwd=folder)
    found = json.loads(answer.stdout)["specs"][0]["diagnostics"]
    return [
        f"{each['line']}:{each['column']} {each['rule']} {each['message']}; {each['fix']}"
        for each in found
        if each["severity"] != "info"
    ]


@pytest.mark.slow
def test_its_keys_and_its_rule_are_checked(layer: Path, tmp_path: Path) -> None:
    assert findings(layer, tmp_path, "tilt: 0.5") == []
    assert findings(layer, tmp_path, "tlit: 0.5") == ["7:28 spec.unknown-key unknown key `tlit`; did you mean `tilt`?"]
    no_effect = "7:43 tilt.no-effect `most` has no effect with `tilt: 0`; set `tilt`, or remove `most`"
    assert findings(layer, tmp_path, "tilt: 0, most: 2") == [no_effect]


@pytest.mark.slow
def test_it_is_listed_and_stands_in_the_schema(layer: Path, tmp_path: Path) -> None:
    listed = engine(layer, "plugins", "--json", cwd=tmp_path)
    rows = {row["name"]: row for row in map(json.loads, listed.stdout.splitlines())}
    assert (rows["tilt"]["package"], rows["tilt"]["adds"]["losses"]) == ("tilt-loss 1.0", ["tilt"])
    assert engine(layer, "schema", tmp_path / "out", cwd=tmp_path).returncode == 0
    schema = json.loads((tmp_path / "out" / "schemas" / "json" / "episode.schema.json").read_text())
    assert set(schema["$defs"]["TiltLoss"]["properties"]) == {"kind", "tilt", "most"}
    assert "# `tilt.no-effect`" in engine(layer, "explain", "tilt.no-effect", cwd=tmp_path).stdout


@pytest.mark.slow
def test_a_step_has_the_loss_of_its_formula(layer: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    """In the first update each ratio is 1, so that each token's weight is 1 + tilt: the loss is 1.5 times that of CISPO."""
    losses = {}
    for kind, keys in {"tilt": {"tilt": 0.5}, "cispo": {}}.items():
        spec = {
            **listener_spec(kind, tiny_model_dir),
            "backend": {"kind": "local", "dtype": "float32"},
            "machine": TALKS_ON_WHEN_CUT,
            "limits": {"turn_tokens": 6, "assistant_turns": 2},
            "rollout": {"samples_per_task": 4, "seed": 3},
            "train": {"steps": 1, "tasks_per_step": 2, "loss": {"kind": kind, **keys}},
        }
        shutil.copy(code_for_training.__file__, tmp_path)
        (tmp_path / f"{kind}.yaml").write_text(yaml.safe_dump(spec))
        trained = engine(layer, "train", f"{kind}.yaml", "--quiet", "--out", tmp_path / kind, cwd=tmp_path)
        assert trained.returncode == 0, trained.stderr
        (folder,) = (file.parent for file in (tmp_path / kind).glob("*/metrics.jsonl"))
        losses[kind] = metric_lines(folder)[0]["loss"]
    assert losses["cispo"] != 0
    assert losses["tilt"] == pytest.approx(1.5 * losses["cispo"], rel=1e-5)


BROKEN = {
    "face": ("PLUGIN = Plugin(nmae='x')", "TypeError: Plugin.__init__() got an unexpected keyword argument 'nmae'"),
    "hook": ("PLUGIN = Plugin(name='hook', about='', hooks={'no_such': 'm:f'})", "there is no hook `no_such`"),
    "taken": (
        "PLUGIN = Plugin(name='taken', about='', commands={'doctor': 'm:f'})",
        "`doctor` has `commands doctor` already",
    ),
    "core": (
        "PLUGIN = Plugin(name='core', about='', losses={'grpo': 'm:f'})",
        "`grpo` in `losses` is a name of the engine's own",
    ),
    "gone": (
        "PLUGIN = Plugin(name='gone', about='', losses={'gone': 'no_module:Loss'})",
        "No module named 'no_module'",
    ),
    "rules": ("PLUGIN = Plugin(name='rules', about='', rules=('no_rules',))", "No module named 'no_rules'"),
    "exits": ("raise SystemExit('not here')", "SystemExit: not here"),
    "call": (
        "PLUGIN = Plugin(name='call', about='', hooks={'spec_facts': 'no_module:facts'})",
        "No module named 'no_module'",
    ),
    "thing": (
        "PLUGIN = Plugin(name='thing', about='', backends={'thing': 'json:dumps'})",
        "not a subclass of BackendBase",
    ),
    "kind": (
        "PLUGIN = Plugin(name='kind', about='', backends={'kind': 'engine.plugins.local.spec:LocalBackendSpec'})",
        "whose `kind` is local",
    ),
    "digits": (
        "PLUGIN = Plugin(name='digits', about='', commands={'digits': 'string:digits'})",
        "`digits` in `commands` names '0123456789', not a function",
    ),
    "group": (
        "PLUGIN = Plugin(name='group', about='', commands={'run fast': 'json:dumps'})",
        "there can be no command `run fast`; the groups of commands are import",
    ),
    "import": (
        "PLUGIN = Plugin(name='import', about='', commands={'import': 'json:dumps'})",
        "there can be no command `import`; the groups of commands are import",
    ),
    "needs": (
        "PLUGIN = Plugin(name='needs', about='', needs=('absent',))",
        "it needs the plugin `absent`, which is not there",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_one_is_one_warning_with_its_cause(name: str, tmp_path: Path) -> None:
    face, cause = BROKEN[name]
    write_plugin(tmp_path / "site", name, face)
    found = findings(tmp_path / "site", tmp_path)
    assert [cause in line for line in found if "check.plugin" in line] == [True], found


@pytest.mark.slow
def test_one_with_the_name_of_the_engine_s_own_changes_nothing_about_it(tmp_path: Path) -> None:
    write_plugin(tmp_path / "site", "report", "PLUGIN = Plugin(name='report', about='')")
    listed = engine(tmp_path / "site", "plugins", "--json", cwd=tmp_path)
    rows = {row["name"]: row for row in map(json.loads, listed.stdout.splitlines())}
    assert rows["report"]["package"].startswith("episode-engine ")
    other = rows["report (stranger_report 2.0)"]
    assert (other["package"], other["broken"]) == ("stranger_report 2.0", "a plugin `report` is there already")
    (warning,) = (line for line in findings(tmp_path / "site", tmp_path) if "check.plugin" in line)
    assert "ENGINE_PLUGINS_OFF" not in warning


@pytest.mark.slow
def test_a_kind_of_a_broken_one_is_told_why(tmp_path: Path) -> None:
    write_plugin(tmp_path / "site", "tilt", "PLUGIN = Plugin(name='tilt', about='', losses={'tilt': 'no_module:Loss'})")
    found = findings(tmp_path / "site", tmp_path, "tilt: 1")
    (error,) = (line for line in found if "spec.bad-value" in line)
    assert error.startswith("7:")
    assert (
        "it belongs to the plugin `tilt`, which cannot be used (ModuleNotFoundError: No module named 'no_module')"
        in error
    )
