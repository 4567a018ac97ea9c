"""`engine schema` writes what the loader accepts; an editor and the loader agree."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from command_line import engine_output
from installed_plugins import needs_plugin
from spec_page import spec_page

from engine.plugin import entries
from engine.plugins.schema.json_schema import CONTRACTS, EXAMPLES, documents
from engine.schemas.episode import EpisodeSpec
from engine.schemas.script import Script
from engine.spec.load import read_spec
from engine.spec.text.places import fields_by_key

ROOT = Path(__file__).parents[3]

run = partial(engine_output, "schema")

GOOD: dict[str, Any] = {
    "spec": "episode/v1",
    "name": "demo",
    "model": {"path": "org/m"},
    "tasks": {"source": "inline", "rows": [{"q": "a"}]},
}


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    document = json.loads(documents()["episode"])
    jsonschema.Draft202012Validator.check_schema(document)
    return jsonschema.Draft202012Validator(document)


@pytest.mark.slow
def test_every_schema_is_one() -> None:
    for text in documents().values():
        jsonschema.Draft202012Validator.check_schema(json.loads(text))
    assert sorted(documents()) == sorted([*CONTRACTS, "episode", *entries("schemas")])


def test_files_are_written_once_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(tmp_path)
    # Six commands write the same texts.
    monkeypatch.setattr("engine.plugins.schema.json_schema.documents", functools.cache(documents))
    status, output = run(root, "--check")
    assert status == 1
    assert "schemas/json/episode.schema.json is out of date" in output.splitlines()
    assert run(root)[0] == 0
    assert run(root, "--check") == (0, "")
    assert run(root) == (0, "everything is up to date\n")
    (tmp_path / "schemas/json/message.schema.json").write_text("{}")
    (tmp_path / "schemas/json/gone.schema.json").write_text("{}")
    assert run(root, "--check") == (
        1,
        "schemas/json/message.schema.json is out of date\nschemas/json/gone.schema.json is out of date\n"
        "run `engine schema` and commit what it writes\n",
    )
    run(root)
    assert run(root, "--check") == (0, "")
    assert not (tmp_path / "schemas/json/gone.schema.json").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"machine": "tools"},
        {"machine": {"preset": "tools"}},
        {"machine": {"initial": "A", "states": {"A": {"final": True}}}},
        {"user": {"use": "a:b", "with": {"x": 1}, "timeout": "5s"}},
        {"user": None},
        {"user": {"prompt": [{"role": "system", "content": "Be a user."}], "backend": {"kind": "local"}}},
        {
            "user": {
                "prompt": [{"role": "user", "content": "?"}],
                "model": {"path": "org/m"},
                "marks": [{"text": "[DONE]"}],
            }
        },
        {
            "user": {
                "prompt": [{"role": "user", "content": "?"}],
                "marks": [
                    {"pattern": "x", "rewards": [{"value": 1}, {"op": "transfer", "to": "first", "share": 0.5}]},
                ],
            }
        },
        {"users": {"a": {"use": "a:b"}}, "tasks": {"source": "inline", "rows": [{"who": "a"}], "user": "who"}},
        {"rewards": {"scorer": {"use": "math-verify", "with": {"turns": "each"}}}},
        {"rewards": {"scorer": {"prompt": [{"role": "user", "content": "{{reply}}"}], "scale": [0, 10]}}},
        {"sampling": {"stop": "</a>", "temperature": "${T:1.0}"}},
        {"sampling": {"stop": ["</a>"], "stop_regex": "x"}},
        {"backend": {"kind": "sglang", "urls": ["http://x"]}},
        {"backend": {"kind": "local", "max_batch": "${N:4}", "dtype": "${D:auto}"}},
        {"rewards": {"reassign": [{"at": "A", "turn": "last", "to": 0, "share": 0.5}]}},
        {"rewards": {"reassign": [{"at": "A", "op": "add", "value": 1.0}]}},
        {"rewards": {"credit": {"method": "turn_return", "gamma": "${GAMMA:0.9}"}, "placement": "spread"}},
        {"rewards": {"credit": {"method": "entry", "use": "a:b", "with": {"x": 1}}}},
        {"limits": {"episode_seconds": "2m", "tool_seconds": 3}},
        {"tasks": {"source": "jsonl", "path": "${P:x.jsonl}", "map": {"a": "b"}}},
    ],
)
def test_what_is_right_is_right_for_both(changes: dict[str, Any], validator: Any, tmp_path: Path) -> None:
    document = {**GOOD, **changes}
    assert [error.message for error in validator.iter_errors(document)] == []
    (tmp_path / "s.yaml").write_text(json.dumps(document))
    assert read_spec(tmp_path / "s.yaml")[1] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"naem": "x"},
        {"name": "a b"},
        {"model": {}},
        {"model": {"path": "org/m", "pth": "m"}},
        {"machine": "toolz"},
        {"machine": {"states": {"A": {}}}},
        {"user": {"with": {}}},
        {"user": {"use": "a:b", "with_": {}}},
        {"users": {"a": {"timeout": 5}}, "tasks": {"source": "inline", "rows": [{"who": "a"}], "user": "who"}},
        {"tools": ["a:b"]},
        {"tools": [{"name": "x"}]},
        {"backend": {}},
        {"backend": {"device": "cpu"}},
        {"backend": {"kind": "sglang"}},
        {"backend": {"kind": "local", "urls": []}},
        {"backend": {"kind": "local", "max_batch": "4"}},
        {"tasks": {"source": "jsonl"}},
        {"tasks": {"rows": []}},
        {"limits": {"user_turns": "yes"}},
        {"limits": {"user_turns": 0}},
        {"limits": {"tool_seconds": "5 parsecs"}},
        {"rewards": {"reassign": [{"at": "A"}]}},
        {"rewards": {"reassign": [{"at": "A", "turn": "last"}]}},
        {"rewards": {"reassign": [{"at": "A", "op": "add"}]}},
        {"rewards": {"reassign": [{"at": "A", "op": "add", "value": 1, "share": 0.5}]}},
        {"rewards": {"reassign": [{"at": "A", "turn": "lst", "share": 0.5}]}},
        {"rewards": {"scorer": {}}},
        {"user": {"prompt": [{"role": "user", "content": "?"}], "marks": [{}]}},
        {"user": {"prompt": [{"role": "user", "content": "?"}], "marks": [{"text": "a", "pattern": "b"}]}},
        {"user": {"prompt": [{"role": "user", "content": "?"}], "marks": [{"text": "a", "rewards": [{"name": "x"}]}]}},
        {
            "user": {
                "prompt": [{"role": "user", "content": "?"}],
                "marks": [{"text": "a", "rewards": [{"op": "transfer", "value": 1}]}],
            }
        },
        {"users": {"a": {"use": "a:b"}}},
        {
            "user": {"use": "a:b"},
            "users": {"a": {"use": "a:b"}},
            "tasks": {"source": "inline", "rows": [{"who": "a"}], "user": "who"},
        },
        {"rewards": {"credit": {"gamma": 0.5}}},
        {"rewards": {"credit": {"method": "outcome", "gamma": 0.5}}},
        {"rewards": {"credit": {"method": "outcomes"}}},
        {"rewards": {"credit": {"method": "entry"}}},
    ],
)
def test_what_is_wrong_is_wrong_for_both(changes: dict[str, Any], validator: Any, tmp_path: Path) -> None:
    document = {**GOOD, **changes}
    assert list(validator.iter_errors(document))
    (tmp_path / "s.yaml").write_text(json.dumps(document))
    assert read_spec(tmp_path / "s.yaml")[0] is None


def test_a_spec_that_extends_another_may_leave_out_what_is_there(validator: Any) -> None:
    child = {
        "extends": "base.yaml",
        "model": {"revision": "x"},
        "backend": {"max_batch": 4},
        "machine": {"transitions": []},
        "rewards": {"credit": {"gamma": 0.9}},
    }
    assert list(validator.iter_errors(child)) == []
    assert list(validator.iter_errors({**child, "tools": [{"name": "x"}]}))
    assert list(validator.iter_errors({**child, "limits": {"usr_turns": 1}}))


def test_every_key_of_a_spec_has_words_for_the_editor() -> None:
    document = json.loads(documents()["episode"])
    assert set(document["properties"]) == {*fields_by_key(EpisodeSpec), "extends"}
    limits = document["$defs"]["LimitsSpec"]["properties"]
    assert limits["user_turns"]["description"] == "Maximum number of answers of the user."
    assert limits["user_turns"]["default"] == 8
    assert document["$defs"]["UserSpec"]["additionalProperties"] is False
    assert {"use", "with", "effects", "timeout"} < set(document["$defs"]["UserSpec"]["properties"])


def test_no_key_is_without_a_description() -> None:
    document = json.loads(documents()["episode"])
    named = [("", document), *document["$defs"].items()]
    silent = [
        f"{name}.{key}"
        for name, schema in named
        for key, value in schema.get("properties", {}).items()
        if not value.get("description")
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        pytest.param(name, key, value, marks=[needs_plugin("isolation")] if name == "IsolationSpec" else [])
        for name, keys in EXAMPLES.items()
        for key, values in keys.items()
        for value in values
    ],
)
def test_every_example_is_right_for_both(name: str, key: str, value: Any, validator: Any, tmp_path: Path) -> None:
    rule = {"at": "DONE", "turn": "last", "to": "first", "share": 0.5}
    beside: dict[str, dict[str, Any]] = {
        "": {key: value},
        "ModelSpec": {"model": {"path": "org/m", key: value}},
        "SamplingParams": {"sampling": {key: value}},
        "TasksSpec": {"tasks": {"source": "jsonl", "path": "x", key: value}},
        "LimitsSpec": {"limits": {key: value}},
        "StateSpec": {"machine": {"preset": "tools", "states": {"A": {key: value}}}},
        "RolloutSpec": {"rollout": {key: value}},
        "IsolationSpec": {"isolation": {"mode": "process", key: value}},
        "ReassignRule": {"rewards": {"reassign": [{**rule, key: value}]}},
        "TransitionSpec": {
            "machine": {
                "preset": "tools",
                "transitions": [{"trigger": "answered", "source": "GENERATING", "dest": "DONE", key: value}],
            }
        },
    }
    document = {**GOOD, **beside[name]}
    assert [error.message for error in validator.iter_errors(document)] == []
    (tmp_path / "s.yaml").write_text(json.dumps(document))
    assert read_spec(tmp_path / "s.yaml")[1] == []


def test_the_reference_has_a_row_for_every_key() -> None:
    text = spec_page()
    assert "| `user_turns` | integer, ≥ 1 | `8` | Maximum number of answers of the user. |" in text.splitlines()
    assert "| `with` | mapping | `{}` | Keyword arguments for its constructor. |" in text.splitlines()
    assert '| `machine` | [mapping](#machine) or the name of a preset | `{"preset": "tools_and_user"}` | ' in text
    for line in text.splitlines():
        assert "Union[" not in line
        assert "NoneType" not in line


@pytest.mark.slow
@needs_plugin("agents")  # each of these adds keys that shipped specs have
@needs_plugin("condense")
@needs_plugin("critic")
@needs_plugin("sft")
def test_an_editors_validator_agrees(tmp_path: Path) -> None:
    schema_file = tmp_path / "episode.schema.json"
    schema_file.write_text(documents()["episode"])
    (tmp_path / "good.yaml").write_text(
        "spec: episode/v1\nname: demo\nmodel: {path: org/m}\ntasks: {source: hub, path: a/b}\nmachine: tools\n"
    )
    (tmp_path / "bad.yaml").write_text("spec: episode/v1\nname: demo\nmodel: {path: org/m}\ntasks: {source: hub}\n")
    command = [sys.executable, "-m", "check_jsonschema", "--schemafile", str(schema_file)]
    beside = sorted(str(path) for path in (ROOT / "specs").glob("*.scenarios.yaml"))
    specs = sorted({str(path) for path in (ROOT / "specs").glob("*.yaml")} - set(beside))
    good = subprocess.run([*command, *specs, str(tmp_path / "good.yaml")], capture_output=True, text=True, timeout=120)
    assert (good.returncode, good.stdout.strip()) == (0, "ok -- validation done")
    bad = subprocess.run([*command, str(tmp_path / "bad.yaml")], capture_output=True, text=True, timeout=120)
    assert bad.returncode == 1
    assert "'path' is a required property" in bad.stdout


BROKEN = {
    "limits: {usr_turns: 2}": "'usr_turns' was unexpected",
    "limits: {assistant_turns: '5'}": "'5' is not of type 'integer'",
    "limits: {assistant_turns: 0}": "0 is less than the minimum of 1",
    "machine: {preset: tools, transitions: [{trigger: answered, source: GENERATING}]}": "'dest' is a required property",
    "rewards: {reassign: [{at: DONE, share: 0.5}]}": "'to' is a required property",
    "backend: {kind: sglang}": "'urls' is a required property",
    "rewards: {credit: {method: outcomes}}": "'outcome' was expected",
    "users: {a: {use: 'a:b'}}": "'user' is a required property",
}
"""Mistakes of form, and what the validator says of each."""


@pytest.mark.slow
def test_an_editors_validator_finds_what_is_broken(tmp_path: Path) -> None:
    schema_file = tmp_path / "episode.schema.json"
    schema_file.write_text(documents()["episode"])
    head = "spec: episode/v1\nname: demo\nmodel: {path: org/m}\ntasks: {source: inline, rows: [{q: a}]}\n"
    for index, lines in enumerate(BROKEN):
        (tmp_path / f"bad{index}.yaml").write_text(head + lines + "\n")
    command = [sys.executable, "-m", "check_jsonschema", "--schemafile", str(schema_file), "-o", "json", "-v"]
    files = [str(tmp_path / f"bad{index}.yaml") for index in range(len(BROKEN))]
    done = subprocess.run([*command, *files], capture_output=True, text=True, timeout=120)
    found: dict[str, list[str]] = {file: [] for file in files}
    for error in json.loads(done.stdout)["errors"]:
        below = [item["message"] for item in error.get("sub_errors", [])]
        found[error["filename"]] += [error["message"], *below]
    for file, said in zip(files, BROKEN.values(), strict=True):
        assert any(said in message for message in found[file]), (file, found[file])


@pytest.mark.slow
@needs_plugin("scenarios")
def test_an_editors_validator_knows_scenarios(tmp_path: Path) -> None:
    schema_file = tmp_path / "scenarios.schema.json"
    schema_file.write_text(documents()["scenarios"])
    command = [sys.executable, "-m", "check_jsonschema", "--schemafile", str(schema_file)]
    beside = sorted(str(path) for path in (ROOT / "specs").glob("*.scenarios.yaml"))
    assert beside
    good = subprocess.run([*command, *beside], capture_output=True, text=True, timeout=120)
    assert (good.returncode, good.stdout.strip()) == (0, "ok -- validation done")
    (tmp_path / "bad.yaml").write_text("scenarios: [{name: a, expect: {states: [DONE]}, reply: [hello]}]\n")
    bad = subprocess.run([*command, str(tmp_path / "bad.yaml")], capture_output=True, text=True, timeout=120)
    assert bad.returncode == 1
    assert "'reply' was unexpected" in bad.stdout


@pytest.mark.parametrize(
    "replies",
    [["4", {"text": "4", "finish": "length"}], [{"task": "a", "replies": ["4"]}], {"replies": ["4"]}],
)
def test_replies_are_a_list_or_a_mapping(replies: Any) -> None:
    schema = jsonschema.Draft202012Validator(json.loads(documents()["replies"]))
    assert list(schema.iter_errors(replies)) == []
    Script.model_validate(replies)
    assert list(schema.iter_errors({"replies": ["4"], "case": []})) != []
