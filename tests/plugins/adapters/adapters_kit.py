"""Runs specs with adapters, and says what each episode saw and earned."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import trajectories_of
from typer.testing import CliRunner
from written_specs import save_spec, scripted_spec

from engine.cli.main import app
from engine.schemas.trajectory import Trajectory
from engine.store.store import find_run

FAULTY_EVERY = 20
"""One task in so many has a fault: 5 %."""

EPISODES = 160
"""Episodes of a test with planned faults: as many as give each fault at least once, between episodes without one."""

FEW = {"concurrency": 4, "live_episodes": 4}
"""Episodes at once where each worker process imports a large library."""

LONG = pytest.mark.timeout(3000)
"""For tests that take 15 s or more: they pass on a machine that is ten times slower too."""


def planned_faults(kinds: Sequence[str]) -> list[str | None]:
    """The fault of each of EPISODES tasks: one task in FAULTY_EVERY has one, of each kind as often, in a random but fixed order."""
    chosen = [kinds[n % len(kinds)] for n in range(EPISODES // FAULTY_EVERY)]
    random.Random(16).shuffle(chosen)
    return [chosen[n // FAULTY_EVERY] if n % FAULTY_EVERY == 0 else None for n in range(EPISODES)]


def failures(episodes: Mapping[str, Trajectory]) -> dict[str, tuple[str, str]]:
    """The blame and kind of each failed episode, by id."""
    return {
        id: (episode.outcome.failure.blame, episode.outcome.failure.kind)
        for id, episode in episodes.items()
        if episode.outcome.failure is not None
    }


def expected_failures(
    rows: Iterable[Mapping[str, Any]],
    faults: Iterable[str | None],
    kinds: Mapping[str, str],
    blame: str = "environment",
) -> dict[str, tuple[str, str]]:
    """What `failures` must give: the episode of each task with a fault, with the fault's kind."""
    return {
        f"{row['id']}/0": (blame, kinds[fault]) for row, fault in zip(rows, faults, strict=True) if fault is not None
    }


def spec_of(
    model: Path, environment: dict[str, Any], rows: list[dict[str, Any]], replies: Any, **changes: Any
) -> dict[str, Any]:
    """A spec with one adapter."""
    return {
        **scripted_spec("adapter", model, replies, rows, ask="Begin.", tool_calls=None),
        "environment": environment,
        "machine": "step",
        "limits": {"assistant_turns": 40},
        **changes,
    }  # fmt: skip


def run_spec(folder: Path, document: dict[str, Any], *flags: str) -> dict[str, Trajectory]:
    """Run a spec; the episodes by id. The command's status must be 1 if all of them failed, else 0."""
    path = save_spec(folder / "spec.yaml", document)
    out = folder / "runs"
    result = CliRunner().invoke(app, ["run", str(path), "--quiet", "--keep-going", "--out", str(out), *flags])
    episodes = {trajectory.episode_id: trajectory for trajectory in trajectories_of(find_run("latest", out))}
    all_failed = all(episode.outcome.failure is not None for episode in episodes.values())
    assert result.exit_code == int(all_failed), result.output
    return episodes


def shown(trajectory: Trajectory) -> list[str]:
    """What the environment said, in order: the text of each message that is not the model's, the prompt excluded."""
    return [message.text for message in trajectory.messages[1:] if message.role != "assistant"]


def earned(trajectory: Trajectory) -> list[float]:
    """The reward of each turn."""
    return [sum(turn.rewards.values()) for turn in trajectory.turns]
