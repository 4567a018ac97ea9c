"""Mistakes in scenarios are refused with their place, before anything is played."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.plugins.scenarios.load import scenarios_of, spec_of
from engine.plugins.scenarios.suite import SuiteResult

Write = Callable[..., Path]
Run = Callable[..., SuiteResult]


def problems(suite: SuiteResult, folder: Path) -> list[str]:
    found = [*suite.problems, *(problem for result in suite.results for problem in result.problems)]
    return [str(problem).replace(f"{folder}/", "") for problem in found]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "scenarios: [{name: a, expect: {states: [DONE]}, reply: [x]}]",
            "spec.scenarios.yaml:1:49: error[spec.unknown-key]",
        ),
        ("scenarios: [{name: a}]", "spec.scenarios.yaml:1:13: error[spec.missing-key]"),
        ("scenarios: []", "spec.scenarios.yaml:1:12: error"),
        ("scenarios: [{name: a, expect: {}}]", "set at least one expected result"),
        (
            "scenarios: [{name: a, expect: {limits: []}}, {name: a, expect: {limits: []}}]",
            "two scenarios are called `a`",
        ),
        ("scenarios: [{name: a, user: [{error: x, timeout: true}], expect: {limits: []}}]", "keep one of"),
        ("scenarios: [{name: a, steps: {X: [{}]}, expect: {limits: []}}]", "a step needs an `event`"),
        ("scenarios: [{name: a, expect: {messages: [{role: user, content: a, contains: b}]}}]", "not both"),
        (
            "scenarios: [{name: a, expect: {messages: [..., {role: user, contains: 7}]}}]",
            "spec.scenarios.yaml:1:71: error[spec.wrong-type] `scenarios[0].expect.messages[1].contains`",
        ),
        ("scenarios: [{name: 1, expect: {limits: []}}]", "spec.scenarios.yaml:1:20: error"),
        ("scenarios: [", "error[yaml.syntax]"),
    ],
)
def test_an_invalid_file_is_refused(write: Write, run: Run, tmp_path: Path, text: str, told: str) -> None:
    suite = run(write(text))
    assert suite.invalid
    assert suite.results == []
    assert told in problems(suite, tmp_path)[0]


@pytest.mark.parametrize(
    "script",
    [
        "tools: [{tool: add, nonsense: true}]",
        "user: [{nonsense: true}]",
        "environment: {reset: {nonsense: true}}",
        "environment: {score: {nonsense: true}}",
        "steps: {X: [{event: x, nonsense: true}]}",
    ],
)
def test_a_renamed_key_is_refused_and_the_new_one_named(write: Write, run: Run, tmp_path: Path, script: str) -> None:
    """`nonsense` of every kind of answer is now `invalid`."""
    suite = run(write(f"scenarios: [{{name: a, {script}, expect: {{limits: []}}}}]"))
    assert suite.results == []
    (problem,) = problems(suite, tmp_path)
    assert "error[spec.unknown-key]" in problem
    assert problem.endswith("unknown key `nonsense`; did you mean `invalid`?")


@pytest.mark.parametrize(
    ("scenario", "told"),
    [
        (
            "expect: {states: [PENDING, DONNE]}",
            "spec.scenarios.yaml:3:32: error[scenario.unknown-state] there is no state `DONNE`; did you mean `DONE`?",
        ),
        ("task: c", "spec.scenarios.yaml:3:11: error[scenario.unknown-task] the spec has no task `c`; known: a, b"),
        (
            "tools: [{tool: ad, result: 1}]",
            "spec.scenarios.yaml:3:20: error[scenario.unknown-tool] there is no tool `ad`; did you mean `add`?",
        ),
        (
            "environment: {reset: {messages: []}}",
            "spec.scenarios.yaml:3:18: error[scenario.no-environment] the environment answers here, but the spec has none",
        ),
        (
            "steps: {GENERATING: [{event: x}]}",
            "spec.scenarios.yaml:3:25: error[scenario.no-step] GENERATING does `generate`; "
            "`steps` are for `step` and for actions of the spec's own",
        ),
        (
            "out_of_time: DONE",
            "spec.scenarios.yaml:3:18: error[scenario.no-limit] no limit is checked in DONE; name a state with an action",
        ),
        (
            "set: {limits.user_turn: 1}",
            "spec.scenarios.yaml:3:29: error[spec.unknown-key] unknown key `user_turn`; did you mean `user_turns`?",
        ),
        ("set: {limits.user_turns: many}", "spec.scenarios.yaml:3:30: error[spec.wrong-type]"),
        (
            "replies: [{tokens: [999999]}]",
            "spec.scenarios.yaml:2:5: error[scenario.cannot-play] the script's token 999999",
        ),
    ],
)
def test_a_scenario_that_does_not_fit_is_refused_alone(
    write: Write, run: Run, tmp_path: Path, scenario: str, told: str
) -> None:
    expect = "" if scenario.startswith("expect") else "\n    expect: {limits: []}"
    fine = "\n  - {name: fine, replies: [x], user: [{satisfied: true}], expect: {limits: []}}\n"
    suite = run(write(f"scenarios:\n  - name: it\n    {scenario}{expect}{fine}"))
    assert suite.invalid
    assert [result.passed for result in suite.results] == [False, True]
    assert problems(suite, tmp_path)[0].startswith(told)


def test_no_user_answers_where_there_is_none(write: Write, run: Run, tmp_path: Path) -> None:
    text = "scenarios:\n  - name: it\n    user: [hello]\n    expect: {limits: []}\n"
    suite = run(write(text, user=None, machine="tools"))
    assert problems(suite, tmp_path) == [
        "spec.scenarios.yaml:3:11: error[scenario.no-user] the user answers here, but the spec has none; give it a `user`"
    ]


def test_a_spec_that_is_none_is_told_and_nothing_is_played(write: Write, run: Run, tmp_path: Path) -> None:
    path = write({"scenarios": [{"name": "it", "expect": {"limits": []}}]})
    path.write_text("spec: episode/v1\nname: x\n")
    suite = run(path)
    assert suite.invalid
    assert (suite.coverage, suite.results) == (None, [])
    assert problems(suite, tmp_path)[0].startswith("spec.yaml:1:1: error[spec.missing-key]")


def test_what_is_set_comes_in_order_and_paths_are_beside_the_file(
    write: Write, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": "z", "word": "zero"}\n')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    tasks: dict[str, Any] = {"source": "jsonl", "path": "rows.jsonl", "id": "id"}
    common = {"tasks": tasks, "limits.assistant_turns": 2}
    one = {"name": "own", "task": "z", "replies": ["x"], "set": {"limits.assistant_turns": 1}}
    two = {"name": "common", "task": "z", "replies": ["x", "y"]}
    wanted = {"limits": ["assistant_turns"]}
    suite = run(
        write({"set": common, "scenarios": [{**one, "expect": wanted}, {**two, "expect": wanted}]}),
        overrides=["limits.assistant_turns=5"],
    )
    assert problems(suite, tmp_path) == []
    assert [result.passed for result in suite.results] == [True, True]


def test_scenarios_lie_beside_their_spec(tmp_path: Path) -> None:
    spec, beside = tmp_path / "a.yaml", tmp_path / "a.scenarios.yml"
    assert scenarios_of(spec) is None
    spec.touch()
    beside.touch()
    assert scenarios_of(spec) == beside
    assert (spec_of(beside), spec_of(spec)) == (spec, spec)
    assert spec_of(tmp_path / "b.scenarios.yaml") == tmp_path / "b.yaml"
