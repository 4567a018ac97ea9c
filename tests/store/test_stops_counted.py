"""Which ends of the engine's process count as a crash of the episodes that were in flight."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from engine.store import RunStore, find_run

BEGIN = """
import asyncio, os, resource, signal, sys
sys.path[:0] = [sys.argv[2]]
from pathlib import Path
from store_kit import make_header, make_task
from engine.cli.stopping import leave_now
from engine.store import RunStore

def fill_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))

async def main():
    run = Path(sys.argv[1])
    store = RunStore.open(run) if run.exists() else RunStore.create(run.parent, make_header(run.name))
    await store.begin(make_task(0), 0)
    {end}

asyncio.run(main())
"""
ENDS = {
    "closed": ("store.close()", 0),
    "closed on a full disk": ("fill_disk(); store.close()", 0),
    "an exit at once": ("leave_now(130)", 0),
    "an exit at once on a full disk": ("fill_disk(); leave_now(130)", 0),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", 1),
    "killed on a full disk": ("fill_disk(); os.kill(os.getpid(), signal.SIGKILL)", 1),
    "ended by its own code": ("os._exit(7)", 1),
}


def end(run: Path, how: str) -> None:
    """Open `run`, begin its episode, and end the process."""
    command = [sys.executable, "-c", BEGIN.replace("{end}", how), str(run), str(Path(__file__).parent)]
    subprocess.run(command, timeout=60, check=False)


QUICK = ("closed on a full disk", "an exit at once", "killed")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ENDS])
def test_only_an_end_that_nobody_asked_for_is_a_crash(name: str, tmp_path: Path) -> None:
    how, crashes = ENDS[name]
    end(tmp_path / "run", how)
    with RunStore.open(find_run("run", tmp_path)) as store:
        assert store.crashes().get("t0/0", 0) == crashes


@pytest.mark.slow
def test_a_stop_takes_no_crash_back_and_hides_none_that_follows(tmp_path: Path) -> None:
    for how in ("killed", "an exit at once", "closed on a full disk", "killed", "closed"):
        end(tmp_path / "run", ENDS[how][0])
    with RunStore.open(tmp_path / "run") as store:
        assert store.crashes() == {"t0/0": 2}


def test_a_crash_is_counted_although_the_disk_is_full_at_the_next_opening(tmp_path: Path) -> None:
    end(tmp_path / "run", ENDS["killed"][0])
    opening = BEGIN.replace("await store.begin(make_task(0), 0)", "").replace(
        "    run = Path", "    fill_disk(); run = Path"
    )
    command = [sys.executable, "-c", opening.replace("{end}", "store.close()"), str(tmp_path / "run")]
    failed = subprocess.run([*command, str(Path(__file__).parent)], capture_output=True, text=True, check=False)
    assert "StoreError" in failed.stderr, failed.stderr
    with RunStore.open(tmp_path / "run") as store:
        assert store.crashes() == {"t0/0": 1}


async def test_episodes_that_a_stop_left_go_on(tmp_path: Path, maker: object) -> None:
    await asyncio.to_thread(end, tmp_path / "run", ENDS["an exit at once"][0])
    with RunStore.open(tmp_path / "run") as store:
        assert await store.begin(maker.task(0), 0) == []  # type: ignore[attr-defined]
