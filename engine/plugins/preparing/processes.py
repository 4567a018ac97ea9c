"""Jobs over many rows: from the cache, in this process, or in several.

The first jobs run in this process. Workers start when the jobs have taken `ALONE` seconds, because a worker needs about as long to
import what it needs.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import structlog

from engine.plugins.preparing.cache import PreparedCache
from engine.processes.worker import WorkerError, WorkerPool, default_processes
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
        workers: WorkerPool | None = None
        for job in jobs:
            future: Future[Any] = Future()
            cached = cache.get(job.key)
            if cached is not None:
                future.set_result(cached)
            elif most == 1 or (workers is None and spent < alone):
                began = time.perf_counter()
                result = local(job.value)
                spent += time.perf_counter() - began
                cache.put(job.key, result)
                future.set_result(result)
            else:
                workers = workers or opened.enter_context(WorkerPool(most, remote, common))
                future = workers.submit(_in_worker, workers, job, cache)
            waiting.append((job, future))
            while waiting and (waiting[0][1].done() or len(waiting) > AHEAD * most):
                yield _result(*waiting.popleft(), local, cache)
        while waiting:
            yield _result(*waiting.popleft(), local, cache)
    cache.prune()


def _in_worker(workers: WorkerPool, job: Job, cache: PreparedCache) -> Any:
    """A job's result, in a thread of the workers."""
    result = workers.ask(json.dumps(job.value).encode(), seconds=DEADLINE)
    cache.put(job.key, result)
    return result


def _result(job: Job, future: Future[Any], local: Callable[[Any], Any], cache: PreparedCache) -> Any:
    try:
        return future.result()
    except WorkerError as error:
        log.info("a part of the rows is prepared in this process", reason=f"of a worker: {error}")
    result = local(job.value)
    cache.put(job.key, result)
    return result
