"""A worker answers jobs one after the other, or says why it does not."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from engine.errors import SpecCodeError
from engine.processes.worker import Worker, WorkerError, WorkerPool, default_processes


def test_it_answers_as_often_as_it_is_asked() -> None:
    worker = Worker("operator:add", "a")
    assert [worker.ask(job, seconds=60) for job in (b'"b"', b'""')] == ["ab", "a"]
    with pytest.raises(WorkerError, match="TypeError: can only concatenate str"):
        worker.ask(b"1", seconds=60)
    assert worker.ask(b'"c"', seconds=60) == "ac"
    worker.end()


def test_bytes_come_and_go_beside_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "turned.py").write_text(
        "from engine.processes.worker import WithBytes\n"
        "def turn(common, job, data):\n"
        "    print('not an answer')\n"
        "    return WithBytes(len(data) + job, data[::-1])\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    worker = Worker("turned:turn")
    data = os.urandom(300_000)
    assert worker.ask(b"1", data, seconds=60) == (300_001, data[::-1])
    worker.end()


def test_one_that_ends_or_takes_too_long_has_no_answer() -> None:
    killed = Worker("os:kill", 0)
    os.kill(killed.process.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"^it was killed by signal 9$"):
        killed.ask(b"0", seconds=60)
    late = Worker("operator:add", 1)
    with pytest.raises(WorkerError, match=r"^it did not answer within 0 s$"):
        late.ask(b"0", seconds=0.0)
    assert late.ended == "it was killed by signal 9"


def test_a_pool_replaces_a_worker_that_ended_and_ends_all() -> None:
    with WorkerPool(1, "operator:add", 1) as pool:
        assert pool.submit(pool.ask, b"2", seconds=60).result() == 3
        os.kill(pool.workers[0].process.pid, signal.SIGKILL)
        with pytest.raises(WorkerError):
            pool.submit(pool.ask, b"2", seconds=60).result()
        assert pool.submit(pool.ask, b"3", seconds=60).result() == 4
    assert [worker.process.poll() for worker in pool.workers] == [-signal.SIGKILL] * 2


def test_the_variable_sets_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPISODE_ENGINE_PROCESSES", "3")
    assert default_processes() == 3
    monkeypatch.setenv("EPISODE_ENGINE_PROCESSES", "all")
    with pytest.raises(
        SpecCodeError, match="EPISODE_ENGINE_PROCESSES is 'all': give a number of processes, at least 1"
    ):
        default_processes()


def test_a_worker_imports_nothing_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    worker = Worker("operator:add", 1)
    assert worker.ask(b"2", seconds=60) == 3
    worker.end()
    assert not (tmp_path / "imported").exists()
