"""The order of findings: by place, but what another finding may have caused comes after it."""

from __future__ import annotations

from engine.spec.text.diagnostic import Diagnostic, Origin
from engine.validate.check import CONSEQUENCES, causes_first
from engine.validate.registry import page_ids


def finding(rule: str, line: int) -> Diagnostic:
    return Diagnostic(rule, "error", rule, None, Origin("spec.yaml", line, 1))


def order(*findings: tuple[str, int]) -> list[str]:
    return [item.rule for item in causes_first([finding(*one) for one in findings])]


def test_a_consequence_comes_after_its_cause() -> None:
    found = ("machine.unreachable", 3), ("prompt.empty", 5), ("machine.unknown-state", 9), ("tools.missing", 12)
    assert order(*found) == ["prompt.empty", "machine.unknown-state", "machine.unreachable", "tools.missing"]


def test_without_a_cause_the_place_decides() -> None:
    assert order(("prompt.empty", 5), ("machine.unreachable", 3)) == ["machine.unreachable", "prompt.empty"]


def test_each_rule_of_the_table_exists() -> None:
    named = {*CONSEQUENCES, *(cause for causes in CONSEQUENCES.values() for cause in causes)}
    assert named - {*page_ids()} == set()
