"""Runs specs with adapters, and says what each episode saw and earned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from engine.cli.main import app
from engine.schemas.trajectory import Trajectory
from engine.store.store import RunStore, find_run

FAULTY_EVERY = 20
"""One task in so many has a fault: 5 %."""

FEW = {"concurrency": 8, "live_episodes": 8}
"""Episodes at once where each worker process imports a large library."""


def spec_of(
    model: Path, environment: dict[str, Any], rows: list[dict[str, Any]], replies: Any, **changes: Any
) -> dict[str, Any]:
    """A spec with one adapter."""
    return {
        "spec": "episode/v1",
        "name": "adapter",
        "model": {"path": str(model)},
        "backend": {"kind": "scripted", "replies": replies},
        "tasks": {"source": "inline", "rows": rows, "id": "id"},
        "prompt": [{"role": "user", "content": "Begin."}],
        "environment": environment,
        "machine": "step",
        "limits": {"assistant_turns": 40},
        **changes,
    }  # fmt: skip


def run_spec(folder: Path, document: dict[str, Any], *flags: str, exits: int = 0) -> dict[str, Trajectory]:
    """Run a spec; the episodes by id."""
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(document))
    out = folder / "runs"
    result = CliRunner().invoke(app, ["run", str(path), "--quiet", "--keep-going", "--out", str(out), *flags])
    assert result.exit_code == exits, result.output
    with RunStore.open(find_run("latest", out), readonly=True) as store:
        return {trajectory.episode_id: trajectory for trajectory in store.trajectories()}


def shown(trajectory: Trajectory) -> list[str]:
    """What the environment said, in order: the text of each message that is not the model's, the prompt excluded."""
    return [message.text for message in trajectory.messages[1:] if message.role != "assistant"]


def earned(trajectory: Trajectory) -> list[float]:
    """The reward of each turn."""
    return [sum(turn.rewards.values()) for turn in trajectory.turns]
