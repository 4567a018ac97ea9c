"""Which ends of the engine's process count as a crash of the episodes that were in flight."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from journals import write_entries

from engine.store import RunStore, find_run

SERVER = """
import asyncio, json, os, resource, signal, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from engine.cli.exits import leave_now
from engine.store import RunStore
from store_kit import make_header, make_task

def fill_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))

def open_run(run):
    return RunStore.open(run) if run.exists() else RunStore.create(run.parent, make_header(run.name))

async def begin(run, end):
    store = open_run(run)
    await store.begin(make_task(0), 0)
    end(store)

def play(run, how):
    asyncio.run(begin(run, lambda store: exec(how, globals() | {"store": store})))

for line in sys.stdin:
    run, code = json.loads(line)
    child = os.fork()
    if not child:
        os.dup2(2, 1)  # the parent answers on stdout
        exec(code, globals() | {"run": Path(run)})
        sys.exit()
    print(os.waitpid(child, 0)[1], flush=True)
"""
"""Forks a process for each line `[RUN, CODE]` on stdin: a fork costs a hundredth of a start."""
ENDS = {
    "closed": ("store.close()", 0),
    "closed on a full disk": ("fill_disk(); store.close()", 0),
    "an exit at once": ("leave_now(130)", 0),
    "an exit at once on a full disk": ("fill_disk(); leave_now(130)", 0),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", 1),
    "killed on a full disk": ("fill_disk(); os.kill(os.getpid(), signal.SIGKILL)", 1),
    "ended by its own code": ("os._exit(7)", 1),
}
REFUSED = "try: fill_disk(); open_run(run)\nexcept Exception as error: os._exit(5 if type(error).__name__ == 'StoreError' else 6)"


class Processes:
    """Processes that run code and end."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", SERVER, str(Path(__file__).parent)]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, run: Path, code: str) -> int:
        """Run the code in a process of its own; how that ended, as `os.waitpid` says it."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps([str(run), code]) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def end(self, run: Path, how: str) -> None:
        """Open `run`, begin its episode, and end the process."""
        self.run(run, f"play(run, {how!r})")

    def close(self) -> None:
        """No more."""
        self._server.communicate()


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    made = Processes()
    yield made
    made.close()


QUICK = ("closed on a full disk", "an exit at once", "killed")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ENDS])
def test_only_an_end_that_nobody_asked_for_is_a_crash(processes: Processes, name: str, tmp_path: Path) -> None:
    how, crashes = ENDS[name]
    processes.end(tmp_path / "run", how)
    with RunStore.open(find_run("run", tmp_path)) as store:
        assert store.crashes().get("t0/0", 0) == crashes


@pytest.mark.slow
def test_a_stop_takes_no_crash_back_and_hides_none_that_follows(processes: Processes, tmp_path: Path) -> None:
    for how in ("killed", "an exit at once", "closed on a full disk", "killed", "closed"):
        processes.end(tmp_path / "run", ENDS[how][0])
    with RunStore.open(tmp_path / "run") as store:
        assert store.crashes() == {"t0/0": 2}


def test_a_crash_is_counted_although_the_disk_is_full_at_the_next_opening(processes: Processes, tmp_path: Path) -> None:
    processes.end(tmp_path / "run", ENDS["killed"][0])
    assert os.waitstatus_to_exitcode(processes.run(tmp_path / "run", REFUSED)) == 5
    with RunStore.open(tmp_path / "run") as store:
        assert store.crashes() == {"t0/0": 1}


async def test_episodes_that_a_stop_left_go_on(processes: Processes, tmp_path: Path, maker: object) -> None:
    await asyncio.to_thread(processes.end, tmp_path / "run", ENDS["an exit at once"][0])
    with RunStore.open(tmp_path / "run") as store:
        assert (await store.begin(maker.task(0), 0)).entries == []  # type: ignore[attr-defined]


async def test_an_episode_that_gets_further_each_time_is_no_suspect(tmp_path: Path, maker: Any) -> None:
    """Each launch is killed. `advances` writes two entries in each, `stands` none; `again` begins anew, up to the same place."""
    names = {"advances": maker.task(0), "stands": maker.task(1), "again": maker.task(2)}
    store = RunStore.create(tmp_path, maker.header("run"))
    counts = []
    for _ in range(6):
        for name, task in names.items():
            journal = await store.begin(task, 0)
            if name == "again" and journal.entries:
                await journal.restart()
            begin = len(journal.entries)
            if name != "stands":
                for seq in range(begin, begin + 2):
                    await write_entries(journal, replace(maker.entry(seq), at=time.time()))
        assert store._writer is not None
        assert store._lock is not None
        store._writer.close()
        store._lock.release()  # as the kernel does for a process that is killed
        store = RunStore.open(tmp_path / "run")
        found = store.crashes()
        counts.append([found[f"{task.id}/0"] for task in names.values()])
    store.close()
    assert counts == [[1, number, number] for number in range(1, 7)]
