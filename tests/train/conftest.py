"""Specs that train a tiny model of random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from written_specs import TALKS_ON_WHEN_CUT, listener_spec, save_spec

Make = Callable[..., Path]


@pytest.fixture
def train_spec(tmp_path: Path, tiny_model_dir: Path) -> Make:
    """Write a spec that trains: two turns, four samples of each task, and what the test changes."""

    def make(name: str = "spec", train: dict[str, Any] | None = None, **changes: Any) -> Path:
        spec: dict[str, Any] = {
            **listener_spec(name, tiny_model_dir),
            "backend": {"kind": "local", "dtype": "float32", "max_batch": 16},
            "machine": TALKS_ON_WHEN_CUT,
            "limits": {"turn_tokens": 6, "assistant_turns": 2, "episode_tokens": 64},
            "rewards": {"credit": {"method": "turn_return", "gamma": 0.5}},
            "rollout": {"samples_per_task": 4, "seed": 3},
            "train": {"steps": 3, "tasks_per_step": 2, "optimizer": {"lr": 0.003}} | (train or {}),
        }  # fmt: skip
        return save_spec(tmp_path / f"{name}.yaml", spec | changes)

    return make
