"""Worker processes that scale images ahead of the forward passes that need them.

    ahead = PixelsAhead()
    ahead.expect(digests, job)    # job(digest): the encoded image and its recipe
    ahead.take(digest)            # its pixels; None: make them yourself

Invariant: a worker that dies, or an image that it cannot scale, costs time only: `take` gives None.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import structlog

from engine.processes.worker import default_processes, end_worker, killed_after, start_worker

if TYPE_CHECKING:
    from engine.tokens.pixels import Recipe

log = structlog.get_logger(__name__)

DEADLINE = 60.0
"""Seconds after which a worker that scales one image is killed."""
AHEAD = 3
"""Images per worker that are scaled and not yet taken."""

Job = Callable[[str], "tuple[bytes, Recipe] | None"]


class PixelsAhead:
    """Scales expected images in worker processes, a few ahead of those that were taken. Workers start at the first image.

    Args:
        processes: Number of workers. Default: `default_processes()`, shared by the processes of a training on this host.
    """

    def __init__(self, processes: int | None = None) -> None:
        self._processes = processes
        self._threads: ThreadPoolExecutor | None = None
        self._workers: list[subprocess.Popen[bytes]] = []
        self._own = threading.local()
        self._waiting: OrderedDict[str, Job] = OrderedDict()
        self._begun: OrderedDict[str, Future[np.ndarray | None]] = OrderedDict()
        self._lock = threading.Lock()
        weakref.finalize(self, _end, self._workers)

    def expect(self, digests: Iterable[str], job: Job) -> None:
        """Scale these images, in this order, in place of those that were expected before.

        Args:
            digests: The images.
            job: Called in another thread. None: the image is not scaled here.
        """
        with self._lock:
            self._waiting = OrderedDict((digest, job) for digest in digests)
            for digest in [begun for begun in self._begun if begun not in self._waiting]:
                self._begun.pop(digest).cancel()
            for digest in self._begun:
                del self._waiting[digest]
            self._begin()

    def take(self, digest: str) -> np.ndarray | None:
        """The pixels of an expected image, uint8 [tiles, height, width, 3]; None if it is not being scaled."""
        with self._lock:
            future = self._begun.pop(digest, None)
            if future is None:
                self._waiting.pop(digest, None)
                return None
        pixels = None if future.cancel() else future.result()
        with self._lock:
            self._begin()
        return pixels

    def _begin(self) -> None:
        if self._threads is None:
            if not self._waiting:
                return
            if self._processes is None:
                self._processes = max(1, default_processes() // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
            self._threads = ThreadPoolExecutor(self._processes, thread_name_prefix="pixels")
        assert self._processes is not None
        while self._waiting and len(self._begun) < AHEAD * self._processes:
            digest, job = self._waiting.popitem(last=False)
            self._begun[digest] = self._threads.submit(self._pixels, digest, job)

    def _pixels(self, digest: str, job: Job) -> np.ndarray | None:
        try:
            asked = job(digest)
            return None if asked is None else self._asked(*asked)
        except Exception as error:  # noqa: BLE001 - the one who takes the image makes it, and raises what is wrong
            log.info("an image is scaled in this process", reason=f"{type(error).__name__}: {error}")
            return None

    def _asked(self, data: bytes, recipe: Recipe) -> np.ndarray:
        worker = self._worker()
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            with killed_after(worker, DEADLINE):
                worker.stdin.write(json.dumps({"bytes": len(data), "recipe": recipe}).encode() + b"\n")
                worker.stdin.write(data)
                worker.stdin.flush()
                answer = json.loads(worker.stdout.readline())
                if "error" in answer:
                    raise ValueError(answer["error"])
                return _read(worker.stdout, answer["shape"])
        except (OSError, EOFError, json.JSONDecodeError):
            self._own.worker = None  # the next image starts another
            end_worker(worker)
            raise

    def _worker(self) -> subprocess.Popen[bytes]:
        """The worker of this thread."""
        worker: subprocess.Popen[bytes] | None = getattr(self._own, "worker", None)
        if worker is None:
            worker = self._own.worker = start_worker("engine.tokens.pixels")
            self._workers.append(worker)
        return worker


def _read(stream: IO[bytes], shape: list[int]) -> np.ndarray:
    pixels = np.empty(shape, np.uint8)
    rest = pixels.data.cast("B")
    file: Any = stream
    while len(rest):
        count = file.readinto(rest)
        if not count:
            raise EOFError("a worker ended")
        rest = rest[count:]
    return pixels


def _end(workers: list[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        end_worker(worker)
