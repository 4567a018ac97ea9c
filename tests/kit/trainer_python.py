"""Runs a script with the Python of another environment that has a trainer, named by an environment variable."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run_script(variable: str, script: Path, *words: str) -> Any:
    """The JSON in the last line that the script prints; the test is skipped if the variable is not set.

    Args:
        variable: Such as `SKYRL_PYTHON`: the Python of an environment with the trainer and the engine's requirements.
        script: The script. It can import `engine`.
        words: Its arguments.
    """
    python = os.environ.get(variable)
    if python is None:
        pytest.skip(f"NOT CHECKED: {variable} names no Python that has the trainer (see docs/trainers.md)")
    done = subprocess.run(
        [python, str(script), *words],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    print(done.stderr)  # pytest shows it if the test fails later
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
