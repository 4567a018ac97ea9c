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
    return json.loads(call_verl(str(script), *words).splitlines()[-1])


def call_verl(*words: str) -> str:
    """What a Python that has verl prints with these arguments; the test is skipped where there is none."""
    python = sys.executable if importlib.util.find_spec("verl") else os.environ.get("VERL_PYTHON")
    if python is None:
        pytest.skip("NOT CHECKED: verl is not installed here, and VERL_PYTHON names no Python that has it")
    paths = os.pathsep.join(
        str(ROOT / folder)
        for folder in (".", "tests/kit", "tests/core/train", "tests/plugins/trainers", "tests/core/vision")
    )
    environment = os.environ | {"PYTHONPATH": paths, "RAY_AUTH_MODE": "disabled", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    done = subprocess.run([python, *words], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def config_of(**changes: Any) -> dict[str, Any]:
    """verl's configuration as far as the adapter reads it; `changes` by dotted path, with `__` for a dot."""
    rollout = {"n": 3, "temperature": 1.0, "name": "sglang", "calculate_log_probs": True, "prompt_length": 48}
    config: dict[str, Any] = {
        "actor_rollout_ref": {"rollout": rollout | {"response_length": 40, "multi_turn": {}}},
        "algorithm": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True},
        "trainer": {"use_v1": True, "test_freq": -1, "v1": {"sampler": {"sync_refill_failed_groups": True}}},
    }
    for name, value in changes.items():
        *parts, last = name.split("__")
        found = config
        for part in parts:
            found = found.setdefault(part, {})
        found[last] = value
    return config
