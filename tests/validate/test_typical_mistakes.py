"""Each typical mistake is found, at its own line, by the rule that docs/testing.md names; the project without a mistake has no finding."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from slow_cases import slow_but_each
from typical_mistakes import MISTAKES, Mistake, project, written
from typical_project import PYTHON_ROWS

from engine.spec.text.diagnostic import Diagnostic
from engine.validate.examine import Options, examine

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("kiosk", None)
    yield
    sys.modules.pop("kiosk", None)


def examined(files: dict[str, str], *, imports: bool) -> list[Diagnostic]:
    for name, text in files.items():
        Path(name).write_text(text)
    found = examine(Path("task.yaml"), Options(imports=imports)).diagnostics
    assert imports or "kiosk" not in sys.modules
    return found


def said(found: list[Diagnostic]) -> list[str]:
    return [str(item) for item in found if item.severity != "info"]


@pytest.mark.parametrize("imports", [False, True])
@pytest.mark.parametrize("edits", [(), (PYTHON_ROWS,)])
def test_the_project_without_a_mistake_has_no_finding(imports: bool, edits: tuple[tuple[str, str], ...]) -> None:
    files = project(Mistake("", "", "", "", "", "", before=edits))
    assert said(examined(files, imports=imports)) == []


@pytest.mark.parametrize(
    "mistake", slow_but_each(4, MISTAKES), ids=lambda item: f"{item.kind}: {item.new.strip()[:30]}"
)
def test_a_typical_mistake_is_found(mistake: Mistake) -> None:
    files = project(mistake)
    found = examined(files, imports=mistake.imports)
    lines = {name: text.splitlines() for name, text in files.items()}
    hits = [
        item
        for item in found
        if item.rule == mistake.rule
        and mistake.says in item.message
        and item.origin is not None
        and mistake.at in lines[Path(item.origin.file).name][item.origin.line - 1]
    ]
    assert len(hits) == 1, said(found)
    line = hits[0].origin.line if hits[0].origin else 0
    others = [item for item in found if item.severity == "error" and (item.origin is None or item.origin.line != line)]
    assert others == [] or mistake.new == "class Clerk", said(others)  # five entry points are in this module


@pytest.mark.parametrize(
    "mistake", slow_but_each(3, [item for item in MISTAKES if item.imports]), ids=lambda item: item.new.strip()[:40]
)
def test_what_needs_the_code_is_counted_without_it(mistake: Mistake) -> None:
    files = project(mistake)
    for name, text in files.items():
        Path(name).write_text(text)
    report = examine(Path("task.yaml"), Options())
    assert mistake.rule in report.skipped
    assert said(report.diagnostics) == []


def test_there_are_five_of_each_kind() -> None:
    kinds = Counter(item.kind for item in MISTAKES)
    assert len(kinds) == 12
    assert min(kinds.values()) >= 5
    assert len(MISTAKES) >= 60


def test_the_page_lists_them() -> None:
    text = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    assert written(text) == text, "python tests/validate/typical_mistakes.py writes it anew"
