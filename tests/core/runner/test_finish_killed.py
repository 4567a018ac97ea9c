"""`kill -9` before any line by which an episode's result is written: a resume comes to what an undisturbed run comes to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from endings import filled
from finish_lines import FILES, WAYS
from installed_plugins import needs_plugin
from stopping import Resumed, check, clear, undisturbed

from engine.store.journal import Journal


class Killed:
    """A process that runs a spec and kills itself: see finish_lines.py."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    def run(self, out: Path, way: str, place: str = "-") -> tuple[int, list[str]]:
        """Run into `out`; the status and the places that were reached."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(f"{out}\t{way}\t{place}\n")
        self._server.stdin.flush()
        places: list[str] = []
        while not (line := self._server.stdout.readline().rstrip("\n")).startswith("status"):
            assert line, "the server has ended"
            places.append(line)
        return int(line.split()[1]), places


@contextmanager
def serving(path: Path) -> Iterator[Killed]:
    """Start one."""
    script = Path(__file__).with_name("finish_lines.py")
    command = [sys.executable, str(script), str(path)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Killed(server)
    finally:
        server.communicate(timeout=30)


def lines_of(code: CodeType) -> set[int]:
    """The numbers of a function's lines that run, and those of the functions in it; its first line is its definition."""
    numbers = {line for _, _, line in code.co_lines() if line is not None and line != code.co_firstlineno}
    return numbers.union(*(lines_of(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


IN_CI = ("written", "no result")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "way"),
    [
        *(
            pytest.param("score at the end", way, marks=[] if way in IN_CI else [pytest.mark.exhaustive])
            for way in WAYS
        ),
        pytest.param("an external tool", "written", marks=pytest.mark.exhaustive),
        pytest.param("a judge", "written", marks=[pytest.mark.exhaustive, needs_plugin("roles")]),
    ],
)
async def test_an_episode_killed_before_any_line_that_finishes_it_comes_to_the_same(
    make_spec: Any, tmp_path: Path, case: str, way: str
) -> None:
    wanted, calls = await undisturbed(make_spec, case, tmp_path)
    log = tmp_path / "log"
    replies, changes = filled(case, str(log))
    path = make_spec(replies, **changes)
    resumed = Resumed(path)
    with serving(path) as killed:
        status, places = killed.run(tmp_path / "run", way)
        assert status == 0
        assert len(places) > 20
        clear(log)
        for number, place in enumerate(places):
            out = tmp_path / str(number)
            status, _ = killed.run(out, way, place)
            assert status == 9, place
            await check(resumed, out, wanted, calls, log, f"{case}, {way}, killed before {place}")


@pytest.mark.slow
async def test_every_line_of_finish_is_killed_in_one_of_the_ways(make_spec: Any, tmp_path: Path) -> None:
    path = make_spec(["It is 42."], **filled("score at the end", "")[1])
    reached: set[str] = set()
    with serving(path) as killed:
        for way in WAYS:
            status, places = killed.run(tmp_path / way, way)
            assert status == 0, way
            reached.update(places)
    file = FILES[Journal.finish.__code__.co_filename]
    assert {f"{file}:{line}" for line in lines_of(Journal.finish.__code__)} <= reached
