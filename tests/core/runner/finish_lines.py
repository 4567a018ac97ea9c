"""Kills a run before any line by which an episode's result is written.

`python finish_lines.py SPEC` serves the test: for each line `FOLDER WAY PLACE` on stdin it forks a child that runs the spec into FOLDER,
where the end of an episode goes WAY, and that kills itself before it runs PLACE for the first time. Places are `FILE:LINE` of the files
that finish an episode, from the first call of `Journal.finish` on. The child says which places it reached, and then the server its status.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from stopping import Resumed

from engine.errors import StoreError
from engine.runner.guarded import EpisodeGuard
from engine.store import episode_rows, journal

FILES = {path: Path(path).name for path in (journal.__file__, episode_rows.__file__)}


class Lines:
    """The places that run, in any thread, each with what is called before it runs for the first time."""

    def __init__(self, reached: Callable[[str], None]) -> None:
        self._reached = reached
        self._finishing = False
        self._seen: set[str] = set()

    def start(self) -> None:
        """Trace this thread and those that begin from now on."""
        threading.settrace(self._call)
        sys.settrace(self._call)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        self._finishing = self._finishing or frame.f_code is journal.Journal.finish.__code__
        return self._line if self._finishing else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        place = f"{FILES[frame.f_code.co_filename]}:{frame.f_lineno}"
        if event == "line" and place not in self._seen:
            self._seen.add(place)
            self._reached(place)
        return self._line


def _no_result(*_: object) -> Any:
    raise ValueError("no result can be made")


def _disk_is_full(*_: object, **__: object) -> Any:
    raise sqlite3.OperationalError("database or disk is full")


def go(way: str, stop: asyncio.Event) -> None:
    """Let episodes end in some way."""
    judged = EpisodeGuard.judged

    async def stopped(*arguments: Any) -> Any:
        stop.set()
        for _ in range(50):  # rounds of the loop, in which its task is cancelled
            await asyncio.sleep(0)
        return await judged(*arguments)

    async def replaced(*arguments: Any) -> Any:
        return replace(await judged(*arguments))

    async def hanging(*_: object) -> Any:
        stop.set()
        await asyncio.Event().wait()

    if way == "stopped":
        EpisodeGuard.judged = stopped  # type: ignore[method-assign]
    elif way == "its judge replaces it":
        EpisodeGuard.judged = replaced  # type: ignore[method-assign]
    elif way == "its judge hangs":
        journal.PATIENCE = 0.01
        EpisodeGuard.judged = hanging  # type: ignore[method-assign]
    elif way == "no result":
        journal.encode_trajectory = _no_result
    elif way == "the disk is full":
        episode_rows.finish = _disk_is_full


WAYS = ("written", "stopped", "its judge replaces it", "its judge hangs", "no result", "the disk is full")


async def run(resumed: Resumed, out: Path, way: str) -> None:
    """Run into a folder."""
    stop = asyncio.Event()
    go(way, stop)
    try:
        await resumed.run(out, stop)
    except StoreError as error:
        if way != "the disk is full":
            raise
        assert "disk is full" in str(error)  # noqa: PT017


def serve(path: Path) -> None:
    """See above."""
    resumed = Resumed(path)
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is logged
    for line in sys.stdin:
        folder, way, place = line.rstrip("\n").split("\t")

        def reached(at: str, place: str = place) -> None:
            os.write(answers, f"{at}\n".encode())
            if at == place:
                os.kill(os.getpid(), signal.SIGKILL)

        child = os.fork()
        if child == 0:
            Lines(reached).start()
            asyncio.run(run(resumed, Path(folder), way))
            os._exit(0)
        os.write(answers, f"status {os.waitpid(child, 0)[1]}\n".encode())


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
