"""A pool of processes that read and compare mathematical answers, with a limit of CPU time per request.

Invariant: the limit counts CPU time, so a correct answer is not marked wrong because the machine is busy. If a request takes
too long or ends its process, the result is `None`.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

SECONDS = 2.0
"""Default limit of CPU time per request. Ordinary answers take some hundredths of a second."""
_SILENCE = 600.0
"""Wall seconds after which a process that uses no CPU time and sends nothing is killed."""


class MathPool:
    """Processes that answer questions of `engine.environments.math_worker`; they start when needed.

    Args:
        most: Maximum number of processes. None: one per CPU core, at least 2.
    """

    def __init__(self, most: int | None = None) -> None:
        self._slots = threading.BoundedSemaphore(most or max(2, os.cpu_count() or 2))
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        atexit.register(self.close)

    def ask(self, task: str, seconds: float = SECONDS, **arguments: Any) -> dict[str, Any] | None:
        """Send one request; see `engine.environments.math_worker` for tasks and answers.

        Args:
            task: `compare`, `read` or `same`.
            seconds: CPU time that it may take. Waiting for a free process does not count.
            arguments: The arguments of the task.

        Returns:
            The reply; None if it took too long.

        Raises:
            RuntimeError: a process does not start, or sends nothing and uses no CPU time.
        """
        question = {"task": task, "seconds": seconds, **arguments}
        with self._slots:
            for attempt in range(2):
                worker = self._take()
                told = _ask(worker, question)
                if told is not None:
                    with self._lock:
                        self._idle.append(worker)
                    return None if told.get("late") else told
                if worker.wait() == -signal.SIGXCPU or attempt:
                    break  # it took too long or has ended two processes, so the answer is the cause
        return None

    def _take(self) -> subprocess.Popen[bytes]:
        """A process that has finished its imports, so that they do not count as CPU time of a request."""
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                break
            if worker.poll() is None:
                return worker
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        worker = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.environments.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )
        if _ask(worker, {"task": "compare", "seconds": 120, "gold": "1", "reply": "1"}) is None:
            worker.wait()
            raise RuntimeError("the process that checks answers did not start; reinstall math-verify")
        return worker

    def close(self) -> None:
        """End the idle processes."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.kill()
            worker.wait()


def _ask(worker: subprocess.Popen[bytes], question: dict[str, Any]) -> dict[str, Any] | None:
    """Send one line and read one line; None if the process ended instead."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(json.dumps(question).encode() + b"\n")
        worker.stdin.flush()
    except BrokenPipeError:
        return None
    used = _cpu_ticks(worker.pid)
    while not select.select([worker.stdout], [], [], _SILENCE)[0]:
        now = _cpu_ticks(worker.pid)
        if now == used:
            worker.kill()
            raise RuntimeError(f"the process that checks answers sent nothing for {_SILENCE:g} s and used no CPU time")
        used = now
    line = worker.stdout.readline()
    told = json.loads(line) if line.endswith(b"\n") else None
    return told if isinstance(told, dict) else None


def _cpu_ticks(pid: int) -> int:
    """CPU time of a process, in ticks of the kernel's clock; -1 if it has ended or the system has no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return int(fields[11]) + int(fields[12])


POOL = MathPool()
"""Shared by every episode of this process."""
