"""Runs a script of this folder with a Python that has verl, and keeps what several tests read of it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run_verl(script: Path, *words: str) -> Any:
    """The JSON in the last line that the script prints; the test is skipped where there is no verl."""
    python = sys.executable if importlib.util.find_spec("verl") else os.environ.get("VERL_PYTHON")
    if python is None:
        pytest.skip("NOT CHECKED: verl is not installed here, and VERL_PYTHON names no Python that has it")
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "tests/kit", "tests/train", "tests/integrations"))
    environment = os.environ | {"PYTHONPATH": paths, "RAY_AUTH_MODE": "disabled", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    done = subprocess.run([python, str(script), *words], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
