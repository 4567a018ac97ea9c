"""`kill -9` at any moment loses nothing that was acknowledged, and corrupts nothing."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import StoreError
from engine.store import RunStore, list_runs

SCRIPT = Path(__file__).with_name("kill_me.py")
ENTRIES = 5


class Victim:
    """A process that writes runs and is killed."""

    def __init__(self) -> None:
        self.server = subprocess.Popen([sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = 0

    def line(self) -> list[str]:
        """What it says next."""
        assert self.server.stdout is not None
        return self.server.stdout.readline().decode().split()

    def write(self, folder: Path, alive: int) -> None:
        """Begin or resume the run in `folder`; returns once it is open."""
        assert self.server.stdin is not None
        self.server.stdin.write(f"{folder} {alive}\n".encode())
        self.server.stdin.flush()
        word, pid = self.line()
        assert word == "begun"
        self.pid = int(pid)

    def kill(self) -> list[list[str]]:
        """`kill -9`; what it had said until then."""
        os.kill(self.pid, signal.SIGKILL)
        said = []
        while (line := self.line())[0] != "dead":
            said.append(line)
        assert line == ["dead", str(signal.SIGKILL.value)]
        self.pid = 0
        return said

    def end(self) -> None:
        """End it with whatever it is doing."""
        if self.pid:
            self.kill()
        self.server.communicate(timeout=30)


@pytest.fixture
def victim() -> Iterator[Victim]:
    """A fresh one."""
    made = Victim()
    yield made
    made.end()


def check(run: Path, said: list[list[str]], maker: Any, seen: dict[int, int], done: set[int]) -> int:
    """Hold the store to everything that it ever acknowledged; the number of journal entries that it has."""
    for word, *numbers in said:
        if word == "entry":
            seen[int(numbers[0])] = max(seen.get(int(numbers[0]), 0), int(numbers[1]) + 1)
        else:
            done.add(int(numbers[0]))
    total = 0
    with RunStore.open(run, readonly=True) as store:
        rows = {row.id: row for row in store.episodes()}
        kept: dict[int, int] = {}
        for index in {int(row.task_id[1:]) for row in rows.values()} | set(seen):
            journal = store.journal(f"t{index}/0")
            kept[index] = len(journal)
            total += len(journal)
            assert len(journal) >= seen.get(index, 0)
            assert maker.same(journal, [maker.entry(seq, index) for seq in range(len(journal))])
        for index in done:
            assert rows[f"t{index}/0"].status == "done"
        for row in rows.values():
            if row.status == "done":
                index = int(row.task_id[1:])
                assert kept[index] == ENTRIES
                assert maker.same(store.trajectory(row.id), maker.trajectory(index))
    with sqlite3.connect(run / "run.db") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        whole = "SELECT count(*) FROM trajectories t JOIN episodes e ON e.number = t.episode WHERE e.status != 'done'"
        assert connection.execute(whole).fetchone() == (0,)
    return total


def wait_for_entries(out: Path, count: int, seconds: float = 30.0) -> None:
    """Until the run in `out` holds so many journal entries."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for run in list_runs(out):
            with RunStore.open(run, readonly=True) as store:
                if sum(len(store.journal(row.id)) for row in store.episodes()) >= count:
                    return
        time.sleep(0.01)
    raise AssertionError(f"no {count} entries within {seconds:g} s")


def kill_many(victim: Victim, folder: Path, maker: Any, *, times: int, seed: int, runs: int) -> None:
    rng = random.Random(seed)
    for number in range(runs):
        out = folder / str(number)
        seen: dict[int, int] = {}
        done: set[int] = set()
        total = 0
        for kill in range(times // runs):
            victim.write(out, rng.choice([1, 8, 40]))
            # What it says is not read meanwhile: the pipe holds some 5,000 lines, and then it waits to be killed.
            time.sleep(rng.uniform(0.0, 0.04))
            if kill == 0:
                wait_for_entries(
                    out, 50
                )  # more than are under way at once: on a slow machine too, some are acknowledged
            total = check(list_runs(out)[0], victim.kill(), maker, seen, done)
        assert total >= sum(seen.values()) > 0


@pytest.mark.slow
def test_kill_at_random_moments_loses_nothing_acknowledged(victim: Victim, tmp_path: Path, maker: Any) -> None:
    kill_many(victim, tmp_path, maker, times=24, seed=1, runs=8)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # 100 starts and kills of a process
@pytest.mark.exhaustive
def test_kill_many_more_times(victim: Victim, tmp_path: Path, maker: Any) -> None:
    kill_many(victim, tmp_path, maker, times=100, seed=time.time_ns(), runs=20)


def test_a_killed_writer_leaves_no_lock_and_is_seen_as_stopped(victim: Victim, tmp_path: Path) -> None:
    victim.write(tmp_path, 1)
    run = list_runs(tmp_path)[0]
    with pytest.raises(StoreError, match=f"is being written by process {victim.pid};"):
        RunStore.open(run)
    with RunStore.open(run, readonly=True) as reader:
        assert reader.status == "running"
    victim.kill()
    with RunStore.open(run, readonly=True) as reader:
        assert reader.status == "stopped"
    RunStore.open(run).close()


@pytest.mark.slow
def test_a_reader_in_another_process_sees_whole_episodes_while_the_run_is_written(
    victim: Victim, tmp_path: Path, maker: Any
) -> None:
    victim.write(tmp_path, 20)
    run = list_runs(tmp_path)[0]
    counts = [0]
    with RunStore.open(run, readonly=True) as reader:
        for _ in range(40):
            for _ in range(20):
                victim.line()
            read = list(reader.trajectories())
            for trajectory in read[counts[-1] :]:
                assert maker.same(trajectory, maker.trajectory(int(trajectory.task_id[1:])))
            counts.append(len(read))
            if len(read) > 100:
                break
        assert reader.status == "running"
    assert counts == sorted(counts)
    assert counts[-1] > 100
