"""An installed engine works in a project that has its own `schemas` and `environments` folders.

The engine is built from a copy of this checkout and installed into a fresh virtual environment, once as a wheel and once in
editable mode. Its dependencies come from the environment of the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "engine", "schemas", "environments", "docs")

pytestmark = pytest.mark.slow

SPEC_CODE = """
from engine.schemas.environment import EpisodeView, Reset, Task, UserTurn
from engine.schemas.message import Message

from schemas.question import QUESTION


class Board:
    def reset(self, task: Task, seed: int) -> Reset:
        return Reset(messages=[Message(role="user", content=QUESTION)])


class User:
    def respond(self, view: EpisodeView) -> UserTurn:
        return UserTurn(satisfied=True, solved="42" in view.reply)
"""
SPEC = """
spec: episode/v1
name: project
model: {{path: {tokenizer}, tool_calls: plain, tool_role: user}}
backend: {{kind: scripted, replies: ["<call>calculate(6 * 7)</call>", "It is 42."]}}
tasks: {{source: inline, rows: [{{}}]}}
environment: {{use: "environments.game:Board"}}
tools: [{{use: "engine.environments.tools.calculator:calculate"}}]
user: {{use: "environments.game:User"}}
"""
SCENARIOS = """
scenarios:
  - name: the calculator is the engine's, the rest is the project's
    replies: ["<call>calculate(6 * 7)</call>", It is 42.]
    expect:
      outcome: {solved: true}
      messages:
        - {role: user, content: What is 6 * 7?}
        - {role: assistant, calls: [{name: calculate, arguments: {expression: 6 * 7}}]}
        - {role: tool, content: "42"}
        - {role: assistant, content: It is 42.}
"""
CALCULATOR_OF_THE_PROJECT = '''
def calculate(expression: str) -> str:
    """Answer wrongly."""
    return "0"
'''
TYPED = """
from engine.schemas.environment import UserTurn

reveal_type(UserTurn(content="Try again.").solved)
UserTurn(solved="yes")
"""


@dataclass(frozen=True)
class Installed:
    """A virtual environment that the engine is installed in, and a project's folder."""

    python: Path
    project: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the virtual environment in the project's folder, without PYTHONPATH."""
        program = [str(self.python.parent / command[0]), *command[1:]]
        return subprocess.run(
            program, cwd=self.project, env=clean_env(), capture_output=True, text=True, timeout=120, check=False
        )


def clean_env() -> dict[str, str]:
    """The environment without what makes Python or pip see this checkout."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")} | {
        "NO_COLOR": "1"
    }


def checked(*command: str | Path) -> None:
    done = subprocess.run(
        [*map(str, command)], env=clean_env(), capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a build reads, copied: a build writes beside its sources, and takes what an older one left there."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    checked(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", checkout / "dist", checkout)
    (built,) = (checkout / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module", params=["wheel", "editable"])
def installed(
    request: pytest.FixtureRequest, checkout: Path, tiny_tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp(request.param)
    checked(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    what = [request.getfixturevalue("wheel")] if request.param == "wheel" else ["-e", checkout]
    checked(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", *what)
    # Behind the installed engine. A path in a .pth file is taken without the .pth files in it: this checkout is not found there.
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    project = folder / "project"
    for name, text in {
        "schemas/__init__.py": "",
        "schemas/question.py": 'QUESTION = "What is 6 * 7?"\n',
        "environments/__init__.py": "",
        "environments/game.py": SPEC_CODE,
        "environments/tools/__init__.py": "",
        "environments/tools/calculator.py": CALCULATOR_OF_THE_PROJECT,
        "project.yaml": SPEC.format(tokenizer=tiny_tokenizer_dir),
        "project.scenarios.yaml": SCENARIOS,
        "typed.py": TYPED,
    }.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    yield Installed(python, project)
    shutil.rmtree(folder)


def test_a_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    """Modules, pages of rules, JSON Schemas and data: the linked folders are real files in a wheel."""
    expected = {
        str(Path(folder, file).relative_to(ROOT))
        for folder, _, names in os.walk(ROOT / "engine", followlinks=True)
        for file in names
        if "__pycache__" not in folder
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {item.filename for item in archive.infolist() if ".dist-info/" not in item.filename}
        links = [item.filename for item in archive.infolist() if (item.external_attr >> 16) & 0o170000 == 0o120000]
    assert links == []
    assert held == expected
    assert {"engine/validate/rules/guard.parse.md", "engine/schemas/json/episode.schema.json"} <= held


def test_the_modules_are_the_engines(installed: Installed) -> None:
    names = ("engine.schemas.environment", "engine.environments.tools.calculator")
    code = f"from importlib import import_module\nfor name in {names}: print(import_module(name).__file__)"
    done = installed.run("python", "-c", code)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert not Path(line).is_relative_to(ROOT)
        assert not Path(line).is_relative_to(installed.project)


@pytest.mark.parametrize("options", [[], ["--import"]], ids=["", "--import"])
def test_validate(installed: Installed, options: list[str]) -> None:
    done = installed.run("engine", "validate", *options, "project.yaml")
    assert (done.returncode, "error" in done.stdout) == (0, False), done.stdout + done.stderr


def test_scenarios(installed: Installed) -> None:
    done = installed.run("engine", "test", "project.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the calculator is the engine's, the rest is the project's" in done.stdout


def test_run(installed: Installed) -> None:
    done = installed.run("engine", "run", "project.yaml", "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr
    shown = installed.run("engine", "show", "latest")
    assert shown.returncode == 0, shown.stdout + shown.stderr


def test_explain(installed: Installed) -> None:
    done = installed.run("engine", "explain", "guard.parse")
    page = (ROOT / "docs" / "rules" / "guard.parse.md").read_text(encoding="utf-8")
    assert (done.returncode, done.stdout.rstrip()) == (0, page.rstrip()), done.stderr
    every = installed.run("engine", "explain").stdout.splitlines()
    pages = [*(ROOT / "docs" / "rules").glob("*.md"), *(ROOT / "engine" / "plugins").glob("*/pages/*.md")]
    assert [line.split()[0] for line in every] == sorted(page.stem for page in pages)


def test_mypy_resolves_the_contracts(installed: Installed, checkout: Path) -> None:
    cache = checkout.parent / "mypy"  # of both ways to install: they have the dependencies in common
    options = ["--strict", "--python-executable", str(installed.python), "--cache-dir", str(cache)]
    done = installed.run("python", "-m", "mypy", *options, "typed.py")
    assert done.stdout.splitlines() == [
        'typed.py:4: note: Revealed type is "bool"',
        'typed.py:5: error: Argument "solved" to "UserTurn" has incompatible type "str"; expected "bool"  [arg-type]',
        "Found 1 error in 1 file (checked 1 source file)",
    ], done.stderr


def test_a_plugin_whose_folder_was_deleted_is_missing_by_name_and_all_else_works(installed: Installed) -> None:
    where = installed.run("python", "-c", "import engine.plugins; print(engine.plugins.__path__[0])").stdout.strip()
    folder, away = Path(where) / "view", installed.project / "view"
    shutil.move(folder, away)
    try:
        helped = installed.run("engine", "--help")
        assert (helped.returncode, " view " in helped.stdout) == (0, False), helped.stderr
        assert installed.run("engine", "validate", "project.yaml").returncode == 0
        assert installed.run("engine", "run", "project.yaml", "--quiet").returncode == 0
        told = installed.run("engine", "view", "latest")
        assert (told.returncode, told.stderr) == (
            2,
            "there is no command `view`: it belongs to the plugin `view`, which is not installed: "
            "pip install --force-reinstall --no-deps episode-engine\n",
        )
    finally:
        shutil.move(away, folder)
