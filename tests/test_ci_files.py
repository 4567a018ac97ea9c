"""What people copy from docs/testing.md works: the hooks, the jobs' commands, the formats."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from engine.cli.main import app

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
HOOKS: list[dict[str, Any]] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
BLOCKS: list[str] = re.findall(r"^```yaml\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def jobs() -> list[dict[str, Any]]:
    found = []
    for block in BLOCKS:
        document = yaml.safe_load(block)
        if isinstance(document, dict):
            found += (document.get("jobs") or {key: value for key, value in document.items() if key == "scan"}).values()
    return found


def commands() -> list[list[str]]:
    """Every `engine …` that the guide has a job or a reader run."""
    lines = [line for job in jobs() for step in job["steps"] for line in step.get("run", "").splitlines()]
    for block in re.findall(r"^```sh\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL):
        lines += block.splitlines()
    words = [shlex.split(line.partition(" > ")[0], comments=True) for line in lines]
    return [word for word in words if word and word[0] == "engine"]


def test_the_guide_has_two_jobs_with_a_time_limit() -> None:
    assert len(jobs()) == 2
    for job in jobs():
        assert job["timeout-minutes"] == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [  # .ci/run validates the specs with imports, and test_test_command plays their scenarios
        pytest.param(
            words,
            marks=[]
            if words[:2] == ["engine", "validate"] and "--import" not in words
            else [pytest.mark.slow, pytest.mark.exhaustive],
        )
        for words in commands()
    ],
    ids=" ".join,
)
def test_what_the_guide_runs_runs(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, command[1:])
    assert result.exit_code == 0, result.output


def test_the_hooks_of_the_guide_are_those_of_the_repository() -> None:
    assert [hook["id"] for hook in HOOKS] == ["engine-validate", "engine-test"]
    blocks = [yaml.safe_load(block) for block in BLOCKS]
    (guide,) = [repo for block in blocks if isinstance(block, dict) for repo in block.get("repos", [])]
    assert guide["repo"] == "local"
    of_the_repository = [{key: value for key, value in hook.items() if key != "description"} for hook in HOOKS]
    assert guide["hooks"] == [hook | {"language": "system"} for hook in of_the_repository]


def test_no_document_installs_a_package_index_release_of_the_engine() -> None:
    """The engine is not published: documents install it from a checkout or from a wheel."""
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    lines = {line.strip() for file in documents for line in file.read_text(encoding="utf-8").splitlines()}
    by_name = re.compile(r"pip install\b.*(?<![\w/])episode-engine\b")
    assert [line for line in lines if by_name.search(line) and "'episode-engine[" not in line] == []


def test_the_hooks_take_specs_and_leave_scenarios() -> None:
    def taken(hook: dict[str, Any]) -> list[str]:
        files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "specs").glob("*.yaml"))
        return [
            file
            for file in files
            if re.search(hook["files"], file) and not ("exclude" in hook and re.search(hook["exclude"], file))
        ]

    validate, test = map(taken, HOOKS)
    assert validate
    assert test
    assert not set(validate) & set(test)
    assert set(validate) | set(test) == {str(path.relative_to(ROOT)) for path in (ROOT / "specs").glob("*.yaml")}


@pytest.mark.slow
def test_a_hook_fails_on_a_broken_spec(tmp_path: Path) -> None:
    file = tmp_path / "specs" / "bad.yaml"
    file.parent.mkdir()
    file.write_text("spec: episode/v1\n")
    entry = shlex.split(HOOKS[0]["entry"])[1:]
    command = [sys.executable, "-m", "engine.cli.main", *entry, "specs/bad.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=None, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "specs/bad.yaml:1:1: error[spec.missing-key]" in done.stdout
