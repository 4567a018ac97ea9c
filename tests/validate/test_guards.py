"""A guard that is wrong is shown at the character that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.spec.load import load_spec
from engine.validate import check_spec

pytestmark = pytest.mark.usefixtures("in_folder")

HEAD = """\
spec: episode/v1
name: demo
model: {path: org/m}
tasks: {source: inline, rows: [{q: a}]}
prompt: [{role: user, content: "{{q}}"}]
"""


def found(when: str) -> list[str]:
    lines = f"machine: single_turn\nrewards:\n  reassign:\n    - at: DONE\n      op: add\n      value: 1.0\n      when: {when}\n"
    Path("s.yaml").write_text(HEAD + lines)
    found = [item for item in check_spec(load_spec("s.yaml")) if item.severity != "info"]
    return [str(item).removeprefix("s.yaml:") for item in found if item.rule != "guard.constant"]


@pytest.mark.parametrize(
    "when", ["feedback.solved && turns.assistant > 1", "'true'", "'has(task.level)'", "task.q == 'a'"]
)
def test_guards_that_are_right(when: str) -> None:
    assert found(when) == []


@pytest.mark.parametrize(
    ("when", "problem"),
    [
        ("turns.user <", "12:25: error[guard.parse] the expression ends too early"),
        ("'tuns.user < 3'", "12:14: error[guard.unknown-name] there is no variable `tuns`; did you mean `turns`?"),
        ("siz(last.text) > 3", "12:13: error[guard.unknown-name] there is no function `siz`; did you mean `size`?"),
        ("last.text > 3", "12:23: error[guard.wrong-type] `>` cannot be applied to `last.text` (string) and `3` (int)"),
        (
            "facts.x == 1",
            "12:19: warning[guard.unknown-fact] nothing writes the fact `facts.x`: the code of environments, users and tools does not mention it; check its name in the code that writes it",
        ),
        ("task.r == 'a'", "12:18: warning[guard.unknown-field] row 1 has no field `r`; known: q"),
        ("''", "12:14: error[guard.parse] the expression is empty; leave it out if it always holds"),
        (
            ">-\n        turns.user < 3 &&\n        turns.usr < 3",
            "14:15: error[guard.unknown-name] `turns` has no field `usr`; did you mean `user`?",
        ),
    ],
)
def test_guards_that_are_wrong(when: str, problem: str) -> None:
    assert found(when) == [problem]


def test_conditions_of_transitions_are_looked_at_too() -> None:
    lines = (
        "machine:\n  preset: single_turn\n  transitions:\n"
        '    - {trigger: answered, source: GENERATING, dest: GENERATING, conditions: "turns.asistant < 2"}\n'
    )
    Path("s.yaml").write_text(HEAD + lines)
    assert [str(item) for item in check_spec(load_spec("s.yaml")) if item.severity != "info"] == [
        "s.yaml:9:84: error[guard.unknown-name] `turns` has no field `asistant`; did you mean `assistant`?"
    ]


parts = st.sampled_from(
    [
        "turns",
        ".user",
        "last.text",
        "(",
        ")",
        "!",
        "&&",
        "||",
        "<",
        "==",
        "1",
        "'a'",
        "[",
        "]",
        "{",
        "}",
        "?",
        ":",
        "has",
        "size",
        ".all(x, x)",
        "é",
        "\n",
        " ",
        "-",
        "+",
        "facts.x",
        '"',
        "\\",
        "in",
        "null",
    ]
)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(parts, max_size=10).map("".join))
def test_no_guard_raises(when: str) -> None:
    for line in found(json.dumps(when)):
        assert "error[guard." in line or "warning[guard.unknown-" in line


@pytest.mark.parametrize(
    ("key", "rules"),
    [
        ("room", ["guard.unknown-fact"]),
        ("facts.room", ["guard.unknown-fact"]),
        ("turns.user * 2", []),
        ("turns.usr", ["guard.unknown-name"]),
        ("facts.", ["guard.parse"]),
    ],
)
def test_a_state_key_is_checked_like_a_guard_but_for_its_type(key: str, rules: list[str]) -> None:
    Path("s.yaml").write_text(
        HEAD + f"machine: single_turn\nrewards:\n  credit: {{method: gigpo, state_key: '{key}'}}\n"
    )
    assert [item.rule for item in check_spec(load_spec("s.yaml")) if item.rule.startswith("guard")] == rules
