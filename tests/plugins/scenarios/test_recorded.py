"""A recorded episode becomes a scenario that passes, and that fails when the spec changes the result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recorded_code
import yaml
from command_line import engine_here
from ended_runs import run_to_end
from slow_cases import slow_but, slow_but_each

from engine.errors import StoreError
from engine.plugins.scenarios.load import load_scenarios, spec_of
from engine.plugins.scenarios.recorded import add_scenario, as_yaml, recorded_scenario
from engine.plugins.scenarios.suite import Formats, run_suite
from engine.spec.load import load_spec
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore

Record = Callable[..., RunStore]
CALL = {"text": "Hm.", "tool_calls": [{"name": "add", "arguments": {"a": 1, "b": 2}}]}
EXTERNAL = {"use": "recorded_code:Counting", "effects": "external"}


@pytest.fixture
def record(write: Callable[..., Path], chat_formats: Formats, tmp_path: Path) -> Record:
    """Run the first task of a spec with these replies, and return the run."""

    def record(replies: list[Any], overrides: tuple[str, ...] = (), **changes: Any) -> RunStore:
        recorded_code.COUNTED.clear()
        path = write(**changes)
        given = [*overrides, f"backend={json.dumps({'kind': 'scripted', 'replies': replies})}"]
        loaded = load_spec(path, given)
        form = chat_formats.of(loaded.spec.model, loaded.base)
        header = RunHeader.of(loaded, overrides=given)
        tasks = load_tasks(loaded)[:1]
        return asyncio.run(run_to_end(loaded, tmp_path / "runs", header=header, template=form, tasks=tasks)).store

    return record


def made(store: RunStore, formats: Formats, **kwargs: Any) -> tuple[dict[str, Any], list[str]]:
    """The one scenario of the run's first episode, read back, and the notes."""
    found = recorded_scenario(store, next(store.episodes()).id, formats, **kwargs)
    return yaml.safe_load(found.text)["scenarios"][0], found.notes


WHAT: dict[str, tuple[list[Any], dict[str, Any], tuple[str, ...]]] = {
    "pure code runs for real": (["one"], {"user": {"use": "recorded_code:Strict"}}, ()),
    "an external user": (["one", "two"], {"user": EXTERNAL, "limits": {"user_turns": 1}}, ("user",)),
    "code that says itself pure, and is not": (
        ["one", "two"],
        {"user": EXTERNAL | {"effects": "pure"}, "limits": {"user_turns": 1}},
        ("user",),
    ),
    "an external tool": (
        [CALL, "done"],
        {"tools": [{"use": "recorded_code:add", "effects": "external"}], "user": None, "machine": "tools"},
        ("tools",),
    ),
    "tools that raise, show parts and write facts": (
        [
            {"tool_calls": [{"name": name, "arguments": {}} for name in ("broken", "picture", "writes", "nowhere")]},
            {"tool_calls": [{"name": "writes", "arguments": {"x": 1}}]},
            "done",
        ],
        {
            "tools": [
                {"use": f"recorded_code:{name}", "effects": "external"} for name in ("broken", "picture", "writes")
            ],
            "user": None,
            "machine": "tools",
        },
        ("tools",),
    ),
    "a tool with an answer that is none": (
        [CALL, "done"],
        {
            "tools": [{"use": "recorded_code:bad", "name": "add", "effects": "external"}],
            "user": None,
            "machine": "tools",
        },
        ("tools",),
    ),
    "an external environment": (
        ["one", "two", "three"],
        {
            "environment": {"use": "recorded_code:Game", "effects": "external"},
            "machine": "step",
            "user": None,
            "tools": None,
        },
        ("environment", "steps"),
    ),
    "an environment that fails": (
        ["one", "two", "three", "four"],
        {
            "environment": {"use": "recorded_code:Game", "effects": "external"},
            "machine": "step",
            "user": None,
            "tools": None,
        },
        ("environment", "steps"),
    ),
    "a user that a model plays": (
        ["one", "two"],
        {
            "user": {
                "prompt": [{"role": "system", "content": "Teach."}],
                "backend": {"kind": "scripted", "replies": ["No.", "Yes. SOLVED"]},
                "model": "tiny",
                "marks": [
                    {"text": "SOLVED", "solved": True, "satisfied": True, "rewards": [{"turn": "last", "value": 1.0}]}
                ],
            }
        },
        ("user",),
    ),
    "a judge": (
        ["one"],
        {
            "user": None,
            "tools": None,
            "machine": "single_turn",
            "rewards": {
                "scorer": {
                    "prompt": [{"role": "user", "content": "{{reply}}"}],
                    "backend": {"kind": "scripted", "replies": ["score: 0.75"]},
                    "model": "tiny",
                }
            },
        },
        ("scorer",),
    ),
    "a server that fails": ([{"error": "gone"}], {}, ()),
    "a context that is too small": (["one", "two " * 300, "three"], {"limits": {"episode_tokens": 200}}, ()),
    "a reply that is cut short": ([{"text": "one two", "finish": "length"}], {}, ()),
    "a reply that is given up": ([{"text": "one", "finish": "abort"}], {}, ()),
    "a stop string": (["one END"], {"sampling": {"stop": ["END"]}, "limits": {"user_turns": 1}}, ()),
    "ids that no text gives": (
        [{"tokens": [40, 40, 40, 41, 3]}],
        {"user": None, "tools": None, "machine": "single_turn"},
        (),
    ),
    "a variable in a text": (["${HOME} $${x} {{word}}"], {"user": None, "tools": None, "machine": "single_turn"}, ()),
    "a malformed call": (["<tool_call>{</tool_call>", "one"], {"limits": {"user_turns": 1}}, ()),
    "tasks of a function": (
        ["one"],
        {
            "tasks": {
                "source": "python",
                "use": "recorded_code:rows",
                "map": {"word": "deep.word", "id": "name"},
                "id": "name",
            },
            "user": {"use": "recorded_code:Strict"},
        },
        (),
    ),
    "tasks without ids": (
        ["one"],
        {"tasks": {"source": "python", "use": "recorded_code:rows", "map": {"word": "deep.word"}, "shuffle": 1}},
        (),
    ),
}


@pytest.mark.parametrize("what", slow_but_each(4, WHAT))
def test_an_episode_becomes_a_scenario_that_passes(
    what: str, record: Record, chat_formats: Formats, tiny_tokenizer_dir: Path, tmp_path: Path
) -> None:
    replies, changes, scripted = WHAT[what]
    changes = json.loads(json.dumps(changes).replace('"model": "tiny"', f'"model": {{"path": "{tiny_tokenizer_dir}"}}'))
    store = record(replies, **changes)
    trajectory = store.trajectory(next(store.episodes()).id)
    scenario, _ = made(store, chat_formats, folder=tmp_path / "tests")
    assert {key for key in ("tools", "user", "environment", "steps", "scorer") if key in scenario} == set(scripted)
    assert scenario["expect"]["events"] == [event for _, event, _ in trajectory.path]
    assert scenario["expect"]["outcome"]["reward"] == trajectory.outcome.reward
    assert scenario["expect"]["rewards"] == [turn.rewards for turn in trajectory.turns]


CHANGES: dict[str, dict[str, Any]] = {
    "the value of a reward": {"user": {"use": "recorded_code:Strict", "with": {"value": 0.5}}},
    "what the user says": {"user": {"use": "recorded_code:Strict", "with": {"words": "Wrong."}}},
    "a limit": {"limits": {"user_turns": 1}},
    "the machine": {"machine": "single_turn"},
}


@pytest.mark.parametrize("what", slow_but(CHANGES, "the value of a reward", "the machine"))
def test_it_fails_when_the_spec_gives_another_result(
    what: str, record: Record, write: Callable[..., Path], tmp_path: Path
) -> None:
    store = record(["two", "one"], user={"use": "recorded_code:Strict"})
    words = ["export", store.folder, "--episode", "a/0", "--format", "scenario", "-o", "tests/again.yaml"]
    code, out, err = engine_here(*words, cwd=tmp_path)
    assert (code, err) == (0, "")
    assert "which passes: tests/again.yaml" in out
    assert engine_here("test", "tests/again.yaml", cwd=tmp_path)[0] == 0
    assert engine_here("test", "tests", cwd=tmp_path)[0] == 0
    assert engine_here("validate", "tests/again.yaml", cwd=tmp_path)[0] == 0
    write(**{"user": {"use": "recorded_code:Strict"}} | CHANGES[what])
    assert engine_here("test", "tests/again.yaml", cwd=tmp_path)[0] == (2 if what == "the machine" else 1)


def test_changes_of_set_are_in_the_scenario(record: Record, chat_formats: Formats) -> None:
    store = record(
        ["two", "one"], ("limits.user_turns=2", "rollout.concurrency=3"), user={"use": "recorded_code:Strict"}
    )
    scenario, _ = made(store, chat_formats)
    assert scenario["set"] == {"limits.user_turns": 2}
    assert scenario["expect"]["outcome"]["solved"] is True


def test_a_file_gets_one_more_scenario_and_keeps_its_text(
    record: Record, chat_formats: Formats, write: Callable[..., Path], tmp_path: Path
) -> None:
    store = record(["one"], user={"use": "recorded_code:Strict"})
    path = tmp_path / "spec.scenarios.yaml"
    own = "# mine\nscenarios:\n  - name: own  # this one\n    replies: [one]\n    expect: {outcome: {solved: true}}\n"
    path.write_text(own)
    add_scenario(store, "a/0", chat_formats, path)
    assert path.read_text().startswith(own)
    assert [one.name for one in load_scenarios(path).file.scenarios] == ["own", f"a/0 of {store.run_id}"]
    assert all(result.passed for result in run_suite(spec_of(path), chat_formats).results)
    kept = path.read_bytes()
    with pytest.raises(StoreError, match="already has a scenario"):
        add_scenario(store, "a/0", chat_formats, path)
    assert path.read_bytes() == kept


@pytest.mark.parametrize(
    "text",
    [
        "scenarios_of: other.yaml\nscenarios: [{name: a, expect: {events: []}}]\n",
        "scenarios: [{name: a, expect: {events: []}}]\n",
    ],
)
def test_a_file_that_cannot_take_it_is_left_as_it_is(
    text: str, record: Record, chat_formats: Formats, tmp_path: Path
) -> None:
    store = record(["one"], user={"use": "recorded_code:Strict"})
    path = tmp_path / "spec.scenarios.yaml"
    path.write_text(text)
    with pytest.raises(StoreError, match=r"choose another file"):
        add_scenario(store, "a/0", chat_formats, path)
    assert path.read_text() == text
    assert sorted(each.name for each in tmp_path.iterdir()) == ["runs", "spec.scenarios.yaml", "spec.yaml"]


def test_a_spec_that_gives_another_result_already_gives_no_scenario(
    record: Record, write: Callable[..., Path], tmp_path: Path
) -> None:
    store = record(["two", "one"], user={"use": "recorded_code:Strict"})
    write(user={"use": "recorded_code:Strict"}, limits={"user_turns": 1})
    words = ["export", store.folder, "--episode", "a/0", "--format", "scenario", "-o", "tests/again.yaml"]
    code, _, err = engine_here(*words, cwd=tmp_path)
    assert code == 2
    assert "another result than the recorded one; nothing is written" in err
    assert "-satisfied" in err
    assert list((tmp_path / "tests").iterdir()) == []


def test_code_that_answers_otherwise_is_scripted_and_named(
    record: Record, write: Callable[..., Path], tmp_path: Path
) -> None:
    store = record(["two", "one"], user={"use": "recorded_code:Strict"})
    write(user={"use": "recorded_code:Strict", "with": {"value": 0.5}})
    words = ["export", store.folder, "--episode", "a/0", "--format", "scenario", "-o", "tests/again.yaml"]
    code, out, _ = engine_here(*words, cwd=tmp_path)
    assert code == 0
    assert "all answers of the spec's code are scripted: played for real, the result is another one" in out
    assert "-turn 1: correct 1\n+turn 1: correct 0.5" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--format", "scenario", "-o", "x.yaml"], "needs --episode ID and -o FILE.yaml"),
        (["--format", "scenario", "--episode", "a/0"], "needs --episode ID and -o FILE.yaml"),
        (
            ["--format", "scenario", "--episode", "a/0", "-o", "x.jsonl"],
            "--format scenario writes YAML; name a file with the suffix .yaml instead",
        ),
        (["--format", "scenario", "--episode", "a/0", "-o", "x.yaml", "--filter", "true"], "--filter has no effect"),
        (["--episode", "a/0"], "--episode has no effect with --format jsonl"),
        (["--format", "scenario", "--episode", "z/9", "-o", "x.yaml"], "has no episode `z/9`"),
    ],
)
def test_options_that_do_not_fit_are_refused(words: list[str], said: str, record: Record, tmp_path: Path) -> None:
    store = record(["one"])
    code, _, err = engine_here("export", store.folder, *words, cwd=tmp_path)
    assert code == 2
    assert said in err
    assert not list(tmp_path.glob("x.*"))


@pytest.mark.parametrize(
    "text", ["${A}", "$${A}", "a\n  b\n", " x ", "no", "1e3", "\t", "#", "é\u2028\x85", "- a\n\n", ""]
)
def test_yaml_keeps_every_text(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(as_yaml({"scenarios": [{"name": "a", "about": text, "expect": {"events": []}}]}))
    assert load_scenarios(path).file.scenarios[0].about == text
