"""Real processes on Ray that are killed at random: the episodes are those of an undisturbed run, each is read once.

Needs Ray (the extra `ray`).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from written_specs import save_spec

from engine.plugins.drivers.leases import Leases
from engine.store import RunStore

pytest.importorskip("ray", reason="needs Ray: pip install 'episode-engine[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]

GROUPS, SAMPLES = 500, 4


def spec_of(tmp_path: Path, tokenizer: Path) -> Path:
    (tmp_path / "many_rows.py").write_text(
        "def rows(count: int) -> list[dict]:\n    return [{'id': f't{at}'} for at in range(count)]\n\n\n"
        'def add(a: int, b: int) -> int:\n    """Add two numbers.\n\n    Args:\n        a: One.\n        b: The other.\n    """\n    return a + b\n'
    )
    call = {"tool_calls": [{"name": "add", "arguments": {"a": 1, "b": 2}}], "delay": 0.3}
    spec: dict[str, Any] = {
        "spec": "episode/v1",
        "name": "many",
        "model": {"path": str(tokenizer), "tool_calls": "hermes"},
        "backend": {"kind": "scripted", "replies": [call, call, call, "It is 3."]},
        "tasks": {"source": "python", "use": "many_rows:rows", "with": {"count": GROUPS}, "id": "id"},
        "prompt": [{"role": "user", "content": "Add up."}],
        "tools": [{"use": "many_rows:add"}],
        "machine": "tools",
        "rollout": {"samples_per_task": SAMPLES, "concurrency": 16, "live_episodes": 32, "seed": 3},
    }
    return save_spec(tmp_path / "spec.yaml", spec)


def command(spec: Path, out: str, *more: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "engine.cli.main", "run", spec.name, "-q", "--out", out, *more]
    return subprocess.Popen(words, cwd=spec.parent, env={**os.environ, "RAY_AUTH_MODE": "disabled"})


def actors(parent: int) -> list[tuple[int, str]]:
    """Process ids and names of the actors that a command has started."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    family = {parent}
    for _ in range(4):
        family |= {int(pid) for pid, above, _ in rows if int(above) in family}
    return [
        (int(pid), name)
        for pid, _, words in rows
        for name in ("Driver", "Coordinator")
        if int(pid) in family and words.startswith(f"ray::{name}")
    ]


def contents(folder: Path) -> dict[str, Any]:
    """Tokens, rewards and path of each episode."""
    found: dict[str, Any] = {}
    with RunStore.open(folder, readonly=True) as store:
        for each in store.trajectories():
            assert each.episode_id not in found
            rows = [(row.input_ids.tolist(), row.loss_mask.tolist()) for row in each.branches]
            found[each.episode_id] = (each.seed, rows, each.outcome.rewards, each.outcome.event, each.path)
    return found


def finished(folder: Path) -> set[str]:
    with RunStore.open(folder, readonly=True) as store:
        return store.finished()


@pytest.mark.parametrize(("kills", "groups"), [(3, 120), pytest.param(20, GROUPS, marks=pytest.mark.exhaustive)])
def test_random_kills_lose_no_episode_and_repeat_none(
    kills: int, groups: int, tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    """A driver, the coordinator and so on in turns: each is started again, and goes on."""
    spec = spec_of(tmp_path, tiny_tokenizer_dir)
    limit = ["--limit", str(groups)]
    at_once = ["--set", "rollout.concurrency=256", "--set", "rollout.live_episodes=512"]
    assert command(spec, "alone", *limit, *at_once).wait() == 0
    run = command(spec, "many", "--set", "rollout.drivers=2", *limit)
    choice, killed = random.Random(22), 0
    while killed < kills and run.poll() is None:
        time.sleep(choice.uniform(0.5, 2.0))
        victim = ("Driver", "Coordinator")[killed % 2]
        if found := [pid for pid, name in actors(run.pid) if name == victim]:
            os.kill(choice.choice(found), signal.SIGKILL)
            killed += 1
    assert run.wait() == 0
    assert killed == kills
    (alone,), (many,) = (list((tmp_path / out).iterdir()) for out in ("alone", "many"))
    expected = contents(alone)
    assert len(expected) == groups * SAMPLES
    assert contents(many) == expected
    leases = Leases(many / "leases.db", groups)
    assert leases.counts.done == groups
    leases.close()


@pytest.mark.parametrize(
    ("number", "status"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.exhaustive), (signal.SIGTERM, 143)]
)
def test_a_signal_stops_all_drivers_and_a_resume_with_another_number_finishes(
    tmp_path: Path, tiny_tokenizer_dir: Path, number: signal.Signals, status: int
) -> None:
    spec = spec_of(tmp_path, tiny_tokenizer_dir)
    run = command(spec, "many", "--set", "rollout.drivers=3", "--limit", "60")
    while len(list((tmp_path / "many").glob("*/drivers/*/run.db"))) < 3 and run.poll() is None:
        time.sleep(0.2)
    (folder,) = (tmp_path / "many").iterdir()
    while not finished(folder) and run.poll() is None:
        time.sleep(0.2)
    run.send_signal(number)
    assert run.wait() == status
    before = finished(folder)
    assert 0 < len(before) < 240
    again = subprocess.run(
        [sys.executable, "-m", "engine.cli.main", "run", "-q", "--resume", str(folder), "--set", "rollout.drivers=1"],
        cwd=tmp_path,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        check=False,
    )
    assert again.returncode == 0
    assert len(finished(folder)) == 240
