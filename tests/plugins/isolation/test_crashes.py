"""Episodes that kill the engine: resumed, run in a process of their own, and failed with blame."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slow_cases import slow_but

from engine.runner.source import APART, BY_ITSELF, GIVEN_UP, CrashIsolation
from engine.schemas.trajectory import Trajectory
from engine.store import RunStore, find_run

ROWS = [{"id": f"healthy-{index}"} for index in range(12)]
BLAMES = {"environment": "environment", "tool": "tool", "counter": "tool", "user": "user", "scorer": "environment"}


@pytest.mark.parametrize("role", slow_but(BLAMES, "tool"))
async def test_an_episode_that_was_in_flight_at_two_crashes_kills_a_worker_and_nothing_else(
    role: str, write: Callable[..., Path], run_here: Callable[..., Any]
) -> None:
    rows = [*ROWS[:2], {"id": "poison", "role": role, "kind": "exit"}, {"id": "suspect"}, *ROWS[2:4]]
    found = await run_here(write(rows, isolation=None), {"poison": 2, "suspect": 2, "healthy-3": 1})
    assert sorted(found) == sorted(row["id"] for row in rows)
    poison = found.pop("poison").outcome.failure
    assert poison is not None
    assert (poison.kind, poison.blame) == (f"{BLAMES[role]}_crashed", BLAMES[role])
    assert "ended its process with exit code 7" in poison.message
    here = {task: episode.facts["environment"]["pid"] == os.getpid() for task, episode in found.items()}
    assert here == {"healthy-0": True, "healthy-1": True, "healthy-2": True, "healthy-3": True, "suspect": False}
    parts = [found["suspect"].facts[name]["pid"] for name in ("environment", "tool", "counter", "user", "action")]
    assert len(set(parts)) == 1  # one worker holds all of it
    for episode in found.values():
        assert episode.outcome.failure is None
        assert episode.outcome.rewards == {"reward": 1.0, "state": 2.0, "judged": 0.25}


async def test_an_episode_that_killed_the_engine_by_itself_is_not_run(
    write: Callable[..., Path], run_here: Callable[..., Any]
) -> None:
    found = await run_here(write(ROWS[:2], isolation=None), {"healthy-1": GIVEN_UP})
    assert found["healthy-0"].outcome.failure is None
    failure = found["healthy-1"].outcome.failure
    assert failure is not None
    assert (failure.kind, failure.blame) == ("engine_crashed", "engine")
    assert found["healthy-1"].turns == []


@pytest.mark.slow
@pytest.mark.parametrize("role", BLAMES)
def test_a_poisoned_episode_ends_two_commands_and_is_a_failure_in_the_third(
    role: str, write: Callable[..., Path], command: Callable[..., Any], episodes: Callable[[], dict[str, Trajectory]]
) -> None:
    rows = [*ROWS[:4], {"id": "poison", "role": role, "kind": "exit"}, *ROWS[4:]]
    spec = write(rows, isolation=None, rollout={"seed": 7, "concurrency": 2, "live_episodes": 4})
    ran = command("run", str(spec), "-q")
    statuses = [ran.returncode]
    while statuses[-1] == 7 and len(statuses) < 6:
        statuses.append(command("run", "--resume", "latest", "-q").returncode)
    # A crash counts only if the beginning of the episode was on disk by then, so one more command may end.
    assert statuses in ([7, 7, 0], [7, 7, 7, 0])
    found = episodes()
    assert sorted(found) == sorted(row["id"] for row in rows)
    for row in ROWS:
        outcome = found[row["id"]].outcome
        assert outcome.failure is None
        assert outcome.rewards == {"reward": 1.0, "state": 2.0, "judged": 0.25}
    poison = found["poison"].outcome
    assert poison.failure is not None
    assert (poison.failure.kind, poison.failure.blame) == (f"{BLAMES[role]}_crashed", BLAMES[role])
    assert "ended its process with exit code 7" in poison.failure.message


@pytest.mark.slow
def test_an_episode_that_kills_the_engine_by_itself_is_given_up(
    write: Callable[..., Path],
    command: Callable[..., Any],
    episodes: Callable[[], dict[str, Trajectory]],
    tmp_path: Path,
) -> None:
    """A parser of tool calls runs in the engine's process, and no worker holds it."""
    parser = (
        "import os\nfrom engine.tokens.toolcalls import HermesFormat\n\n\nclass Killer(HermesFormat):\n"
        "    def parse(self, text, tools, prefix):\n"
        "        if 'done' in text:\n            os._exit(9)\n"
        "        return super().parse(text, tools, prefix)\n"
    )
    (tmp_path / "killer.py").write_text(parser)
    rows = [{"id": "a"}]
    spec = write(rows, isolation=None)
    text = spec.read_text().replace("tool_calls: hermes", "tool_calls: killer:Killer")
    spec.write_text(text)
    statuses = [command("run", str(spec), "-q", "--keep-going").returncode]
    while statuses[-1] == 9 and len(statuses) < 10:
        statuses.append(command("run", "--resume", "latest", "-q", "--keep-going").returncode)
    assert statuses == [9] * GIVEN_UP + [1]  # its only episode failed
    failure = episodes()["a"].outcome.failure
    assert failure is not None
    assert (failure.kind, failure.blame) == ("engine_crashed", "engine")


@pytest.mark.slow
def test_an_interruption_is_no_crash_and_kill_9_is_one(
    write: Callable[..., Path], tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    spec = write([{"id": "slow", "role": "environment", "kind": "hang"}], isolation=None)
    spec.write_text(spec.read_text().replace("timeout: 10", "timeout: 300"))
    counts = []
    arguments = [str(spec)]
    for number in (signal.SIGINT, signal.SIGKILL, signal.SIGINT, signal.SIGKILL):
        engine = subprocess.Popen([sys.executable, "-m", "engine.cli.main", "run", *arguments, "-q"], cwd=tmp_path)
        running = False
        while not running and engine.poll() is None:
            time.sleep(0.1)
            for file in (tmp_path / "runs").glob("*/run.db"):
                try:
                    with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as connection:
                        query = "SELECT count(*) FROM crash_counts WHERE running"
                        running = bool(connection.execute(query).fetchone()[0])
                except sqlite3.Error:
                    continue
        os.kill(engine.pid, number)
        engine.wait(60)
        arguments = ["--resume", "latest"]
        folder = find_run("latest", tmp_path / "runs")
        with RunStore.open(folder) as store:
            counts.append(store.crashes().get("slow/0", 0))
    assert counts == [0, 1, 1, 2]


async def test_the_more_suspect_an_episode_is_the_more_it_is_kept_apart() -> None:
    isolation = CrashIsolation({"a": APART, "b": BY_ITSELF, "c": GIVEN_UP, "d": 1})
    assert isolation.given_up("c") is not None
    assert isolation.given_up("b") is None
    async with (
        isolation.admitted("healthy") as alone,
        isolation.admitted("a") as apart,
        isolation.admitted("d") as once,
    ):
        assert (alone, apart, once) == (False, True, False)


async def test_nothing_is_in_flight_beside_an_episode_that_runs_by_itself() -> None:
    isolation = CrashIsolation({"b": BY_ITSELF})
    flying: set[str] = set()
    seen: list[set[str]] = []

    async def fly(name: str) -> None:
        async with isolation.admitted(name):
            flying.add(name)
            seen.append(set(flying))
            for _ in range(5):
                await asyncio.sleep(0)
            flying.discard(name)

    await asyncio.gather(*(fly(name) for name in ("h1", "h2", "b", "h3", "h4")))
    assert [here for here in seen if "b" in here] == [{"b"}]
    assert len(seen) == 5
    assert max(len(here) for here in seen) == 2
