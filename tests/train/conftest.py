"""Specs that train a tiny model of random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Make = Callable[..., Path]


@pytest.fixture
def train_spec(tmp_path: Path, tiny_model_dir: Path) -> Make:
    """Write a spec that trains: two turns, four samples of each task, and what the test changes."""

    def make(name: str = "spec", train: dict[str, Any] | None = None, **changes: Any) -> Path:
        spec: dict[str, Any] = {
            "spec": "episode/v1",
            "name": name,
            "model": {"path": str(tiny_model_dir)},
            "backend": {"kind": "local", "dtype": "float32", "max_batch": 16},
            "tasks": {"source": "inline", "rows": [{"id": f"t{number}", "say": f"word {number}"} for number in range(6)],
                      "id": "id"},
            "prompt": [{"role": "user", "content": "Say {{say}}."}],
            "user": {"use": "code_for_training:Listener"},
            "machine": {"preset": "tools_and_user", "transitions": [
                {"trigger": "truncated", "source": "GENERATING", "dest": "AWAITING_USER_FEEDBACK"}]},
            "limits": {"turn_tokens": 6, "assistant_turns": 2, "episode_tokens": 64},
            "rewards": {"credit": {"method": "turn_return", "gamma": 0.5}},
            "rollout": {"samples_per_task": 4, "seed": 3},
            "train": {"steps": 3, "tasks_per_step": 2, "optimizer": {"lr": 0.003}} | (train or {}),
        }  # fmt: skip
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(spec | changes))
        return path

    return make
