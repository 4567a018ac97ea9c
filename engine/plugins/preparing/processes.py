"""Jobs over many rows: from the cache, in this process, or in several.

The first jobs run in this process. Workers start when the jobs have taken `ALONE` seconds, because a worker needs about as long to
import what it needs.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import structlog

from engine.plugins.preparing.cache import PreparedCache
from engine.processes.worker import default_processes, end_worker, killed_after, start_worker
from engine.schemas.base import Struct

log = structlog.get_logger(__name__)

ALONE = 3.0
"""Seconds of work in this process before workers start."""
DEADLINE = 600.0
"""Seconds after which the job of a worker is given up, and done in this process."""
AHEAD = 3
"""Jobs per worker that are read before the first of them is finished."""


class Job(Struct, frozen=True, kw_only=True):
    """A part of the rows."""

    key: str
    """Digest of everything that the result depends on."""
    value: Any
    """What the function gets; a JSON value."""


def prepare(
    jobs: Iterable[Job],
    *,
    local: Callable[[Any], Any],
    remote: str,
    common: Any,
    cache: PreparedCache,
    processes: int | None = None,
    alone: float = ALONE,
) -> Iterator[Any]:
    """The results of jobs, in order.

    Args:
        jobs: Read as they are needed, a few ahead of the results.
        local: The function, in this process: a job's value -> a JSON value.
        remote: The same function as `package.module:function`, called with `common` and a job's value in a worker.
        common: What all jobs share; a JSON value.
        cache: Where results are kept.
        processes: Number of worker processes. Default: `default_processes()`.
        alone: Seconds of work in this process before workers start.

    Raises:
        Exception: What `local` raises. Results before it have been given.
    """
    most = default_processes() if processes is None else processes
    spent = 0.0
    waiting: deque[tuple[Job, Future[Any]]] = deque()
    with contextlib.ExitStack() as opened:
        workers: _Workers | None = None
        for job in jobs:
            future: Future[Any] = Future()
            kept = cache.get(job.key)
            if kept is not None:
                future.set_result(kept)
            elif most == 1 or (workers is None and spent < alone):
                began = time.perf_counter()
                result = local(job.value)
                spent += time.perf_counter() - began
                cache.put(job.key, result)
                future.set_result(result)
            else:
                workers = workers or opened.enter_context(_Workers(remote, common, most))
                future = workers.submit(job, cache)
            waiting.append((job, future))
            while waiting and (waiting[0][1].done() or len(waiting) > AHEAD * most):
                yield _result(*waiting.popleft(), local, cache)
        while waiting:
            yield _result(*waiting.popleft(), local, cache)
    cache.prune()


def _result(job: Job, future: Future[Any], local: Callable[[Any], Any], cache: PreparedCache) -> Any:
    try:
        return future.result()
    except _FailedError as error:
        log.info("a part of the rows is prepared in this process", reason=str(error))
    result = local(job.value)
    cache.put(job.key, result)
    return result


class _FailedError(Exception):
    """A worker has no result for a job."""


class _Workers:
    """Worker processes, each with one job at a time. They end with the `with` block, and when this process ends."""

    def __init__(self, remote: str, common: Any, most: int) -> None:
        self._first = json.dumps({"call": remote, "common": common}).encode() + b"\n"
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="prepare")
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._all: list[subprocess.Popen[bytes]] = []
        self._closed = False
        self._lock = threading.Lock()

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
        for worker in self._all:
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._all:
            end_worker(worker)

    def submit(self, job: Job, cache: PreparedCache) -> Future[Any]:
        """Do a job in a worker, and keep its result. The future's exception is `_FailedError`."""
        return self._threads.submit(self._do, job, cache)

    def _do(self, job: Job, cache: PreparedCache) -> Any:
        worker = self._take()
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            with killed_after(worker, DEADLINE):
                worker.stdin.write(json.dumps(job.value).encode() + b"\n")
                worker.stdin.flush()
                answer = json.loads(worker.stdout.readline())
        except (OSError, ValueError) as error:
            end_worker(worker)
            raise _FailedError(f"a worker ended with status {worker.returncode}") from error
        self._idle.put(worker)
        if "error" in answer:
            raise _FailedError(answer["error"])
        cache.put(job.key, answer["result"])
        return answer["result"]

    def _take(self) -> subprocess.Popen[bytes]:
        with contextlib.suppress(queue.Empty):
            return self._idle.get_nowait()
        with self._lock:
            if self._closed:
                raise _FailedError("the workers have ended")
            worker = start_worker()
            self._all.append(worker)
        assert worker.stdin is not None
        try:
            worker.stdin.write(self._first)
        except OSError as error:
            raise _FailedError(f"a worker did not start: {error}") from error
        return worker
