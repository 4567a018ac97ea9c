"""Generated scenarios: each takes the transition for which it is made, and finds code that a failure breaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.plugins.scaffold.command import Kind, scaffold
from engine.plugins.scenarios.suite import Formats, run_suite


@pytest.fixture
def game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_tokenizer_dir: Path) -> Path:
    monkeypatch.setenv("MODEL", str(tiny_tokenizer_dir))
    return scaffold("game", tmp_path, Kind.USER)[0]


def test_one_is_made_for_each_transition_by_a_failure_that_no_written_one_takes(game: Path) -> None:
    written = run_suite(game, Formats())
    assert written.coverage is not None
    suite = run_suite(game, Formats(), generate=True)
    generated = suite.results[len(written.results) :]
    assert [(one.name, one.passed) for one in generated] == [
        ("generated: the time is up in PENDING", True),
        ("generated: a failure in PENDING", True),
        ("generated: a failure in GENERATING", True),
        ("generated: a reply is given up in GENERATING", True),
        ("generated: the time is up in AWAITING_TOOL", True),
        ("generated: a failure in AWAITING_TOOL", True),
        ("generated: the time is up in AWAITING_USER_FEEDBACK", True),
        ("generated: a failure in AWAITING_USER_FEEDBACK", True),
    ]
    assert [one.failure.blame if one.failure else None for one in generated] == [
        *(None, "environment", "backend", None, None, "tool", None, "user")
    ]
    assert [
        edge for edge in written.coverage.missing if edge not in {edge for one in generated for edge in one.taken}
    ] == []


def test_a_written_one_stands_in_its_place(game: Path) -> None:
    scenarios = game.with_name("spec.scenarios.yaml")
    late = "  - {name: late, out_of_time: PENDING, expect: {outcome: {limit: episode_seconds}}}\n"
    scenarios.write_text(scenarios.read_text() + late)
    names = [one.name for one in run_suite(game, Formats(), generate=True).results]
    assert "late" in names
    assert "generated: the time is up in PENDING" not in names


def test_code_that_a_failure_breaks_is_a_difference(game: Path) -> None:
    code = game.with_name("environment.py")
    body = "return [] if 'answer' in view.reply else view.facts['judged']"
    score = f"    def score(self, view: EpisodeView) -> list[RewardEvent]:\n        {body}\n\n\n"
    code.write_text(code.read_text().replace("\nclass GameUser", f"{score}class GameUser"))
    suite = run_suite(game, Formats(), generate=True)
    late = next(one for one in suite.results if one.name == "generated: the time is up in AWAITING_TOOL")
    assert suite.differs
    assert late.failure is not None
    assert late.failure.state == "DONE"
