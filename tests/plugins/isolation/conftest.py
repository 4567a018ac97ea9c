"""Specs whose code does harm, run with `isolation: process`."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import engine_apart, trajectories_of
from written_specs import save_spec, scripted_spec

from engine.backends.registry import open_backend
from engine.runner.runner import Runner
from engine.schemas.trajectory import Trajectory
from engine.spec.load import load_spec
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore, find_run
from engine.tokens.loading import load_format

HERE = Path(__file__).parent
SECONDS = 10
"""The deadline of every part but the tool `work`, whose calls have 3 s."""
REPLIES = [
    {"tool_calls": [{"name": "work"}]},
    {"tool_calls": [{"name": "Counter"}]},
    {"tool_calls": [{"name": "Counter"}, {"name": "look"}]},
    "It is done.",
]
MACHINE = {
    "preset": "tools_and_user",
    "states": {"STEPPING": {"action": "step"}, "CHECKING": {"action": "isolated_code:check", "timeout": SECONDS}},
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
        **scripted_spec("isolated", tokenizer, REPLIES, rows, ask=None),
        "environment": {"use": "isolated_code:Board", "timeout": SECONDS},
        "tools": [
            {"use": "isolated_code:work", "timeout": 3},
            {"use": "isolated_code:Counter", "timeout": SECONDS, "effects": "replayable"},
        ],
        "user": {"use": "isolated_code:Asker", "timeout": SECONDS},
        "machine": MACHINE,
        "rewards": {"scorer": {"use": "isolated_code:judge", "timeout": SECONDS, "with": {"value": 0.25}}},
        "isolation": {"mode": "process", "memory": "1GB", "output": "1MB"},
        "rollout": {"seed": 7, "concurrency": 8, "live_episodes": 16},
        **changes,
    }


Run = Callable[..., dict[str, Trajectory]]


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`engine …` in a process of its own, in `tmp_path`."""
    return partial(engine_apart, cwd=tmp_path)


@pytest.fixture
def write(tmp_path: Path, tiny_tokenizer_dir: Path) -> Callable[..., Path]:
    """Write a spec with these rows, and its code beside it."""

    def make(rows: list[dict[str, Any]], **changes: Any) -> Path:
        (tmp_path / "isolated_code.py").write_text((HERE / "isolated_code.py").read_text())
        return save_spec(tmp_path / "spec.yaml", json.loads(json.dumps(document(tiny_tokenizer_dir, rows, **changes))))

    return make


@pytest.fixture
def run_here(tmp_path: Path) -> Callable[..., Any]:
    """Run a spec in this process; its finished episodes by task. `crashes` says at how many crashes each was in flight."""

    async def run(path: Path, crashes: dict[str, int] | None = None) -> dict[str, Trajectory]:
        loaded = load_spec(path)
        form = load_format(loaded.spec.model, loaded.base)
        backend = open_backend(loaded, form)
        await backend.start()
        tasks = load_tasks(loaded)
        with RunStore.create(tmp_path / "runs", RunHeader.of(loaded)) as store:
            await store.plan(tasks, 1)
            folder = store.folder
        with sqlite3.connect(folder / "run.db") as connection:
            for task, count in (crashes or {}).items():
                connection.execute(
                    "INSERT INTO crash_counts SELECT number, ?, 0 FROM episodes WHERE task_id = ?", (count, task)
                )
        with RunStore.open(folder) as store:
            result = await Runner(loaded, tasks, form, backend, store).run()
            assert result.faults == []
            found = {trajectory.task_id: trajectory for trajectory in store.trajectories()}
        await backend.close()
        return found

    return run


@pytest.fixture
def episodes(tmp_path: Path) -> Callable[[], dict[str, Trajectory]]:
    """The finished episodes of the newest run, by task."""

    def read() -> dict[str, Trajectory]:
        run = find_run("latest", tmp_path / "runs")
        return {trajectory.task_id: trajectory for trajectory in trajectories_of(run)}

    return read
