"""A spec and its scenarios, written for one test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scenario_code
import yaml

from engine.plugins.scenarios.suite import Formats, ScenarioResult, SuiteResult, run_suite

Write = Callable[..., Path]
Play = Callable[..., ScenarioResult]


@pytest.fixture(autouse=True)
def _nobody_was_asked() -> None:
    scenario_code.ASKED.clear()


@pytest.fixture(scope="session")
def chat_formats() -> Formats:
    """Formats, loaded once for all tests."""
    return Formats()


@pytest.fixture
def write(tmp_path: Path, tiny_tokenizer_dir: Path) -> Write:
    """Write a spec and, where they are given, its scenarios; keys that are None are left out."""

    def write(scenarios: Any = None, name: str = "spec", **changes: Any) -> Path:
        spec: dict[str, Any] = {
            "spec": "episode/v1",
            "name": name,
            "model": {"path": str(tiny_tokenizer_dir), "tool_calls": "hermes"},
            "tasks": {"source": "inline", "rows": [{"id": "a", "word": "one"}, {"id": "b", "word": "two"}], "id": "id"},
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say {{word}}."}],
            "tools": [{"use": "scenario_code:add"}, {"use": "scenario_code:echo"}],
            "user": {"use": "scenario_code:Patient"},
        } | changes
        path = tmp_path / f"{name}.yaml"
        path.write_text(
            yaml.safe_dump({key: value for key, value in spec.items() if value is not None}, sort_keys=False)
        )
        if scenarios is not None:
            text = scenarios if isinstance(scenarios, str) else yaml.safe_dump(scenarios, sort_keys=False)
            path.with_name(f"{name}.scenarios.yaml").write_text(text)
        return path

    return write


@pytest.fixture
def run(chat_formats: Formats) -> Callable[..., SuiteResult]:
    """Play a spec's scenarios."""
    return lambda path, **kwargs: run_suite(path, chat_formats, **kwargs)


@pytest.fixture
def play(write: Write, run: Callable[..., SuiteResult]) -> Play:
    """Play one scenario; it need not say its name."""

    def play(scenario: dict[str, Any], **changes: Any) -> ScenarioResult:
        suite = run(write({"scenarios": [{"name": "it", **scenario}]}, **changes))
        assert not suite.problems, [str(problem) for problem in suite.problems]
        (result,) = suite.results
        return result

    return play
