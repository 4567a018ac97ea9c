"""No spec makes the verifier fail or takes it long: what is too much is refused, or said to be."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hostile_specs import BUSY, REFUSED, TASKS, WHOLE

from engine import plugin
from engine.cli.validate.command import FORMATS, written
from engine.cli.validate.report import as_text
from engine.validate.examine import Options, examine
from engine.validate.registry import page_of
from engine.validate.report import Report

LONG = {
    *("guards", "long guards", "guards that multiply", "dense", "ring", "larger ring", "wide limits", "huge limits"),
    *("reward rules", "rows and prompts", "one tool often", "tools that are not there", "wrong types", "too many rows"),
    *("guard too long", "shared ids", "state names", "variables", "extends much"),
}
"""Those that take long."""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(WHOLE.replace(TASKS, "tasks: {source: inline, rows: [" + "{q: a}, " * 2000 + "]}\n"))


def slow(names: Iterable[str]) -> list[Any]:
    """The names, those that take long marked."""
    marks = {name: [pytest.mark.slow] for name in LONG} | {"reward rules": [pytest.mark.slow, pytest.mark.exhaustive]}
    return [pytest.param(name, marks=marks.get(name, [])) for name in names]


def examined(text: str) -> Report:
    """As the command would, written in every format."""
    Path("s.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    report = examine(Path("s.yaml"), Options(cost=True, budget={"tokens": 1e9}))
    said = [
        as_text([report], worst=True),
        *(written(form, [report]) for form in (*FORMATS, *plugin.entries("findings_formats"))),
    ]
    assert max(len(line) for line in as_text([report], worst=True).splitlines()) < 12_000
    assert all(each.encode("utf-8") or not report.diagnostics for each in said)
    for item in report.diagnostics:
        assert item.origin is not None
        assert page_of(item.rule) is not None
    return report


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", slow(REFUSED))
def test_what_is_refused(name: str) -> None:
    text, rule = REFUSED[name]
    report = examined(text)
    assert rule in {item.rule for item in report.diagnostics}
    assert report.status != 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", slow(BUSY))
def test_what_is_not_looked_at_whole_is_said(name: str) -> None:
    text, rule = BUSY[name]
    said = {item.rule for item in examined(text).diagnostics}
    incomplete = said & {"check.unfinished", "limits.too-wide", "machine.too-large"}
    assert rule in said if rule is not None else not incomplete


def test_a_folder_of_base_files_may_not_grow_without_end() -> None:
    Path("big.yaml").write_text("description: " + "x" * 3_000_000 + "\n")
    Path("bigger.yaml").write_text("extends: big.yaml\ndescription: " + "x" * 3_000_000 + "\n")
    Path("s.yaml").write_text("extends: bigger.yaml\n" + WHOLE)
    assert [str(item) for item in examine(Path("s.yaml")).diagnostics] == [
        "bigger.yaml:1:10 (extends bigger.yaml): error[spec.extends] `big.yaml` has more than 4,194,304 bytes, together "
        "with what it extends; keep rows in a jsonl file"
    ]


def test_rows_that_are_not_looked_at_are_said() -> None:
    Path("rows.jsonl").write_text('{"q": "a"}\n' * 20_001)
    text = WHOLE.replace("inline, rows: [{q: a}]", "jsonl, path: rows.jsonl")
    told = [str(item) for item in examined(text).diagnostics if item.rule == "tasks.not-read"]
    assert told == [
        "s.yaml:4:30: info[tasks.not-read] only the first 20,000 rows are checked: a later row may lack a field or share "
        "its id"
    ]
    limited = text.replace("rows.jsonl", "rows.jsonl, limit: 5")
    assert "tasks.not-read" not in {item.rule for item in examined(limited).diagnostics}
