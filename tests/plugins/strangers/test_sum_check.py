"""The example of a tool box with an action in a package of its own: examples/sum_check."""

from __future__ import annotations

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import code_for_training
import pytest
import yaml
from layers import ROOT, engine, install, write_plugin
from trainings import metric_lines
from written_specs import listener_spec, save_spec, scripted_spec

from engine.store import RunStore

PACKAGE = ROOT / "examples" / "sum_check"
CHECKED = {
    "preset": "tools",
    "states": {"CHECKING": {"action": "check_sums"}},
    "transitions": [
        {"trigger": "answered", "source": "GENERATING", "dest": "CHECKING"},
        {"trigger": "wrong", "source": "CHECKING", "dest": "GENERATING"},
        {"trigger": ["right", "unchecked"], "source": "CHECKING", "dest": "DONE"},
    ],
}
CALL = '<tool_call>{"name": "check_sums", "arguments": {"text": "17 + 25 = 43\\n17 + 25 = 42"}}</tool_call>'
REPLIES = [CALL, "17 + 25 = 43, so it is 43.", "17 + 25 = 42."]
WRONG = "`17 + 25 = 43` is wrong: the left side is 42.\nWrite your answer again."
NOT_INSTALLED = "its spec uses the plugin `sum_check`, which is not installed: pip install sum-check"


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package installed; pip builds it in a copy, because it leaves files beside it."""
    folder = tmp_path_factory.mktemp("layer")
    shutil.copytree(PACKAGE, folder / "source")
    install(folder / "source", folder / "site")
    return folder / "site"


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A folder without packages."""
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


def checked_spec(tokenizer: Path, replies: list[str] = REPLIES, **keys: Any) -> dict[str, Any]:
    section = {"sum_check": {"right": 0.5, "wrong": -1, "tool": True}}
    return scripted_spec("sums", tokenizer, replies) | section | {"machine": CHECKED} | keys


def findings(layer: Path, folder: Path, spec: dict[str, Any] | str) -> list[str]:
    """What `engine validate` says of a spec, notes left out, a line each."""
    (folder / "s.yaml").write_text(spec if isinstance(spec, str) else yaml.safe_dump(spec))
    answer = engine(layer, "validate", "s.yaml", "--format", "json", cwd=folder)
    assert answer.stdout, answer.stderr
    found = json.loads(answer.stdout)["specs"][0]["diagnostics"]
    return [
        f"{each['line']}:{each['column']} {each['severity']} {each['rule']} {each['message']}; {each['fix']}"
        for each in found
        if each["severity"] != "info"
    ]


def run_spec(layer: Path, folder: Path, spec: dict[str, Any]) -> Path:
    """The folder of the only run of a spec."""
    ran = engine(layer, "run", save_spec(folder / "sums.yaml", spec), "--quiet", "--out", "runs", cwd=folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (run,) = (folder / "runs").iterdir()
    return run


def shown(layer: Path, run: Path) -> dict[str, Any]:
    """The only episode of a run, as `engine show` prints it."""
    answer = engine(layer, "show", run, "t0/0", "--json", cwd=run)
    assert answer.returncode == 0, answer.stderr
    episode: dict[str, Any] = json.loads(answer.stdout)
    return episode


@pytest.mark.parametrize(
    ("text", "sums"),
    [
        ("17 + 25 = 43, so it is 43.", [("17 + 25 = 43", "42", False)]),
        ("- 3 * 4 + 5 = 12 + 5 = 17", [("3 * 4 + 5 = 12 + 5", "17", True), ("3 * 4 + 5 = 17", "17", True)]),
        ("1. 12 × 3 = 36, 12 − 3 = 8", [("12 × 3 = 36", "36", True), ("12 − 3 = 8", "9", False)]),
        ("10/3 = 3.33; 2/3 = 0.66", [("10/3 = 3.33", "3.333333333 (exactly 10/3)", True), ("2/3 = 0.66", "0.6666666667 (exactly 2/3)", False)]),
        ("x + 4 = 10, 2x = 4, f(2) + 3 = 9, 5 + 5 = 2x, y = 5, 7 = 7, 9**9**9 = 1, (1 + 2 = 3", []),
        ("1 + 1 = 2\n" * 60, [("1 + 1 = 2", "2", True)] * 50),
        ("9**999 * " * 30 + "3 = 4 = " * 20_000, []),
    ],
)  # fmt: skip
def test_sums_of_a_text(text: str, sums: list[tuple[str, str, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PACKAGE)  # not installed there, so the engine of this process does not see a plugin
    try:
        checked = import_module("sum_check.sums").checked_sums(text)
        assert [(each.text, each.value, each.right) for each in checked] == sums
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sum_check"]:
            del sys.modules[name]


@pytest.mark.slow
def test_an_episode_ends_through_its_action(layer: Path, tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    spec = checked_spec(tiny_tokenizer_dir)
    assert findings(layer, tmp_path, spec) == []
    episode = shown(layer, run_spec(layer, tmp_path, spec))
    assert [(step["state"], step["event"], step["dest"]) for step in episode["path"]] == [
        ("PENDING", "ready", "GENERATING"),
        ("GENERATING", "tool_calls", "AWAITING_TOOL"),
        ("AWAITING_TOOL", "results", "GENERATING"),
        ("GENERATING", "answered", "CHECKING"),
        ("CHECKING", "wrong", "GENERATING"),
        ("GENERATING", "answered", "CHECKING"),
        ("CHECKING", "right", "DONE"),
        ("DONE", "", ""),
    ]
    checks = [(step["sums"], step["wrong"]) for step in episode["path"] if step["kind"] == "sum_check"]
    assert checks == [(1, 1), (1, 0)]
    messages = [(each["role"], "".join(part["text"] for part in each["parts"])) for each in episode["messages"]]
    assert messages[2:] == [
        ("tool", "17 + 25 = 43: wrong, it is 42\n17 + 25 = 42: right"),
        ("assistant", REPLIES[1]),
        ("user", WRONG),
        ("assistant", REPLIES[2]),
    ]
    assert [turn["rewards"] for turn in episode["turns"]] == [{}, {"sums": -1.0}, {"sums": 0.5}]
    assert [each["source"] for each in episode["postings"]] == ["check_sums"] * 2


@pytest.mark.slow
def test_its_limit_ends_an_episode_and_stands_in_guards(layer: Path, tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    wrong, limits = ["1 + 1 = 3."] * 4, {"sum_checks": 2}
    spec = checked_spec(tiny_tokenizer_dir, wrong, limits=limits, sum_check={"right": 1})
    spec["machine"] = CHECKED | {"preset": "single_turn"}
    assert findings(layer, tmp_path, spec) == []
    ended = shown(layer, run_spec(layer, tmp_path, spec))
    assert (ended["outcome"]["event"], ended["outcome"]["limit"], len(ended["turns"])) == ("limit", "sum_checks", 3)
    assert [turn["rewards"] for turn in ended["turns"]] == [{"sums": -0.5}, {"sums": -0.5}, {}]

    (tmp_path / "guarded").mkdir()
    guard = "sums.checks < limits.sum_checks"
    answered = [{"trigger": "answered", "source": "GENERATING", "dest": "CHECKING", "conditions": guard}]
    spec["machine"] = CHECKED | {"preset": "single_turn", "transitions": [*answered, *CHECKED["transitions"][1:]]}
    ended = shown(layer, run_spec(layer, tmp_path / "guarded", spec))
    assert (ended["outcome"]["event"], ended["outcome"]["limit"], len(ended["turns"])) == ("answered", None, 3)


@pytest.mark.slow
def test_a_training_takes_a_step_with_it(layer: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    """Every reply is checked and then goes to the listener, whose rewards train."""
    transitions = [
        {"trigger": ["answered", "truncated"], "source": "GENERATING", "dest": "CHECKING"},
        {"trigger": ["right", "unchecked"], "source": "CHECKING", "dest": "AWAITING_USER_FEEDBACK"},
        {"trigger": "wrong", "source": "CHECKING", "dest": "GENERATING"},
    ]
    spec = {
        **listener_spec("sums", tiny_model_dir),
        "backend": {"kind": "local", "dtype": "float32"},
        "sum_check": {"wrong": -1},
        "machine": {"preset": "tools_and_user", "states": CHECKED["states"], "transitions": transitions},
        "limits": {"turn_tokens": 6, "assistant_turns": 2},
        "rollout": {"samples_per_task": 4, "seed": 3},
        "train": {"steps": 1, "tasks_per_step": 2},
    }
    shutil.copy(code_for_training.__file__, tmp_path)
    found = findings(layer, tmp_path, spec)
    assert [line for line in found if "sum" in line or "user-after-user" in line or " error " in line] == []
    trained = engine(layer, "train", "s.yaml", "--quiet", "--out", "trained", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    (folder,) = (file.parent for file in (tmp_path / "trained").glob("*/metrics.jsonl"))
    (line,) = metric_lines(folder)
    assert (line["step"], line["grad_norm"] > 0) == (1, True)
    with RunStore.open(folder / "rollouts", readonly=True) as store:
        kinds = [[entry.record.kind for entry in store.journal(name)] for name in store.finished()]
    assert kinds == [["reset", *["generation", "sum_check", "user"] * 2, "score"]] * 8


@pytest.mark.slow
def test_it_is_listed_and_stands_in_the_schema(layer: Path, tmp_path: Path) -> None:
    listed = engine(layer, "plugins", "--json", cwd=tmp_path)
    row = {row["name"]: row for row in map(json.loads, listed.stdout.splitlines())}["sum_check"]
    assert row["package"] == "sum-check 1.0"
    assert row["adds"] == {
        "install": ["pip install sum-check"],
        "sections": ["sum_check", "limits.sum_checks"],
        "actions": ["check_sums"],
        "limits": ["sum_checks"],
        "records": ["sum_check"],
    }
    assert engine(layer, "schema", tmp_path / "out", cwd=tmp_path).returncode == 0
    schemas = tmp_path / "out" / "schemas" / "json"
    episode = json.loads((schemas / "episode.schema.json").read_text())
    assert set(episode["$defs"]["SumCheckSpec"]["properties"]) == {"right", "wrong", "tool"}
    assert episode["$defs"]["LimitsSpec"]["properties"]["sum_checks"]["default"] == 3
    assert "SumCheckRecord" in (schemas / "journal-entry.schema.json").read_text()
    assert "# `sum_check.no-effect`" in engine(layer, "explain", "sum_check.no-effect", cwd=tmp_path).stdout


KEYS = """\
spec: episode/v1
name: s
model: {path: org/m}
tasks: {source: inline, rows: [{question: x}]}
prompt: [{role: user, content: "{{question}}"}]
"""


@pytest.mark.slow
def test_its_keys_and_its_rule_are_checked(layer: Path, tmp_path: Path) -> None:
    single = KEYS + "machine: single_turn\n"
    misspelt = single + "sum_check: {wrnog: -1}\nlimits: {sum_chekcs: 2}\n"
    assert findings(layer, tmp_path, misspelt) == [
        "7:13 error spec.unknown-key unknown key `wrnog`; did you mean `wrong`?",
        "8:10 error spec.unknown-key unknown key `sum_chekcs`; did you mean `sum_checks`?",
    ]
    no_effect = "`wrong` has no effect: no state checks sums; add a state with `action: check_sums`, or remove `wrong`"
    page = (PACKAGE / "sum_check" / "pages" / "sum_check.no-effect.md").read_text()
    bad, good = (part.partition("```")[0] for part in page.split("```yaml\n")[1:])
    assert findings(layer, tmp_path, KEYS + bad) == [f"6:20 warning sum_check.no-effect {no_effect}"]
    assert findings(layer, tmp_path, KEYS + good) == []


@pytest.mark.slow
def test_rules_of_the_core_know_what_its_action_writes(layer: Path, tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """The only rewards are those of the action, and a user speaks after it only where it was silent."""
    moved = {"at": "CHECKING", "op": "transfer", "turn": "last", "to": "first", "name": "sums", "share": 0.5}
    moved["when"] = "turns.assistant > 1"
    spec = checked_spec(tiny_tokenizer_dir, sum_check={"wrong": -1}, rewards={"reassign": [moved]})
    spec["machine"] = CHECKED | {"preset": "single_turn"}
    assert findings(layer, tmp_path, spec) == []
    spec["rewards"] = {"reassign": [moved | {"name": "sumz"}]}
    (line,) = findings(layer, tmp_path, spec)
    assert "rewards.unknown-name nothing writes a reward `sumz`" in line
    assert line.endswith("did you mean `sums`?")


@pytest.mark.slow
def test_without_the_package_a_spec_that_names_it_has_one_error(empty: Path, tmp_path: Path) -> None:
    machine = yaml.safe_dump({"machine": CHECKED | {"preset": "single_turn"}})
    (key,) = findings(empty, tmp_path, f"{KEYS}sum_check: {{wrong: -1}}\n{machine}")
    assert key.startswith("6:1 error spec.unknown-key unknown key `sum_check`; known here: spec, name, ")
    (action,) = findings(empty, tmp_path, KEYS + machine)
    known = "known: ask_summary, ask_user, call_tools, condense, generate, reset, run_agent, score, step"
    assert f"error machine.unknown-action there is no action `check_sums`; {known}" in action


CAUSE = "ModuleNotFoundError: No module named 'no_such_library'"


def broken_copy(layer: Path, folder: Path, module: str) -> Path:
    """A copy of the layer in which a module of the package cannot be imported."""
    site = folder / "site"
    shutil.copytree(layer, site, ignore=shutil.ignore_patterns("__pycache__"))
    file = site / "sum_check" / f"{module}.py"
    file.write_text(file.read_text().replace("annotations\n", "annotations\n\nimport no_such_library\n", 1))
    return site


BROKEN = ("action", "facts", "record", "rules", "spec", "spec_facts")


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        pytest.param(module, marks=[] if module in ("action", "rules") else [pytest.mark.exhaustive])
        for module in BROKEN
    ],
)
def test_a_broken_one_is_told_once_with_its_cause(
    module: str, layer: Path, tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    """Specs that do not use it are valid and run; one that does is refused before it runs."""
    site = broken_copy(layer, tmp_path, module)
    plain = scripted_spec("plain", tiny_tokenizer_dir, ["Yes."], tool_calls=None) | {"machine": "single_turn"}
    told = [f"1:1 warning check.plugin the plugin `sum_check` cannot be used: {CAUSE}"]
    lazy = module in ("action", "record", "spec_facts")  # imported only where a spec uses the plugin
    assert [line.partition(";")[0] for line in findings(site, tmp_path, plain)] == ([] if lazy else told)
    run_spec(site, tmp_path, plain)

    (error,) = findings(site, tmp_path, checked_spec(tiny_tokenizer_dir))
    named = "error check.plugin the plugin `sum_check` cannot be used:" if lazy else "unknown key `sum_check`"
    assert named in error
    if lazy:
        assert CAUSE in error
    refused = engine(site, "run", "s.yaml", "--quiet", "--out", "refused", cwd=tmp_path)
    assert (refused.returncode, CAUSE in " ".join(refused.stderr.split())) == (1, True), refused.stderr
    assert not (tmp_path / "refused").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["action", *(pytest.param(module, marks=pytest.mark.exhaustive) for module in ("spec", "spec_facts"))]
)
def test_a_stored_run_is_not_replayed_with_a_broken_one(
    module: str, layer: Path, tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    run, site = run_spec(layer, tmp_path, checked_spec(tiny_tokenizer_dir)), broken_copy(layer, tmp_path, module)
    assert engine(site, "show", run, "t0/0", cwd=tmp_path).returncode == 0
    state = f"its spec uses the plugin `sum_check`, which cannot be used ({CAUSE}): pip install sum-check"
    for command in (["replay", run], ["run", "--resume", run]):
        refused = engine(site, *command, cwd=tmp_path)
        assert (refused.returncode, state in " ".join(refused.stderr.split())) == (1, True), refused.stderr


@pytest.mark.slow
def test_an_action_of_the_core_cannot_be_replaced(tmp_path: Path) -> None:
    face = "PLUGIN = Plugin(name='grab', about='', actions={'generate': 'm:f'}, install='pip install grab')"
    write_plugin(tmp_path / "site", "grab", face)
    (line,) = findings(tmp_path / "site", tmp_path, KEYS + "machine: single_turn\n")
    taken = "the plugin `grab` cannot be used: `generate` in `actions` is a name of the engine's own"
    assert line.startswith(f"1:1 warning check.plugin {taken};")


@pytest.mark.slow
def test_a_stored_run_is_read_without_it_and_not_continued(
    layer: Path, empty: Path, tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    run = run_spec(layer, tmp_path, checked_spec(tiny_tokenizer_dir))
    replayed = engine(layer, "replay", run, cwd=tmp_path)
    assert (replayed.returncode, "1 the same to the byte" in replayed.stdout) == (0, True), replayed.stderr

    rows = []
    for site in (layer, empty):
        out = tmp_path / f"{site.name}.jsonl"
        answer = engine(site, "export", run, "--format", "jsonl", "--out", out, cwd=tmp_path)
        assert answer.returncode == 0, answer.stderr
        rows.append(out.read_bytes())
    assert rows[0] == rows[1] != b""
    with_it, without = shown(layer, run), shown(empty, run)
    for key in ("messages", "turns", "postings", "outcome"):
        assert with_it[key] == without[key]
    told = engine(empty, "show", run, "t0/0", cwd=tmp_path)
    assert (told.returncode, "check_sums: 1 of 1 sums wrong" in told.stdout) == (0, True), told.stderr

    for command in (["replay", run], ["run", "--resume", run], ["replay", run, "--from-turn", "1"]):
        refused = engine(empty, *command, cwd=tmp_path)
        said = " ".join((refused.stdout + refused.stderr).split())
        assert (refused.returncode, NOT_INSTALLED in said) == (1, True), said
