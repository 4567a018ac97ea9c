"""Findings for machines: SARIF that its own schema accepts, and GitHub's annotations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from command_line import engine_output

from engine.validate.registry import page_ids

pytestmark = pytest.mark.usefixtures("in_folder")

SCHEMA = json.loads((Path(__file__).parents[2] / "data" / "sarif-2.1.0-rtm.5.schema.json").read_text(encoding="utf-8"))
SPEC = """\
spec: episode/v1
name: demo
model: {path: org/m}
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
    from engine.plugins.code_scanning.formats import as_sarif
    from engine.spec.text.diagnostic import Diagnostic, Origin
    from engine.validate.report import Report

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
