"""A copy of the engine without some folders of `engine/plugins/`, and commands that run in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN = sorted(folder.parent.name for folder in (ROOT / "engine" / "plugins").glob("*/__init__.py"))
"""The engine's own plugins."""


def copy_without(names: list[str], folder: Path) -> Path:
    """Copy engine, schemas and environments into a folder, without the folders of some plugins."""
    left_out = {str(ROOT / "engine" / "plugins" / name) for name in names}

    def ignored(inside: str, found: list[str]) -> list[str]:
        return [name for name in found if name == "__pycache__" or str(Path(inside) / name) in left_out]

    for part in ("engine", "schemas", "environments"):
        shutil.copytree(ROOT / part, folder / part, symlinks=True, ignore=ignored)
    return folder


def python(root: Path, *arguments: str, at: Path | None = None, off: str = "") -> subprocess.CompletedProcess[str]:
    """Run Python with the engine of a copy."""
    variables = os.environ | {"PYTHONPATH": str(root), "ENGINE_PLUGINS_OFF": off, "COLUMNS": "200", "NO_COLOR": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=variables, cwd=at or root, check=False)


def engine(root: Path, *arguments: str, at: Path | None = None, off: str = "") -> subprocess.CompletedProcess[str]:
    """Run `engine` of a copy."""
    return python(root, "-m", "engine.cli.main", *arguments, at=at, off=off)
