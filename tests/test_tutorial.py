"""The commands and files of docs/tutorial.md, and nothing else, in an environment of their own: they run, print what the page says,
and the model that was trained on the ratings does better."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(console|python|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VARIES = re.compile(r"[+-]?\d+\.\d+|\d{8}-\d{6}-[0-9a-f]{4}")
"""What differs between machines: numbers that are no integers, and the ends of ids."""
MOST = 15

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(1500)]


def commands(console: str) -> list[tuple[str, list[str]]]:
    """The commands of a block, each with the lines that it prints."""
    parts = re.split(r"^\$ ", console, flags=re.MULTILINE)
    assert parts[0] == ""
    return [(part.splitlines()[0], part.splitlines()[1:]) for part in parts[1:]]


def pattern(lines: list[str]) -> re.Pattern[str]:
    """Matches an output that has these lines one after another; `…` stands for any others, or for the rest of a line."""
    texts = [VARIES.sub("#", " ".join(line.split())) for line in lines]
    return re.compile(
        "".join(".*" if text == "…" else re.escape(text).replace("…", ".*") + r"[^\n]*\n" for text in texts), re.DOTALL
    )


def squeezed(output: str) -> str:
    return VARIES.sub("#", "".join(" ".join(line.split()) + "\n" for line in output.splitlines()))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files of this checkout, without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        target = tmp_path / "checkout" / name
        if (ROOT / name).exists() or (ROOT / name).is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
    return tmp_path / "checkout"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The variables of a shell in a new environment, in which the packages that are installed here need no download."""
    venv.create(tmp_path / "venv", with_pip=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv"), "platbase": str(tmp_path / "venv")})
    (Path(packages) / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("EPISODE_", "ENGINE_", "PYTHON", "COV_"))
    }
    path = f"{tmp_path / 'venv' / 'bin'}:{os.defpath}"
    return kept | {
        "PATH": path,
        "VIRTUAL_ENV": str(tmp_path / "venv"),
        "LOGNAME": "ann",
        "COLUMNS": "120",
        "HF_HUB_OFFLINE": "1",
    }


def test_the_page_runs_as_it_stands(checkout: Path, environment: dict[str, str], tmp_path: Path) -> None:
    folder, typed, printed = checkout, 0, ""
    for kind, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if kind != "console":
            name = re.match(r"# (\S+)\n", text)
            assert name is not None
            (folder / name[1]).write_text(text, encoding="utf-8")
            continue
        for command, lines in commands(text):
            typed += 1
            shell = subprocess.run(
                ["bash", "-c", f"{command}\nstatus=$?; pwd >{tmp_path}/folder; exit $status"],
                cwd=folder, env=environment, capture_output=True, text=True,
            )  # fmt: skip
            assert shell.returncode == 0, f"{command}\n{shell.stdout}\n{shell.stderr}"
            folder, printed = Path((tmp_path / "folder").read_text().strip()), shell.stdout
            assert not lines or pattern(lines).search(squeezed(printed)), f"{command}\n{printed}"
            if command.startswith("engine"):
                assert str(checkout) in engine_file(environment)
    assert 5 < typed <= MOST
    before, after = map(float, re.findall(r"success +│ +([\d.]+) +│ +([\d.]+)", printed)[0])
    assert after > before


def engine_file(environment: dict[str, str]) -> str:
    """The file of the engine that a new environment imports."""
    script = "import engine; print(engine.__file__)"
    shown = subprocess.run(
        ["python", "-c", script], env=environment, cwd="/", check=True, capture_output=True, text=True
    )
    return shown.stdout
