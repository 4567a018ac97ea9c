"""Each rule has one page, and the examples on it are what they say: the bad one breaks the rule, the good one does not.

The default run takes half of the examples. After a change of a page, run all of this file: `pytest -m "" tests/checks/test_pages.py`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slow_cases import slow_but_each

from engine.checks import all_rules
from engine.checks.budget import read_budget
from engine.checks.check import MORE, UNFINISHED
from engine.checks.pages import Example, Page, page_ids, page_of
from engine.cli.validate_examine import FAILED, STOPPED, Options, examine
from engine.errors import SpecError
from engine.integrations.trainers.check import APPROXIMATED, REFUSED, UNKNOWN
from engine.spec.load import read_spec
from engine.spec.tasks import load_tasks

ROOT = Path(__file__).parents[2]
REST = {
    "spec": "spec: episode/v1",
    "name": "name: demo",
    "model": "model: {path: m}",
    "tasks": 'tasks: {source: inline, rows: [{question: "What is 2 + 2?"}]}',
    "prompt": 'prompt: [{role: user, content: "{{question}}"}]',
    "machine": "machine: single_turn",
}
"""What an example leaves out."""
TRAINER_RULES = (REFUSED, APPROXIMATED, UNKNOWN)
WHOLE = {"spec.empty", "spec.missing-key"}
"""Rules whose bad example lacks something that must not be filled in."""
ELSEWHERE = {
    "backend.no-experts",
    "machine.too-large",
    "model.calls-not-read",
    "tasks.not-read",
    "train.expert-routing",
    "train.no-package",
    "train.plan",
    "code.no-package",
    "condense.no-package",
    "notify.no-package",
    "traces.no-package",
    STOPPED,
    FAILED,
}
"""Rules whose bad example would fill pages, or depends on what is installed; they have tests of their own."""
NO_GOOD = {"tasks.hub", STOPPED, FAILED}
"""A good example would need the network, or is no spec."""


def all_ids() -> set[str]:
    """Every id that a diagnostic of the engine may bear, as the code spells them."""
    found = {item.id for item in all_rules()} | {
        "budget.exceeded",
        "train.plan",
        *TRAINER_RULES,
        MORE,
        UNFINISHED,
        STOPPED,
        FAILED,
    }
    for file in (ROOT / "engine" / "spec").glob("*.py"):
        found |= set(re.findall(r'"((?:spec|yaml|tasks)\.[a-z-]+)"', file.read_text(encoding="utf-8")))
    return found - {"spec.yaml"}


def write(example: Example, folder: Path, *, whole: bool) -> Path:
    given = {match[1] for match in re.finditer(r"^(\w+):", example.spec, re.MULTILINE)}
    rest = [] if whole else [line for key, line in REST.items() if key not in given]
    (folder / "spec.yaml").write_text("\n".join([*rest, example.spec]), encoding="utf-8")
    for name, body in example.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(body, encoding="utf-8")
    return folder / "spec.yaml"


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each example imports its own `my_code`."""
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    sys.modules.pop("my_code", None)
    yield
    sys.modules.pop("my_code", None)
    sys.path[:] = path


def broken(page: Page, file: Path) -> set[str]:
    """Rules that a spec breaks, when it is validated and when its tasks are read."""
    overrides = [value for flag, value in zip(page.arguments, page.arguments[1:], strict=False) if flag == "--set"]
    trainer = next((v for f, v in zip(page.arguments, page.arguments[1:], strict=False) if f == "--trainer"), None)
    most = read_budget([v for f, v in zip(page.arguments, page.arguments[1:], strict=False) if f == "--budget"])
    found = {
        item.rule
        for item in examine(
            file, Options(overrides, budget=most, imports="--import" in page.arguments, trainer=trainer)
        ).diagnostics
    }
    loaded, _ = read_spec(file, overrides)
    if loaded is not None:
        try:
            load_tasks(loaded)
        except SpecError as error:
            found |= {item.rule for item in error.diagnostics}
    return found


def page(rule: str) -> Page:
    found = page_of(rule)
    assert found is not None
    return found


def test_every_rule_has_a_page_and_every_page_a_rule() -> None:
    assert set(page_ids()) == all_ids()


def test_a_page_says_what_the_rule_says() -> None:
    known = {item.id: item for item in all_rules()}
    for rule in page_ids():
        found = page(rule)
        assert found.id == rule
        if rule in known:
            assert (found.severity, found.about) == (known[rule].severity, known[rule].about), rule


BAD = sorted(set(page_ids()) - {"spec.unreadable"} - ELSEWHERE)


@pytest.mark.parametrize("rule", slow_but_each(8, BAD))
def test_the_bad_example_breaks_the_rule(rule: str, tmp_path: Path) -> None:
    example = page(rule).example("Bad")
    assert example is not None
    assert rule in broken(page(rule), write(example, tmp_path, whole=rule in WHOLE))


def test_a_file_that_is_not_there_is_unreadable(tmp_path: Path) -> None:
    assert broken(page("spec.unreadable"), tmp_path / "none.yaml") == {"spec.unreadable"}


GOOD = sorted(set(page_ids()) - NO_GOOD)


@pytest.mark.parametrize("rule", slow_but_each(8, [*GOOD[4:], *GOOD[:4]]))
def test_the_good_example_does_not(rule: str, tmp_path: Path) -> None:
    found = page(rule)
    example = found.example("Good")
    assert example is not None
    file = write(example, tmp_path, whole=False)
    if rule == "spec.set":
        found = Page(found.id, found.severity, found.about, found.text, ("--set", "rollout.seed=2"))
    errors = {item.rule for item in examine(file, Options(imports=True)).diagnostics if item.severity == "error"}
    assert errors == set()
    assert rule not in broken(found, file)
