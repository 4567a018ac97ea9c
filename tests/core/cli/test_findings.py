"""Findings for machines: SARIF that its own schema accepts, and GitHub's annotations. `engine explain`, budgets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from command_line import engine_output

from engine.validate.registry import page_ids, page_of
from engine.validate.worst_case import BudgetError, read_budget

pytestmark = pytest.mark.usefixtures("in_folder")

SCHEMA = json.loads((Path(__file__).parents[2] / "data" / "sarif-2.1.0-rtm.5.schema.json").read_text(encoding="utf-8"))
SPEC = """\
spec: episode/v1
name: demo
model: {path: m}
machine: single_turn
tasks: {source: inline, rows: [{question: a}, {question: b}]}
prompt: [{role: user, content: "{{question}}"}]
"""


def sarif(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(engine_output("validate", *arguments, "--format", "sarif")[1])
    jsonschema.Draft4Validator(SCHEMA).validate(found)
    return found


# ---- SARIF


def test_sarif_has_rule_level_place_and_fix() -> None:
    Path("s.yaml").write_text(SPEC + "limits: {usr_turns: 2}\n")
    found = sarif("s.yaml")["runs"][0]
    assert found["columnKind"] == "unicodeCodePoints"
    assert [rule["id"] for rule in found["tool"]["driver"]["rules"]] == ["spec.unknown-key"]
    assert found["tool"]["driver"]["rules"][0]["help"]["markdown"].startswith("# `spec.unknown-key`")
    assert found["results"] == [
        {
            "ruleId": "spec.unknown-key",
            "ruleIndex": 0,
            "level": "error",
            "message": {"text": "unknown key `usr_turns`\ndid you mean `user_turns`?"},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": "s.yaml"},
                        "region": {"startLine": 7, "startColumn": 10},
                    },
                    "logicalLocations": [{"fullyQualifiedName": "limits.usr_turns"}],
                }
            ],
        }
    ]


def test_sarif_says_what_brought_a_value_here() -> None:
    Path("base.yaml").write_text(SPEC + "limits: {assistant_turns: 0}\n")
    Path("a b.yaml").write_text("extends: base.yaml\n")
    results = sarif("a b.yaml", "--set", "limits.user_turns=0")["runs"][0]["results"]
    places = [(item["locations"][0].get("physicalLocation"), item["locations"][0]["message"]) for item in results]
    assert places == [
        (None, {"text": "--set limits.user_turns=0"}),
        (
            {"artifactLocation": {"uri": "base.yaml"}, "region": {"startLine": 7, "startColumn": 27}},
            {"text": "extends base.yaml"},
        ),
    ]


def test_sarif_of_an_absolute_path_is_a_uri(tmp_path: Path) -> None:
    file = tmp_path / "ä s.yaml"
    file.write_text(SPEC + "limits: {usr_turns: 2}\n")
    location = sarif(str(file))["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
    assert location["artifactLocation"]["uri"] == file.as_uri()


def test_sarif_of_valid_specs_is_valid_and_empty() -> None:
    Path("s.yaml").write_text(SPEC)
    found = sarif("s.yaml")
    assert [item["level"] for item in found["runs"][0]["results"]] == ["note"]  # the model is not at hand


def test_sarif_of_every_page_is_valid() -> None:
    """Whatever rule is broken, its page makes valid SARIF."""
    from engine.cli.validate.report import Report
    from engine.plugins.code_scanning.formats import as_sarif
    from engine.spec.text.diagnostic import Diagnostic, Origin

    found = [Diagnostic(rule, "error", "x", None, Origin("s.yaml", 1, 1)) for rule in page_ids()]
    document = json.loads(as_sarif([Report("s.yaml", found)]))
    jsonschema.Draft4Validator(SCHEMA).validate(document)
    assert len(document["runs"][0]["tool"]["driver"]["rules"]) == len(page_ids())


# ---- GitHub


def test_annotations_are_escaped() -> None:
    Path("a,b.yaml").write_text(SPEC.replace("{{question}}", "100%: {{qestion}}"))
    status, output = engine_output("validate", "a,b.yaml", "--format", "github")
    assert status == 1
    lines = output.splitlines()
    assert lines[1] == (
        "::error file=a%2Cb.yaml,line=6,col=39,title=prompt.unknown-field::"
        "row 1 has no field `qestion`%0Adid you mean `question`?"
    )
    assert lines[0].startswith("::notice file=a%2Cb.yaml,line=3,col=15,title=model.not-at-hand::")


def test_an_override_has_no_line_to_annotate() -> None:
    Path("s.yaml").write_text(SPEC)
    output = engine_output("validate", "s.yaml", "--set", "limits.user_turns=0", "--format", "github")[1]
    assert output.splitlines()[0].startswith("::error title=spec.bad-value::")
    assert "(--set limits.user_turns=0)" in output


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
    with pytest.raises(BudgetError) as caught:
        read_budget([given])
    assert str(caught.value) == problem
    Path("s.yaml").write_text(SPEC)
    assert engine_output("validate", "s.yaml", "--budget", given)[0] == 2


# ---- notes


def test_notes_are_told_when_asked_for() -> None:
    Path("s.yaml").write_text(SPEC)
    assert engine_output("validate", "s.yaml") == (0, "1 spec valid\n")
    assert engine_output("validate", "s.yaml", "--notes")[1].splitlines() == [
        "s.yaml:3:15: info[model.not-at-hand] the files of `m` are not on this computer: template, context and images are not checked",
        "     3 | model: {path: m}",
        "       |               ^",
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
