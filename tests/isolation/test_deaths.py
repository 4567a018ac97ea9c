"""Every way to fail, in every part, with `isolation: process`: all accounted for, the healthy ones untouched."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.schemas.trajectory import Trajectory

ROLES = ("environment", "tool", "counter", "user", "scorer", "step", "score", "action")
BLAMES = {"tool": "tool", "counter": "tool", "user": "user", "action": "spec"}
"""By role; the others are the environment's."""
KINDS = {
    "raise": "error",
    "exit": "crashed",
    "kill": "crashed",
    "segv": "crashed",
    "memory": "error",
    "nonsense": "crashed",
    "print": "output",
    "hang": "timeout",
    "busy": "timeout",
    "hang_async": "timeout",
}
"""What the failure's kind says behind the blame."""
WORDS = {
    "raise": "raises",
    "exit": "ended its process with exit code 7",
    "kill": "ended its process by SIGKILL",
    "segv": "ended its process by SIGSEGV",
    "memory": "(isolation.memory is 1000000000 bytes)",
    "nonsense": "",
    "print": "isolation.output (1000000 bytes)",
    "hang": "did not answer within ",
    "busy": "did not answer within ",
    "hang_async": "did not answer within ",
}


def rows_of(pairs: list[tuple[str, str]], healthy: int) -> list[dict[str, Any]]:
    """One task for each pair of a role and a kind, and healthy ones among them."""
    rows: list[dict[str, Any]] = [{"id": f"{role}-{kind}", "role": role, "kind": kind} for role, kind in pairs]
    step = max(1, len(rows) // max(1, healthy))
    for index in range(healthy):
        rows.insert(index * (step + 1), {"id": f"healthy-{index}"})
    return rows


def check(episode: Trajectory) -> None:
    """Hold a finished episode to what its task says."""
    outcome = episode.outcome
    role, _, kind = episode.task_id.partition("-")
    if role == "healthy":
        assert outcome.failure is None, (episode.task_id, outcome.failure)
        assert (outcome.solved, outcome.trainable) == (True, True)
        assert outcome.rewards == {"reward": 1.0, "state": 2.0, "judged": 0.25}
        assert episode.facts["seen"] == 2
        assert [message.content for message in episode.messages if message.role == "tool"] == [
            "done ",
            "1",
            "2",
            "seen",
        ]
        return
    if role == "tool":  # it keeps nothing: the model is told, and the episode goes on
        assert outcome.failure is None, (episode.task_id, outcome.failure)
        said = next(message.text for message in episode.messages if message.role == "tool")
        assert said.startswith("`work` did not answer within 3 s." if kind in HANGS else "`work` failed: ")
        assert WORDS[kind] in said
        assert outcome.solved
        return
    if role == "counter" and KINDS[kind] == "error":  # it raised, and its state is still there
        assert outcome.failure is None, (episode.task_id, outcome.failure)
        return
    assert outcome.failure is not None, episode.task_id
    blame = BLAMES.get(role, "environment")
    assert outcome.failure.blame == blame, (episode.task_id, outcome.failure)
    assert outcome.failure.kind == f"{blame}_{KINDS[kind]}", (episode.task_id, outcome.failure)
    assert WORDS[kind] in outcome.failure.message
    assert not outcome.trainable


HANGS = ("hang", "busy", "hang_async")


async def test_every_death_in_every_part_is_one_episode_s_failure(
    write: Callable[..., Path], run_here: Callable[..., Any]
) -> None:
    pairs = [(role, kind) for role in ROLES for kind in KINDS if kind not in HANGS]
    rows = rows_of([*pairs, *(("tool", kind) for kind in HANGS)], healthy=9)
    found = await run_here(write(rows))
    assert sorted(found) == sorted(row["id"] for row in rows)
    for episode in found.values():
        check(episode)


@pytest.mark.slow
async def test_every_way_to_hang_in_every_part_is_one_episode_s_failure(
    write: Callable[..., Path], run_here: Callable[..., Any]
) -> None:
    plain = ("step", "score")
    pairs = [(role, kind) for role in ROLES for kind in HANGS if not (role in plain and kind == "hang_async")]
    rows = rows_of([pair for pair in pairs if pair != ("tool", "busy")], healthy=9)
    found = await run_here(write(rows))
    assert sorted(found) == sorted(row["id"] for row in rows)
    for episode in found.values():
        check(episode)


async def test_workers_are_other_processes_without_torch_and_with_uids_of_their_own(
    write: Callable[..., Path], run_here: Callable[..., Any]
) -> None:
    facts = (await run_here(write([{"id": "healthy"}])))["healthy"].facts
    parts = [facts[name] for name in ("environment", "looked", "tool", "counter", "user", "action")]
    assert facts["environment"] == facts["looked"]
    pids = {part["pid"] for part in parts}
    assert len(pids) == 5
    assert [part["torch"] for part in parts] == [False] * 6
    uids = {part["uid"] for part in parts}
    if os.getuid() == 0:
        assert len(uids) == 5
        assert all(61_184 <= uid <= 65_519 for uid in uids)
    else:
        assert uids == {os.getuid()}
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]  # noqa: ASYNC240, PTH110


@pytest.mark.slow
def test_a_thousand_episodes_of_which_a_fifth_do_harm(
    write: Callable[..., Path], command: Callable[..., Any], episodes: Callable[[], dict[str, Trajectory]]
) -> None:
    parts = ("environment", "counter", "user", "scorer", "action")
    kinds = (
        ["raise"] * 100 + (["hang", "hang_async", "busy"] * 17)[:50] + (["exit", "kill", "segv", "memory"] * 13)[:50]
    )
    rows: list[dict[str, Any]] = []
    for index in range(1000):
        if index % 5 == 0:
            role, kind = parts[index // 5 % len(parts)], kinds[index // 5]
            rows.append({"id": f"{role}-{kind}-{index}", "role": role, "kind": kind})
        else:
            rows.append({"id": f"healthy-{index}"})
    ran = command("run", str(write(rows)), "-q")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = episodes()
    assert sorted(found) == sorted(row["id"] for row in rows)
    for episode in found.values():
        role, kind, *_ = [*episode.task_id.split("-"), ""]
        check(episode.model_copy(update={"task_id": "healthy-" if role == "healthy" else f"{role}-{kind}"}))
