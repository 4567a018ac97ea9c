"""Every way to fail, in every part, with `isolation: process`: all accounted for, the healthy ones untouched."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineError
from engine.schemas.trajectory import Trajectory
from engine.spec.code.entry import EntryError
from engine.spec.load import load_spec
from engine.validate import check_spec

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


@pytest.mark.slow
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
@pytest.mark.exhaustive
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


EPISODES = int(os.environ.get("EPISODE_ENGINE_TEST_EPISODES", "150"))
"""1,000 take about a minute."""


@pytest.mark.slow
def test_a_fifth_of_the_episodes_do_harm_and_the_others_are_untouched(
    write: Callable[..., Path], command: Callable[..., Any], episodes: Callable[[], dict[str, Trajectory]]
) -> None:
    """10 % raise, 5 % hang, 5 % end their process; the parts take turns."""
    parts = ("environment", "counter", "user", "scorer", "action")
    dies = ("exit", "kill", "segv", "memory")
    rows: list[dict[str, Any]] = [{"id": f"healthy-{index}"} for index in range(EPISODES)]
    for number, index in enumerate(range(0, EPISODES, 5)):
        role = parts[number % len(parts)]
        kind = ("raise", HANGS[number // 4 % 3], "raise", dies[number // 4 % 4])[number % 4]
        rows[index] = {"id": f"{role}-{kind}-{index}", "role": role, "kind": kind}
    rollout = {"seed": 7, "concurrency": 8, "live_episodes": 40}  # the hangs wait for their deadlines at one time
    ran = command("run", str(write(rows, rollout=rollout)), "-q")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = episodes()
    assert sorted(found) == sorted(row["id"] for row in rows)
    for episode in found.values():
        role, kind, *_ = [*episode.task_id.split("-"), ""]
        check(replace(episode, task_id="healthy-" if role == "healthy" else f"{role}-{kind}"))


@pytest.mark.slow
async def test_the_engine_imports_nothing_that_is_isolated(
    write: Callable[..., Path], run_here: Callable[..., Any], tmp_path: Path
) -> None:
    spec = write([{"id": "healthy"}])
    (tmp_path / "isolated_code.py").rename(tmp_path / "only_in_workers.py")
    spec.write_text(spec.read_text().replace("isolated_code", "only_in_workers"))
    errors = [item for item in check_spec(load_spec(spec)) if item.severity == "error"]
    assert errors == []
    check(replace((await run_here(spec))["healthy"], task_id="healthy-"))
    assert "only_in_workers" not in sys.modules


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["os._exit(5)", "raise LookupError('no')"])
async def test_a_module_that_ends_its_process_at_import_is_named(
    ends: str, write: Callable[..., Path], run_here: Callable[..., Any], tmp_path: Path
) -> None:
    spec = write([{"id": "healthy"}], environment={"use": "ends_at_import:Board"})
    (tmp_path / "ends_at_import.py").write_text(f"import os\n{ends}\n")
    with pytest.raises(EntryError, match="ends_at_import"):
        await run_here(spec)


@pytest.mark.skipif(os.getuid() != 0, reason="these limits bind in another way where the engine is not root")
@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"processes": 4, "user": "engine"}, "isolation.processes cannot take effect"),
        ({"user": "nobody_of_this_name"}, "unknown user `nobody_of_this_name`"),
        ({"memory": "1MB"}, "a worker needs at least"),
    ],
)
async def test_a_limit_that_cannot_bind_is_refused(
    limits: dict[str, Any], words: str, write: Callable[..., Path], run_here: Callable[..., Any]
) -> None:
    with pytest.raises(EngineError, match=words):
        await run_here(write([{"id": "healthy"}], isolation={"mode": "process", **limits}))


@pytest.mark.slow
async def test_limits_of_processes_and_cpu_time_bind(write: Callable[..., Path], run_here: Callable[..., Any]) -> None:
    limits: dict[str, Any] = {"mode": "process", "cpu": "1s"}
    if os.getuid() == 0:
        limits["processes"] = 12
    rows = [
        {"id": "bomb", "role": "environment", "kind": "bomb"},
        {"id": "busy", "role": "counter", "kind": "busy"},
        {"id": "healthy-0"},
    ]
    changes = {"environment": {"use": "isolated_code:Board", "timeout": 60}}
    spec = write(rows, isolation=limits, **changes)
    spec.write_text(spec.read_text().replace("timeout: 10", "timeout: 120"))
    found = await run_here(spec)
    check(found["healthy-0"])
    busy = found["busy"].outcome.failure
    assert busy is not None
    assert busy.kind == "tool_cpu"
    assert "isolation.cpu (1 s)" in busy.message
    if os.getuid() == 0:
        bomb = found["bomb"].outcome.failure
        assert bomb is not None
        assert "BlockingIOError" in bomb.message
        assert found["bomb"].outcome.failure.blame == "environment"


@pytest.mark.slow
async def test_nothing_is_left_of_a_worker_that_leaves_processes_behind(
    write: Callable[..., Path], run_here: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what it started in a session of its own, nor the worker itself."""
    mark = f"{tmp_path.name}-{os.getpid()}"
    monkeypatch.setenv("DAEMON_MARK", mark)
    found = await run_here(write([{"id": "leaver", "role": "environment", "kind": "daemon"}, {"id": "healthy"}]))
    assert found["leaver"].outcome.failure is not None
    left = [line for line in processes() if mark in line]
    assert not left, [line[:200] for line in left]


def processes() -> list[str]:
    """The environment and command line of each process."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            told = (folder / "cmdline").read_bytes() + b" " + (folder / "environ").read_bytes()
            found.append(f"{folder.name} {told.decode('utf-8', 'replace')}")
        except OSError:
            continue
    return found
