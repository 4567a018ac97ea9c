"""Stops a run at a chosen commit of its store, and resumes it.

`python stopping.py SPEC` serves the test of kills: for each line `FOLDER COMMIT` on stdin it forks a child that runs the
spec into FOLDER and kills itself right after that commit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from endings import filled

from engine.backends.registry import open_backend
from engine.errors import StoreError
from engine.runner.replay import Replayer
from engine.runner.runner import Runner
from engine.runner.summary import RunResult
from engine.schemas.trajectory import Trajectory
from engine.spec.load import LoadedSpec, load_spec
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore, list_runs
from engine.store.writer import Writer
from engine.tokens.loading import load_format
from engine.tokens.template import ChatTemplate


@contextmanager
def after_commit(number: int, strike: Callable[[], None]) -> Iterator[list[int]]:
    """Call `strike` right after commit `number` (from 1) of a writer, in its thread. Gives the count of commits."""
    commit = Writer._commit
    count = [0]

    def counted(writer: Writer, writes: Any) -> None:
        commit(writer, writes)
        count[0] += 1
        if count[0] == number:
            strike()

    Writer._commit = counted  # type: ignore[method-assign]
    try:
        yield count
    finally:
        Writer._commit = commit  # type: ignore[method-assign]


@contextmanager
def dead_after(number: int) -> Iterator[list[int]]:
    """Every commit after `number` fails, as where the disk is gone. Gives the count of commits."""
    commit = Writer._commit
    count = [0]

    def counted(writer: Writer, writes: Any) -> None:
        if count[0] >= number:
            raise StoreError("the disk is gone")
        commit(writer, writes)
        count[0] += 1

    Writer._commit = counted  # type: ignore[method-assign]
    try:
        yield count
    finally:
        Writer._commit = commit  # type: ignore[method-assign]


class Resumed:
    """One spec, run into folders and resumed there."""

    def __init__(self, path: Path) -> None:
        self.loaded: LoadedSpec = load_spec(path)
        self.template: ChatTemplate = load_format(self.loaded.spec.model, self.loaded.base)

    async def run(self, out: Path, stop: asyncio.Event | None = None) -> RunResult:
        """Begin a run in `out`, or go on with the one that is there."""
        runs = list_runs(out)
        store = RunStore.open(runs[0]) if runs else RunStore.create(out, RunHeader.of(self.loaded))
        backend = open_backend(self.loaded, self.template)
        try:
            await backend.start()
            return await Runner(self.loaded, load_tasks(self.loaded), self.template, backend, store).run(stop=stop)
        finally:
            await backend.close()
            store.close()

    async def stopped(self, out: Path, commit: int) -> bool:
        """Run until `stop` is set right after a commit; whether that commit came."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        with after_commit(commit, lambda: loop.call_soon_threadsafe(stop.set)) as count:
            await self.run(out, stop)
        return count[0] >= commit

    async def starved(self, out: Path, commit: int) -> bool:
        """Run until nothing can be written after a commit; whether a further commit was tried."""
        with dead_after(commit):
            try:
                await self.run(out)
            except StoreError:
                return True
        return False

    def store(self, out: Path) -> RunStore:
        """The run in `out`, for reading."""
        return RunStore.open(list_runs(out)[0], readonly=True)

    async def differences(self, out: Path) -> list[str]:
        """What replays of the run in `out` say is different."""
        with self.store(out) as store:
            replayer = Replayer(self.loaded, self.template, store)
            try:
                found = [await replayer.check(each, store.task(each.task_id)) for each in store.trajectories()]
            finally:
                replayer.close()
        return [each.difference for each in found if each.difference is not None]


def content(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory without what differs between two runs of the same: times, the run's id, tracebacks."""
    told = trajectory.plain()
    del told["run_id"], told["seconds"]
    for turn in told["turns"]:
        del turn["seconds"], turn["queue_seconds"]
    if told["outcome"]["failure"] is not None:
        del told["outcome"]["failure"]["trace"]
    return told


SIDE = ("an external tool", "the environment is external", "an external user")
"""Cases whose every call is logged and of an external environment."""


def lines(log: Path) -> list[str]:
    """What a case's log holds."""
    return log.read_text().splitlines() if log.exists() else []


def clear(log: Path) -> None:
    """Begin a log anew."""
    log.unlink(missing_ok=True)


async def undisturbed(made: Any, case: str, tmp_path: Path) -> tuple[dict[str, Any], list[str]]:
    """What a case comes to, and what it logs."""
    log = tmp_path / "log"
    replies, changes = filled(case, str(log))
    resumed = Resumed(made(replies, **changes))
    await resumed.run(tmp_path / "whole")
    with resumed.store(tmp_path / "whole") as store:
        (trajectory,) = store.trajectories()
    calls = lines(log)
    clear(log)
    return content(trajectory), calls


async def check(resumed: Resumed, out: Path, wanted: dict[str, Any], calls: list[str], log: Path, where: str) -> None:
    """Resume a stopped run, and hold it to the undisturbed one."""
    with resumed.store(out) as store:
        held = sum(len(store.journal(row.id)) for row in store.episodes())
    result = await resumed.run(out)
    assert result.faults == [], where
    with resumed.store(out) as store:
        (trajectory,) = store.trajectories()
        attempt = store.episode(trajectory.episode_id).attempt
        journal = store.journal(trajectory.episode_id)
        assert [entry.seq for entry in journal if not entry.dest] in ([], [len(journal) - 1]), where
    assert content(trajectory) == wanted, where
    assert await resumed.differences(out) == [], where
    if any(case in where for case in SIDE):
        made = lines(log)
        if attempt or not held:  # it began anew: what had been called before, and then everything once
            assert made[-len(calls) :] == calls, where
            assert made[: -len(calls)] == calls[: len(made) - len(calls)], where
        else:
            assert made == calls, where
    clear(log)


def serve(path: Path) -> None:
    """See above."""
    resumed = Resumed(path)
    for line in sys.stdin:
        folder, commit = line.split()
        child = os.fork()
        if child == 0:
            with after_commit(int(commit), lambda: os.kill(os.getpid(), signal.SIGKILL)):
                asyncio.run(resumed.run(Path(folder)))
            os._exit(0)
        os.write(1, f"{os.waitpid(child, 0)[1]}\n".encode())


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
