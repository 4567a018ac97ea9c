"""Specs whose worlds do harm, run with `isolation: process`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.store import RunStore, find_run
from schemas.trajectory import Trajectory

HERE = Path(__file__).parent
REPLIES = [
    {"tool_calls": [{"name": "work"}]},
    {"tool_calls": [{"name": "Counter"}]},
    {"tool_calls": [{"name": "Counter"}, {"name": "look"}]},
    "It is done.",
]
MACHINE = {
    "preset": "tools_and_user",
    "states": {"STEPPING": {"action": "step"}, "CHECKING": {"action": "isolated_worlds:check", "timeout": "5s"}},
    "transitions": [
        {"trigger": "answered", "source": "GENERATING", "dest": "STEPPING"},
        {"trigger": "moved", "source": "STEPPING", "dest": "CHECKING"},
        {"trigger": "checked", "source": "CHECKING", "dest": "AWAITING_USER_FEEDBACK"},
        {"trigger": ["failed", "limit"], "source": ["STEPPING", "CHECKING"], "dest": "DONE"},
    ],
}


def document(tokenizer: Path, rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """A spec in which every part may do harm."""
    return {
        "spec": "episode/v1",
        "name": "isolated",
        "model": {"path": str(tokenizer), "tool_calls": "hermes"},
        "backend": {"kind": "scripted", "replies": REPLIES},
        "tasks": {"source": "inline", "rows": rows, "id": "id"},
        "environment": {"use": "isolated_worlds:World", "timeout": "5s"},
        "tools": [
            {"use": "isolated_worlds:work", "timeout": "5s"},
            {"use": "isolated_worlds:Counter", "timeout": "5s", "effects": "replayable"},
        ],
        "user": {"use": "isolated_worlds:Asker", "timeout": "5s"},
        "machine": MACHINE,
        "rewards": {"scorer": {"use": "isolated_worlds:judge", "timeout": "5s", "with": {"value": 0.25}}},
        "isolation": {"mode": "process", "memory": "1GB", "output": "1MB"},
        "rollout": {"seed": 7, "concurrency": 8, "live_episodes": 16},
        **changes,
    }


Run = Callable[..., dict[str, Trajectory]]


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`engine …` in a process of its own, in `tmp_path`."""

    def call(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "engine.cli.main", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
            **options,
        )

    return call


@pytest.fixture
def write(tmp_path: Path, tiny_tokenizer_dir: Path) -> Callable[..., Path]:
    """Write a spec with these rows, and its worlds beside it."""

    def make(rows: list[dict[str, Any]], **changes: Any) -> Path:
        (tmp_path / "isolated_worlds.py").write_text((HERE / "isolated_worlds.py").read_text())
        path = tmp_path / "spec.yaml"
        path.write_text(yaml.safe_dump(json.loads(json.dumps(document(tiny_tokenizer_dir, rows, **changes)))))
        return path

    return make


@pytest.fixture
def episodes(tmp_path: Path) -> Callable[[], dict[str, Trajectory]]:
    """The finished episodes of the newest run, by task."""

    def read() -> dict[str, Trajectory]:
        with RunStore.open(find_run("latest", tmp_path / "runs"), readonly=True) as store:
            return {trajectory.task_id: trajectory for trajectory in store.trajectories()}

    return read
