"""The ratchet of sizes: scripts/size.py."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def size() -> ModuleType:
    spec = importlib.util.spec_from_file_location("size_script", ROOT / "scripts/size.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


CORE = '''"""A file."""

import engine.plugins.sums
from engine.other import Other


class Box:
    """One method."""

    def __init__(self, other: Other) -> None:
        """Docstrings are no statements."""
        self.other = other

    def open(self, name: str, *rest: str) -> str:
        return self.other.open(name, *rest)


class Record(NamedTuple):
    found: int


def collect(names):
    found = []
    for each in names:
        found.append(each)
    return found
'''
OTHER = """class Box: ...


Other = make_dataclass("Other", [])


def own(x):
    return own(x + 1)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {
        "engine/box.py": CORE,
        "engine/other.py": OTHER,
        "engine/validate/rule.py": "x = 1\n",
        "engine/plugins/sums/__init__.py": "def add(a, b):\n    return a + b\n",
        "schemas/row.py": "import engine.box\n",
        "environments/game.py": "import engine.box\n",
        "docs/architecture.md": "# The twelve stations\n\n`engine/box.py:Box.open` `engine/box.py:lost`\n\n# More\n\n`engine/x.py:Y`\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_each_figure_is_counted_as_its_name_says(size: ModuleType, checkout: Path) -> None:
    sizes = size.Sizes(checkout)
    assert sizes.values == {
        "core lines": CORE.count("\n") + OTHER.count("\n") + 1,
        "core files": 3,
        "validate lines": 1,
        "classes": 4,
        "functions": 5,
        "statements": 19,
        "lines, all": CORE.count("\n") + OTHER.count("\n") + 5,
        "files, all": 6,
        "functions over 60 lines": 0,
        "core imports of plugins": 1,
        "modules with one importer": 1,
        "forwarding functions": 1,
        "classes with one method": 1,
        "vague locals": 2,
        "vague locals of the core": 2,
        "class names twice in the core": 1,
        "frozen dataclasses and NamedTuples of the core": 1,
        "reading path, files": 1,
        "reading path, lines": CORE.count("\n"),
        "reading path, classes": 2,
        "reading path, lost names": 2,
    }
    assert sizes.places["forwarding functions"] == ["engine/box.py:14 open"]
    assert sizes.places["reading path, lost names"] == ["engine/box.py:lost", "2 of 12 stations"]
    assert list(size.SIZES) == list(sizes.values)


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_growth_fails_and_names_the_files_that_grew(
    size: ModuleType, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = ["--root", str(checkout)]
    assert size.main([*root, "--record"]) == 0
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "all")
    assert size.main([*root, "--check"]) == 0

    (checkout / "engine/other.py").write_text(OTHER + "def more(x):\n    return x\n")
    capsys.readouterr()
    assert size.main([*root, "--check"]) == 1
    out = capsys.readouterr().out
    assert "functions: 6, recorded 5" in out
    assert "engine/other.py +2 lines" in out
    assert "engine/box.py +" not in out

    assert size.main([*root, "--record"]) == 1
    assert 'functions rose from 5 to 6: --allow "functions" "reason" records it' in capsys.readouterr().out
    allow = [*root, "--record", "--allow", "functions", "a new need", "--allow", "statements", "the same"]
    assert size.main([*allow, "--allow", "core lines", "the same"]) == 0
    assert "functions: 6  # a new need\n" in (checkout / "size.txt").read_text()
    assert size.main([*root, "--check"]) == 0

    (checkout / "engine/other.py").write_text(OTHER)
    assert size.main([*root, "--record"]) == 0
    assert "functions: 5\n" in (checkout / "size.txt").read_text()


def test_an_unknown_figure_is_refused(size: ModuleType, checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        size.main(["--root", str(checkout), "--record", "--allow", "funktions", "why"])
    assert "there is no figure 'funktions'; the figures are: core lines," in capsys.readouterr().err


def test_this_checkout_is_not_larger_than_recorded(size: ModuleType) -> None:
    sizes = size.Sizes(ROOT)
    record = size.read_record(ROOT / "size.txt")
    assert set(record) >= {
        name for name, figure in size.SIZES.items() if figure.ratchet and sizes.values[name] is not None
    }
    risen = size.grown(sizes.values, record)
    assert not risen, "\n".join([*risen, "files that grew most:", *size.grown_files(ROOT, sizes)])
