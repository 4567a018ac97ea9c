"""Worker processes that answer requests on their standard input, one at a time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

_ENGINE = str(Path(__file__).parents[2])


def start_worker(module: str) -> subprocess.Popen[bytes]:
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
