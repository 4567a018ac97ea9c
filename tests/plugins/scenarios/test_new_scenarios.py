"""`engine new`: each kind is covered by its scenarios, and its printed commands succeed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import engine
from engine.plugins.scaffold.command import Kind, scaffold
from engine.plugins.scenarios.suite import Formats, run_suite
from engine.spec.load import load_spec
from engine.validate import check_spec

TEXT = [kind for kind in Kind if kind is not Kind.VISION]
"""Kinds that any tokenizer can play."""


@pytest.mark.parametrize("kind", TEXT)
def test_a_kind_has_no_findings_and_its_scenarios_take_every_transition(
    tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch, tiny_tokenizer_dir: Path
) -> None:
    monkeypatch.setenv("MODEL", str(tiny_tokenizer_dir))
    spec = scaffold("shop-v2", tmp_path, kind)[0]
    loaded = load_spec(spec)
    assert [str(item) for item in check_spec(loaded) if item.severity != "info"] == []
    assert [item.rule for item in check_spec(loaded) if item.rule == "rewards.truncated-pays"] == []
    assert (loaded.spec.name, loaded.spec.model.path) == ("shop-v2", str(tiny_tokenizer_dir))
    suite = run_suite(spec, Formats(), generate=True)
    assert [(one.name, one.differences, one.problems) for one in suite.results if not one.passed] == []
    assert suite.coverage is not None
    assert suite.coverage.missing == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in ("blank", "tools", "judge") else [pytest.mark.exhaustive])
        for kind in Kind
    ],
)
def test_a_new_users_commands_all_succeed_in_any_folder(tmp_path: Path, kind: Kind) -> None:
    """As printed, with the model that the spec names, and again after the folder was moved."""
    environment = {key: value for key, value in os.environ.items() if key != "MODEL"}
    environment["PYTHONPATH"] = str(Path(engine.__file__).parents[1])

    def run(folder: Path, *command: str) -> str:
        result = subprocess.run(
            [sys.executable, "-m", *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout + result.stderr

    home = tmp_path / "home"
    home.mkdir()
    run(home, "engine.cli.main", "new", "my-shop", "--kind", kind)
    assert "1 spec valid" in run(home, "engine.cli.main", "validate", "--import", "my-shop/spec.yaml")
    told = run(home, "engine.cli.main", "test", "my-shop/spec.yaml", "--require-coverage")
    taken = re.search(r"(\d+) of (\d+) transitions taken", told)
    assert taken is not None
    assert taken[1] == taken[2]
    assert "Run: runs/my-shop-" in run(home, "engine.cli.main", "run", "my-shop/spec.yaml")
    assert "OK" in run(home, "unittest", "discover", "-s", "my-shop").splitlines()
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    (home / "my-shop").rename(moved)
    assert "2 passed" in run(tmp_path, "pytest", "-q", "-p", "no:cacheprovider", str(moved))
