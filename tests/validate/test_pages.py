"""Each rule has one page, and the examples on it are what they say: the bad one breaks the rule, the good one does not.

The examples are the rules' unit tests: tests/goldens/texts/rules.jsonl has what is said of each bad one, with its place. The
other files here have what a page does not show.

The default run takes half of the examples. After a change of a page, run all of this file: `pytest -m "" tests/validate/test_pages.py`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rule_examples import BAD, WHOLE, findings, page, write
from slow_cases import slow_but_each

from engine.plugins.trainers.capabilities import APPROXIMATED, REFUSED, UNKNOWN
from engine.validate import all_rules
from engine.validate.check import BROKEN, MORE, UNFINISHED
from engine.validate.examine import FAILED, STOPPED, Options, examine
from engine.validate.registry import Page, page_ids

ROOT = Path(__file__).parents[2]
TRAINER_RULES = (REFUSED, APPROXIMATED, UNKNOWN)
NO_GOOD = {"tasks.hub", BROKEN, STOPPED, FAILED}
"""A good example would need the network, or is no spec."""


def all_ids() -> set[str]:
    """Every id that a diagnostic of the engine may bear, as the code spells them."""
    found = {item.id for item in all_rules()} | {
        "budget.exceeded",
        "train.plan",
        *TRAINER_RULES,
        BROKEN,
        MORE,
        UNFINISHED,
        STOPPED,
        FAILED,
    }
    for file in (ROOT / "engine" / "spec").rglob("*.py"):
        found |= set(re.findall(r'"((?:spec|yaml|tasks)\.[a-z-]+)"', file.read_text(encoding="utf-8")))
    return found - {"spec.yaml"}


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each example imports its own `my_code`."""
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    sys.modules.pop("my_code", None)
    yield
    sys.modules.pop("my_code", None)
    sys.path[:] = path


def broken(page: Page, file: Path, *arguments: str) -> set[str]:
    """Rules that a spec breaks, when it is validated and when its tasks are read."""
    return {item.rule for item in findings(page, file, *arguments)}


def test_every_rule_has_a_page_and_every_page_a_rule() -> None:
    assert set(page_ids()) == all_ids()


def test_a_page_says_what_the_rule_says() -> None:
    known = {item.id: item for item in all_rules()}
    for rule in page_ids():
        found = page(rule)
        assert found.id == rule
        if rule in known:
            assert (found.severity, found.about) == (known[rule].severity, known[rule].about), rule


@pytest.mark.parametrize("rule", slow_but_each(8, BAD))
def test_the_bad_example_breaks_the_rule(rule: str, tmp_path: Path) -> None:
    assert rule in broken(page(rule), write(page(rule), "Bad", tmp_path, whole=rule in WHOLE))


def test_a_file_that_is_not_there_is_unreadable(tmp_path: Path) -> None:
    assert broken(page("spec.unreadable"), tmp_path / "none.yaml") == {"spec.unreadable"}


GOOD = sorted(set(page_ids()) - NO_GOOD)


@pytest.mark.parametrize("rule", slow_but_each(8, [*GOOD[4:], *GOOD[:4]]))
def test_the_good_example_does_not(rule: str, tmp_path: Path) -> None:
    file = write(page(rule), "Good", tmp_path, whole=False)
    arguments = ("--set", "rollout.seed=2") if rule == "spec.set" else ()
    errors = {item.rule for item in examine(file, Options(imports=True)).diagnostics if item.severity == "error"}
    assert errors == set()
    assert rule not in broken(page(rule), file, *arguments)
