"""CI selects tests by markers: .ci/run, scripts/test.sh and scripts/markers.py."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHECK = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
MARKERS = {
    line.partition(":")[0]
    for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
}


def test_the_check_and_the_scripts_select_by_registered_markers_and_name_no_path_of_a_test() -> None:
    selected = set()
    for line in re.findall(r"^.*\btests \w+ \"(.*?)\".*$|^.*pytest -q -m \"(.*?)\"", CHECK, re.MULTILINE):
        selected |= set(re.findall(r"\w+", " ".join(line))) - {"and", "or", "not", "few"}
    assert selected == MARKERS - {"exhaustive", "vllm"}
    for file in [".ci/run", "scripts/test.sh", "scripts/trainer_envs.sh", "scripts/agent_packages.sh"]:
        named = re.findall(
            r"\btests/(?!mypy\.ini|constraints\.txt)[\w/{*.]+", (ROOT / file).read_text(encoding="utf-8")
        )
        assert named == []


def test_every_marker_has_a_recorded_number() -> None:
    lines = (ROOT / "tests" / "markers.txt").read_text(encoding="utf-8").splitlines()
    assert {line.split()[1] for line in lines} == MARKERS


@pytest.mark.slow
def test_a_marker_that_selects_fewer_tests_than_recorded_is_named_until_there_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "markers.py", tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["slow: long", "ray: clusters"]\n')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "markers.txt").write_text("2 slow\n1 ray\n")
    tests = "import pytest\n\n\n@pytest.mark.slow\ndef test_one(): ...\n\n\n@pytest.mark.{}\ndef test_two(): ...\n"

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "scripts/markers.py", *options]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    (tmp_path / "tests" / "test_some.py").write_text(tests.format("ray"))
    ended = run()
    assert ended.returncode == 1
    assert "slow: 1 tests, 2 recorded" in ended.stderr
    assert "ray:" not in ended.stderr
    refused = run("--record")
    assert (refused.returncode, "lower than recorded: slow 2 -> 1" in refused.stderr) == (1, True)
    assert run("--record", "--allow", "slow", "one test shows both").returncode == 0
    numbers = (tmp_path / "tests" / "markers.txt").read_text()
    assert numbers == "1 ray\n1 slow  # one test shows both\n"
    assert run().returncode == 0


def test_the_table_has_each_stage_and_names_those_that_failed(tmp_path: Path) -> None:
    """The functions of .ci/run, with short stages in place of its own."""
    functions, _, stages = CHECK.partition("trap table EXIT\n")
    assert stages
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text(
        functions
        + "trap table EXIT\n"
        + 'step "one"\nbeside "other" bash -c "echo said; exit 3"\ncheck false\nstep "two"\ncheck true\ncheck end_of other\n'
    )
    ended = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    table = ended.stdout.partition("minutes of each stage\n")[2]
    assert [line.split("  ")[-1] for line in table.splitlines()[:4]] == ["one", "other, beside others", "two", "in all"]
    assert re.findall(r"^failed: (.*)$", table, re.MULTILINE) == ["one", "two"]
    assert "said" in ended.stdout
