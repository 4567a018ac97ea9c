"""Moves of modules and folders by scripts/move.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts/move.py"
IDENTITY = {f"GIT_{role}_{key}": "a@b.c" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}

FILES = {
    "engine/__init__.py": "",
    "engine/plugins/__init__.py": "",
    "engine/bells/__init__.py": '"""Bells."""\n',
    "engine/bells/ring.py": '"""See `bells/ring.py` and `bells_and/ring.py`."""\n\nLOUD = 1\n',
    "engine/bells/tower.py": "from engine.bells import ring\nfrom engine.bells.ring import LOUD\n\nprint(ring, LOUD)\n",
    "engine/bells_and/__init__.py": "",
    "engine/run.py": (
        "from engine import bells, plugins\n\n\ndef run() -> None:\n    from engine.bells import ring  # late\n\n"
        '    print(bells, plugins, ring, "engine.bells.ring:LOUD", "engine.bells_and", f"engine.{run}")\n'
    ),
    "schemas/row.py": '"""Written by engine/bells/ring.py."""\n',
    "docs/bells.md": "# Bells\n\n[spec](spec.md#top), [the code](../engine/bells/ring.py), `engine/bells/`\n",
    "docs/spec.md": "[bells](bells.md), [outside](https://a.b/bells.md)\n",
    "pyproject.toml": '[tool.ruff]\nline-length = 120\n[tool.x]\ndata = {"engine.bells" = ["*.md"]}\nlayers = [\n  "(bells)",\n]\n',
    "specs/a.yaml": "environment: {use: engine.bells.ring:LOUD}\n",
    "tests/goldens/row.json": '{"use": "engine.bells.ring:LOUD"}\n',
}


def git(folder: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(
        command, cwd=folder, env=os.environ | IDENTITY, check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "engine/schemas").symlink_to("../schemas")
    (tmp_path / "engine/bells/pages").symlink_to("../../docs")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "all")
    return tmp_path


def move(root: Path, old: str, new: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--root", str(root), old, new]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def moved(root: Path, old: str, new: str) -> dict[str, str]:
    """The texts of all tracked files after a move that is committed."""
    ended = move(root, old, new)
    assert ended.returncode == 0, ended.stderr
    git(root, "commit", "-qm", "move")
    assert git(root, "status", "--porcelain") == ""
    paths = [root / path for path in git(root, "ls-files").splitlines()]
    return {str(path.relative_to(root)): path.read_text(errors="replace") for path in paths if path.is_file()}


def test_a_room_moves_with_everything_that_names_it_and_back(checkout: Path) -> None:
    before = git(checkout, "rev-parse", "HEAD^{tree}")
    texts = moved(checkout, "engine/bells", "engine/plugins/chimes")
    assert texts["engine/plugins/chimes/ring.py"] == FILES["engine/bells/ring.py"].replace(
        "bells/", "plugins/chimes/", 1
    )
    assert (
        "from engine.plugins.chimes import ring\nfrom engine.plugins.chimes.ring import LOUD\n"
        in texts["engine/plugins/chimes/tower.py"]
    )
    assert texts["engine/run.py"] == (
        "from engine import plugins\nfrom engine.plugins import chimes as bells\n\n\ndef run() -> None:\n"
        "    from engine.plugins.chimes import ring  # late\n\n"
        '    print(bells, plugins, ring, "engine.plugins.chimes.ring:LOUD", "engine.bells_and", f"engine.{run}")\n'
    )
    assert texts["schemas/row.py"] == '"""Written by engine/plugins/chimes/ring.py."""\n'
    assert "[the code](../engine/plugins/chimes/ring.py), `engine/plugins/chimes/`" in texts["docs/bells.md"]
    assert '"engine.plugins.chimes" = ["*.md"]' in texts["pyproject.toml"]
    assert texts["specs/a.yaml"] == "environment: {use: engine.plugins.chimes.ring:LOUD}\n"
    assert texts["tests/goldens/row.json"] == FILES["tests/goldens/row.json"]
    assert (checkout / "engine/plugins/chimes/pages").readlink() == Path("../../../docs")

    moved(checkout, "engine/plugins/chimes", "engine/bells")
    assert git(checkout, "rev-parse", "HEAD^{tree}") == before


@pytest.mark.slow
def test_a_module_of_a_package_moves_alone(checkout: Path) -> None:
    texts = moved(checkout, "engine/bells/ring.py", "engine/plugins/sound.py")
    assert texts["engine/bells/tower.py"] == (
        "from engine.plugins import sound as ring\nfrom engine.plugins.sound import LOUD\n\nprint(ring, LOUD)\n"
    )
    assert "engine.plugins.sound:LOUD" in texts["specs/a.yaml"]
    assert "`engine/bells/`" in texts["docs/bells.md"]


def test_links_of_pages_follow_in_both_directions(checkout: Path) -> None:
    texts = moved(checkout, "docs/bells.md", "docs/more/chimes.md")
    assert texts["docs/spec.md"] == "[bells](more/chimes.md), [outside](https://a.b/bells.md)\n"
    assert "[spec](../spec.md#top), [the code](../../engine/bells/ring.py)" in texts["docs/more/chimes.md"]


@pytest.mark.slow
def test_a_moved_target_of_a_link_of_the_file_system(checkout: Path) -> None:
    moved(checkout, "docs", "pages")
    assert (checkout / "engine/bells/pages").readlink() == Path("../../pages")


@pytest.mark.slow
def test_what_cannot_be_known_is_printed(checkout: Path) -> None:
    ended = move(checkout, "engine/bells", "engine/plugins/bells")
    assert ended.stdout == (
        "engine/run.py:8: a name is put together at run time: "
        'print(bells, plugins, ring, "engine.plugins.bells.ring:LOUD", "engine.bells_and", f"engine.{run}")\n'
    )


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("engine/nothing.py", "engine/x.py", "engine/nothing.py is not tracked by git"),
        ("engine/run.py", "engine/bells/ring.py", "engine/bells/ring.py exists already"),
        ("engine/run.py", "engine/bells/run", "a file moves to a file, and a folder to a folder"),
        ("engine/run.py", "engine/deep/er/run.py", "engine/deep/__init__.py is missing: write it first"),
    ],
)
def test_a_move_that_cannot_be_made_changes_nothing(checkout: Path, old: str, new: str, error: str) -> None:
    ended = move(checkout, old, new)
    assert ended.returncode == 2
    assert error in ended.stderr
    assert git(checkout, "status", "--porcelain") == ""


def test_a_room_that_is_a_layer_by_name_is_refused(checkout: Path) -> None:
    page = checkout / "pyproject.toml"
    page.write_text(page.read_text().replace('"(bells)"', '"bells"'))
    ended = move(checkout, "engine/bells", "engine/plugins/bells")
    assert "the checkout has changes" in ended.stderr
    git(checkout, "commit", "-qam", "layer")
    ended = move(checkout, "engine/bells", "engine/plugins/bells")
    assert 'pyproject.toml names a layer "bells": write "(bells)" first' in ended.stderr


@pytest.mark.slow
def test_a_room_of_this_project_moves_there_and_back(tmp_path: Path) -> None:
    root = tmp_path / "copy"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(root)], check=True)
    (root / "engine/plugins").mkdir(exist_ok=True)
    (root / "engine/plugins/__init__.py").write_text('"""Plugins."""\n')
    git(root, "add", "-A")
    git(root, "commit", "-qm", "a place for it", "--allow-empty")
    before = git(root, "rev-parse", "HEAD^{tree}")
    texts = moved(root, "engine/train", "engine/plugins/train")
    assert not [path for path, text in texts.items() if "engine.train" in text and path != "tests/test_move.py"]
    environment = os.environ | {"PYTHONPATH": str(root)}
    check = "import engine, engine.plugins.train.trainer; print(engine.__file__)"
    ended = subprocess.run([sys.executable, "-c", check], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.stdout.strip() == str(root / "engine/__init__.py"), ended.stderr
    moved(root, "engine/plugins/train", "engine/train")
    assert git(root, "rev-parse", "HEAD^{tree}") == before
