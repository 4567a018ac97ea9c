"""Worst cases, budgets and notes of `engine validate`; `engine explain`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import engine_output

from engine.errors import EngineError
from engine.validate.registry import page_ids, page_of
from engine.validate.worst_case import read_budget

pytestmark = pytest.mark.usefixtures("in_folder")

SPEC = """\
spec: episode/v1
name: demo
model: {path: org/m}
machine: single_turn
tasks: {source: inline, rows: [{question: a}, {question: b}]}
prompt: [{role: user, content: "{{question}}"}]
"""


# ---- worst case and budget


def test_the_worst_case_is_a_table() -> None:
    Path("s.yaml").write_text(SPEC + "limits: {turn_tokens: 64, episode_tokens: 1000}\n")
    status, output = engine_output("validate", "s.yaml", "--worst-case")
    assert status == 0
    assert [line for line in output.splitlines() if "condensations" not in line] == [
        "s.yaml",
        "  the most of      one episode  2 episodes  bounded by",
        "  assistant_turns            1           2  machine",
        "  user_turns                 0           0  machine",
        "  tool_calls                 0           0  machine",
        "  sampled_tokens            64         128  machine × limits.turn_tokens",
        "  context_tokens         1,000              limits.episode_tokens",
        "  branches                   1              machine",
        "  images             unbounded   unbounded  neither `limits.images` nor `model.max_images` is set",
        "  seconds                  600         600  limits.episode_seconds",
        "1 spec valid",
    ]


def test_the_worst_case_is_in_json() -> None:
    Path("s.yaml").write_text(SPEC + "limits: {turn_tokens: 64}\n")
    found = json.loads(engine_output("validate", "s.yaml", "--worst-case", "--format", "json")[1])["specs"][0][
        "worst_case"
    ]
    assert (found["tasks"], found["episodes"], found["exact"]) == (2, 2, True)
    assert found["run"]["sampled_tokens"] == {"most": 128.0, "by": "machine × limits.turn_tokens"}


def test_a_broken_machine_has_no_worst_case() -> None:
    Path("s.yaml").write_text(SPEC.replace("single_turn", "{preset: single_turn, initial: NOWHERE}"))
    status, output = engine_output("validate", "s.yaml", "--worst-case", "--budget", "tokens=1")
    assert status == 1
    assert "s.yaml: no worst case: its machine has errors" in output
    assert "budget.exceeded" not in output


@pytest.mark.parametrize(
    ("budget", "problem"),
    [
        ("tokens=1e9", None),
        ("tokens=128", None),
        ("turns=2", None),
        ("tool_calls=0", None),
        (
            "tokens=127",
            "s.yaml:7:45: error[budget.exceeded] the run may cost 128 tokens (machine × limits.turn_tokens); the budget "
            "is 127",
        ),
        (
            "seconds=599",
            "s.yaml:7:27: error[budget.exceeded] the run may cost 600 seconds (limits.episode_seconds); the budget "
            "is 599",
        ),
        (
            "images=5",
            "s.yaml:7:9: error[budget.exceeded] the run's images are not bounded: neither `limits.images` "
            "nor `model.max_images` is set; the budget is 5",
        ),
    ],
)
def test_a_budget_is_a_check(budget: str, problem: str | None) -> None:
    Path("s.yaml").write_text(SPEC + "limits: {episode_seconds: 600, turn_tokens: 64}\n")
    status, output = engine_output("validate", "s.yaml", "--budget", budget)
    assert (status, output.splitlines()[0]) == ((1, problem) if problem else (0, "1 spec valid"))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("tokns=1", "there is no budget `tokns`; did you mean `tokens`?"),
        ("tokens", "`tokens` is not a valid budget; write `tokens=1e9`"),
        ("tokens=nan", "`tokens=nan` is not a valid budget; write `tokens=1e9`"),
        ("seconds=-1", "`seconds=-1` is not a valid budget; write `seconds=1e9`"),
    ],
)
def test_a_budget_that_cannot_be_read(given: str, problem: str) -> None:
    with pytest.raises(EngineError) as caught:
        read_budget([given])
    assert str(caught.value) == problem
    Path("s.yaml").write_text(SPEC)
    assert engine_output("validate", "s.yaml", "--budget", given)[0] == 2


# ---- notes


def test_notes_are_told_when_asked_for() -> None:
    Path("s.yaml").write_text(SPEC)
    assert engine_output("validate", "s.yaml") == (0, "1 spec valid\n")
    assert engine_output("validate", "s.yaml", "--notes")[1].splitlines() == [
        "s.yaml:3:15: info[model.not-at-hand] the files of `org/m` are not on this computer: template, context and images are not checked",
        "     3 | model: {path: org/m}",
        "       |               ^^^^^",
        "        fix: download it once (`engine models` lists the models), or give a folder",
        "1 spec valid",
    ]


# ---- explain


def test_explain_prints_the_page() -> None:
    page = page_of("machine.unreachable")
    assert page is not None
    assert engine_output("explain", "machine.unreachable") == (0, page.text)


def test_explain_lists_every_rule() -> None:
    status, output = engine_output("explain")
    assert status == 0
    assert [line.split()[0] for line in output.splitlines()] == page_ids()


def test_explain_names_what_is_near() -> None:
    status, output = engine_output("explain", "machine.unreachabel")
    assert status == 2
    assert output.startswith("there is no rule `machine.unreachabel`; did you mean `machine.unreachable`")


@pytest.mark.parametrize("rule", ["../../README", "", "a/b", "x" * 300])
def test_explain_reads_nothing_else(rule: str) -> None:
    assert engine_output("explain", rule)[0] == 2
