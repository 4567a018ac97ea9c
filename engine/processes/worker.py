"""A worker process reads jobs as lines of JSON from its input, writes a result for each, and ends when its input ends.

The first line names the function and what all jobs share: `{"call": "package.module:function", "common": …}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from engine.errors import EngineError

PROCESSES = "EPISODE_ENGINE_PROCESSES"
"""Environment variable with the number of processes that prepare data."""
_ENGINE = str(Path(__file__).parents[2])


class VariableError(EngineError):
    """An environment variable has a value that cannot be used."""

    kind = "bad_variable"
    blame = "spec"


def default_processes() -> int:
    """`EPISODE_ENGINE_PROCESSES`, or the number of cores that this process may use.

    Raises:
        VariableError: the variable is not a positive number.
    """
    given = os.environ.get(PROCESSES)
    if not given:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not given.isdecimal() or int(given) < 1:
        raise VariableError(
            f"the environment variable {PROCESSES} is {given!r}: give a number of processes, at least 1"
        )
    return int(given)


def start_worker(module: str = "engine.processes.worker") -> subprocess.Popen[bytes]:
    """Start `python -m module` with this process's import path, and pipes to its standard input and output. The current folder comes
    to the import path only where this process has it there.

    Raises:
        OSError: no process can be started.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*filter(None, sys.path), _ENGINE])},
    )


@contextlib.contextmanager
def killed_after(worker: subprocess.Popen[bytes], seconds: float) -> Iterator[None]:
    """Kill the worker if the block takes longer: then its pipes end, and so does a read or write in the block."""
    timer = threading.Timer(seconds, worker.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end_worker(worker: subprocess.Popen[bytes]) -> None:
    """Kill a worker, and wait for it."""
    worker.kill()
    worker.wait()
    for stream in (worker.stdin, worker.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def main() -> None:
    """Do jobs until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides when it ends
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what imported code prints is not an answer
    first = json.loads(sys.stdin.buffer.readline())
    module, _, name = first["call"].partition(":")
    call: Any = None
    for line in sys.stdin.buffer:
        try:
            if call is None:
                call = getattr(import_module(module), name)
            answer = {"result": call(first["common"], json.loads(line))}
            text = json.dumps(answer)
        except Exception as error:  # noqa: BLE001 - the job is done again in the process that asked, which raises it
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        answers.write(text.encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
