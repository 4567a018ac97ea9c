"""Results of many rows are the same however many processes make them, and whatever the cache on disk holds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jobs_for_tests
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs_for_tests import run
from slow_cases import slow_after, slow_but
from waiting import process_runs

from engine.plugins.preparing.jobs import PreparedCache, digest_of_parts

PROGRAM = jobs_for_tests.__file__


def numbers(count: int) -> list[dict[str, Any]]:
    return [{"number": number} for number in range(count)]


def squares(count: int) -> list[dict[str, int]]:
    return [{"square": number**2} for number in range(count)]


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*"))


@pytest.mark.parametrize("processes", slow_but([1, 2, 3], 1, 2))
def test_results_come_in_order_from_any_number_of_processes_and_from_the_cache(tmp_path: Path, processes: int) -> None:
    log = tmp_path / "log"
    for _ in range(2):
        assert run(tmp_path / "kept", numbers(20), processes, log=str(log)) == squares(20)
    made = [line.split() for line in log.read_text().splitlines()]
    assert sorted(int(number) for _, number in made) == list(range(20))  # each once: the second run reads the cache
    assert ({int(pid) for pid, _ in made} == {os.getpid()}) == (processes == 1)


@pytest.mark.parametrize("fault", slow_after(1, ["dies", "raises"]))
def test_a_job_that_fails_in_a_worker_is_done_here(tmp_path: Path, fault: str) -> None:
    values = [value | {"in_worker": fault} if value["number"] % 3 == 1 else value for value in numbers(9)]
    assert run(tmp_path, values, 2) == squares(9)
    assert len(entries(tmp_path)) == 9


def test_an_error_is_that_of_one_process(tmp_path: Path) -> None:
    for processes in (1, 2):
        with pytest.raises(ValueError, match=r"^-5 has no place here$"):
            run(tmp_path, [*numbers(3), {"number": -5}, *numbers(2)], processes)


@given(place=st.integers(0, 200), kind=st.sampled_from(["cut", "flipped", "longer", "another"]))
def test_a_damaged_entry_is_made_again(tmp_path_factory: pytest.TempPathFactory, place: int, kind: str) -> None:
    folder = tmp_path_factory.mktemp("kept")
    run(folder, numbers(2), 1)
    first, second = entries(folder)
    whole = first.read_bytes()
    at = place % len(whole)
    damaged = {
        "cut": whole[:at],
        "flipped": whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :],
        "longer": whole + b" ",
        "another": second.read_bytes(),
    }
    first.write_bytes(damaged[kind])
    assert run(folder, numbers(2), 1) == squares(2)
    assert first.read_bytes() == whole


@pytest.mark.slow  # by default: what was made before is not made again, in test_prepared_rows.py
def test_a_run_that_was_killed_goes_on_from_what_it_had_made(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, PROGRAM, str(tmp_path / "kept"), str(log), "12", "2", "0.2"]
    first = subprocess.Popen(command)
    deadline = time.monotonic() + 60
    while len(entries(tmp_path / "kept")) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    workers = {int(line.split()[0]) for line in log.read_text().splitlines()} - {first.pid}
    assert workers
    for pid in workers:  # they end with the process that started them
        while process_runs(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not process_runs(pid)
    begun = len(log.read_text().splitlines())
    kept = len([entry for entry in entries(tmp_path / "kept") if not entry.name.startswith(".")])
    done = subprocess.run([*command[:-1], "0"], capture_output=True, text=True, check=True)
    assert done.stderr.split()[-1] == str(sum(number**2 for number in range(12)))
    assert len(log.read_text().splitlines()) - begun == 12 - kept


@pytest.mark.slow
def test_two_processes_at_once_get_the_same(tmp_path: Path) -> None:
    command = [sys.executable, PROGRAM, str(tmp_path / "kept"), str(tmp_path / "log"), "30", "1", "0.01"]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [each.communicate()[1].split()[-1] for each in both]
    assert told == [str(sum(number**2 for number in range(30)))] * 2
    assert [entry.suffix for entry in entries(tmp_path / "kept")] == [".json"] * 30  # and no drafts


def test_a_folder_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file is in its place")
    assert run(tmp_path / "kept", numbers(4), 1) == squares(4)


def test_the_oldest_entries_are_deleted_above_the_limit(tmp_path: Path) -> None:
    cache = PreparedCache(tmp_path, most_bytes=500)
    keys = [digest_of_parts(str(number)) for number in range(8)]
    for age, key in enumerate(keys):
        cache.put(key, "x" * 66)  # 100 bytes with the digest and the quotes
        os.utime(tmp_path / key[:2] / f"{key}.json", (age, age))
    cache.prune()
    assert [cache.get(key) is not None for key in keys] == [False] * 3 + [True] * 5


def test_entries_are_private(tmp_path: Path) -> None:
    run(tmp_path / "kept", numbers(1), 1)
    assert [entry.stat().st_mode & 0o777 for entry in entries(tmp_path / "kept")] == [0o600]


def test_borders_of_parts_count() -> None:
    assert digest_of_parts("ab", "c") != digest_of_parts("a", "bc")
