"""Packages of strangers in a folder of their own, over the environment of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def install(package: Path, layer: Path) -> None:
    """Install a package with pip into a folder."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(layer)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(package)], check=True)


def write_plugin(layer: Path, name: str, face: str) -> None:
    """Write an installed package with a plugin: its module, and the entry point that names it."""
    module = f"stranger_{name}"
    layer.mkdir(exist_ok=True)
    (layer / f"{module}.py").write_text(f"from engine.plugin import Plugin\n{face}\n", encoding="utf-8")
    facts = layer / f"{module}-2.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 2.0\n", encoding="utf-8")
    (facts / "entry_points.txt").write_text(f"[episode_engine.plugins]\n{name} = {module}:PLUGIN\n", encoding="utf-8")


def engine(layer: Path, *arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `engine` with the packages of a layer."""
    variables = os.environ | {"PYTHONPATH": f"{layer}{os.pathsep}{ROOT}", "COLUMNS": "200", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "engine.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=variables, cwd=cwd, check=False)
