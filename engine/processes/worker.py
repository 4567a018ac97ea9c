"""A worker process calls one function for each job, and ends when its input ends: so with the process that started it.

    worker = Worker("package.module:function", common)
    worker.ask(b'{"number": 3}', seconds=60)         # function(common, {"number": 3})

A job and its answer are each a line of JSON, and as many bytes behind it as its key `bytes` says.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import SpecCodeError

PROCESSES = "EPISODE_ENGINE_PROCESSES"
"""Environment variable with the number of processes that prepare data."""
_ENGINE = str(Path(__file__).parents[2])
_MAIN = f"from {__name__} import main; main()"


class WorkerError(Exception):
    """A worker has no answer to a job."""


class WithBytes(NamedTuple):
    """What a job's function returns that has bytes besides a JSON value."""

    value: Any
    data: Any
    """Bytes, or another buffer of them."""


def default_processes() -> int:
    """`EPISODE_ENGINE_PROCESSES`, or the number of cores that this process may use.

    Raises:
        SpecCodeError: the variable is not a positive number (kind `bad_variable`).
    """
    setting = os.environ.get(PROCESSES)
    if not setting:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not setting.isdecimal() or int(setting) < 1:
        words = f"the environment variable {PROCESSES} is {setting!r}: give a number of processes, at least 1"
        raise SpecCodeError(words, blame="spec", kind="bad_variable")
    return int(setting)


def start_python(code: str) -> subprocess.Popen[bytes]:
    """Start an interpreter with this process's import path, and pipes to its input and output. The current folder is on
    its path only where it is on this process's.

    Raises:
        OSError: no process can be started.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*filter(None, sys.path), _ENGINE])},
    )


class Worker:
    """One worker process, which one thread asks at a time.

    Args:
        call: The function, `package.module:function`. It is called with `common`, a job and, if it has any, the job's
            bytes.
        common: What all jobs share; a JSON value.

    Raises:
        WorkerError: no process can be started.
    """

    def __init__(self, call: str, common: Any = None) -> None:
        self._first = json.dumps({"call": call, "common": common}).encode() + b"\n"
        self.ended = ""
        """How it ended, in words; empty while it runs."""
        try:
            self.process = start_python(_MAIN)
        except OSError as error:
            raise WorkerError(f"it cannot be started: {error}") from error

    def ask(self, job: bytes, data: bytes = b"", *, seconds: float) -> Any:
        """Return what the function returns for a job.

        Args:
            job: The job, as JSON on one line.
            data: Its bytes.
            seconds: Time after which the worker is killed.

        Raises:
            WorkerError: the function raised; or there is no answer in time, or the process has ended, and `ended` says
                so.
        """
        began = time.monotonic()
        requests: Any = self.process.stdin
        answers: Any = self.process.stdout
        timer = threading.Timer(seconds, self.process.kill)  # then its pipes end, and so does a read or write
        timer.start()
        try:
            requests.write(self._first + b'{"job":%b,"bytes":%d}\n' % (job, len(data)))
            requests.write(data)
            requests.flush()
            answer = json.loads(answers.readline())
            body = bytearray(answer.get("bytes", 0))
            if answers.readinto(body) < len(body):
                raise EOFError
        except (OSError, ValueError, EOFError) as error:
            late = time.monotonic() - began >= seconds
            self.end()
            raise WorkerError(f"it did not answer within {seconds:.3g} s" if late else self.ended) from error
        finally:
            timer.cancel()
        self._first = b""
        if "error" in answer:
            raise WorkerError(answer["error"])
        return WithBytes(answer["result"], body) if body else answer["result"]

    def end(self) -> None:
        """Kill it, and wait for it."""
        self.process.kill()
        status = self.process.wait()
        self.ended = f"it was killed by signal {-status}" if status < 0 else f"it ended with status {status}"
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError, AttributeError):
                stream.close()  # type: ignore[union-attr]


class WorkerPool(ThreadPoolExecutor):
    """Threads that ask workers, one each, which starts at its first job. The workers end with the pool, and with this
    process.

    Args:
        most: The number of threads.
        call: The function of the workers, as for a `Worker`.
        common: What all jobs share; a JSON value.
    """

    def __init__(self, most: int, call: str, common: Any = None) -> None:
        super().__init__(most, thread_name_prefix=call.rpartition(":")[2])
        self.workers: list[Worker] = []
        self._call, self._common = call, common
        self._of_thread = threading.local()
        self._starting = threading.Lock()
        self._closed = False
        weakref.finalize(self, _end_all, self.workers)

    def ask(self, job: bytes, data: bytes = b"", *, seconds: float) -> Any:
        """`Worker.ask`, in a thread of this pool."""
        worker: Worker | None = getattr(self._of_thread, "worker", None)
        if worker is None or worker.ended:
            with self._starting:
                if self._closed:
                    raise WorkerError("the workers have ended")
                worker = self._of_thread.worker = Worker(self._call, self._common)
                self.workers.append(worker)
        return worker.ask(job, data, seconds=seconds)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:
        """End the workers; jobs that they have fail, and jobs that have not begun are cancelled."""
        with self._starting:
            self._closed = True
        for worker in self.workers:
            worker.process.kill()
        super().shutdown(wait, cancel_futures=cancel_futures)
        _end_all(self.workers)


def _end_all(workers: list[Worker]) -> None:
    for worker in workers:
        worker.end()


def main() -> None:
    """Do jobs until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides when it ends
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what imported code prints is not an answer
    first = json.loads(requests.readline())
    module, _, name = first["call"].partition(":")
    call: Any = None
    for line in iter(requests.readline, b""):
        request = json.loads(line)
        data = [requests.read(size)] if (size := request["bytes"]) else []
        body: Any = b""
        try:
            if call is None:
                call = getattr(import_module(module), name)
            result = call(first["common"], request["job"], *data)
            if isinstance(result, WithBytes):
                result, body = result
            text = json.dumps({"result": result, "bytes": len(body)})
        except Exception as error:  # noqa: BLE001 - the process that asked decides what to do without an answer
            text, body = json.dumps({"error": f"{type(error).__name__}: {error}"}), b""
        answers.write(text.encode() + b"\n")
        answers.write(body)
        answers.flush()
