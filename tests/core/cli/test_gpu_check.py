"""scripts/gpu_check.sh where there is no GPU: it says so, claims nothing, and its sections run in a rehearsal."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from installed_plugins import needs_plugin

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts/gpu_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    command = [str(ROOT / "scripts/gpu_check.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


NO_GPU = "No GPU: torch sees no GPU. Nothing was run, nothing was written, and nothing is claimed.\n"


def test_without_a_gpu_nothing_is_written_or_claimed(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "gpu.md"
    page.write_text("figures of another day")
    monkeypatch.setattr(script, "has_gpu", lambda: False)  # on a machine with a GPU too
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(page)])
    assert script.main() == 3
    assert capsys.readouterr() == (NO_GPU, "")
    assert page.read_text() == "figures of another day"


@pytest.mark.slow
def test_the_script_without_a_gpu_has_its_exit_status(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    done = check("--out", str(page))
    assert (done.returncode, done.stdout, done.stderr) == (3, NO_GPU, "")
    assert not page.exists()


def test_a_section_whose_packages_are_missing_says_so(script: Any) -> None:
    section = script.Section("Title", print, ("json", "no_such_package", "nor_this"))
    assert list(script.examine("attention", section, True)) == ["\n## Title\n", "not run: no_such_package, nor_this"]


def test_a_section_that_fails_is_on_the_page_with_its_error(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = subprocess.CompletedProcess([], 1, stdout="| half a table |", stderr="RuntimeError: out of memory\n")
    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: failing)
    (title, text) = script.examine("attention", script.SECTIONS["attention"], False)
    assert title == "\n## Attention\n"
    assert text == "failed, exit status 1:\n\n```\nRuntimeError: out of memory\n```"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("attention", "bfloat16")),
        pytest.param("step", marks=needs_plugin("plan")),
    ],
)
def test_a_rehearsal_runs_the_section_on_a_cpu(name: str, script: Any) -> None:
    done = check("--rehearse", "--only", name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"## {script.SECTIONS[name].title}\n" in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) >= 3
    assert "nan" not in done.stdout
