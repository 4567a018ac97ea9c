"""The guide's example is a real one: it is played against the quickstart as it is printed."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path

from engine.plugins.scenarios.suite import SuiteResult

ROOT = Path(__file__).parents[3]


def test_the_guides_scenario_passes(run: Callable[..., SuiteResult], tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    guide = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    (printed,) = re.findall(r"((?:    .*\n|\n)*    # quickstart\.scenarios\.yaml\n(?:    .*\n)+)", guide)
    shutil.copy(ROOT / "specs" / "quickstart.yaml", tmp_path)
    (tmp_path / "quickstart.scenarios.yaml").write_text(textwrap.dedent(printed), encoding="utf-8")
    overrides = [f"model.path={tiny_tokenizer_dir}", "limits.turn_tokens=64"]
    suite = run(tmp_path / "quickstart.yaml", overrides=overrides)
    assert [str(problem) for problem in suite.problems] == []
    (result,) = suite.results
    assert (result.name, result.passed) == ("solved after feedback", True), result
