"""Worker processes that scale images ahead of the forward passes that need them.

    ahead = PixelsAhead()
    ahead.expect(digests, job)    # job(digest): the encoded image and its recipe
    ahead.take(digest)            # its pixels; None: make them yourself

Invariant: a worker that dies, or an image that it cannot scale, costs time only: `take` gives None.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import structlog

from engine.processes.worker import WorkerPool, default_processes

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
        self._workers: WorkerPool | None = None
        self._waiting: OrderedDict[str, Job] = OrderedDict()
        self._begun: OrderedDict[str, Future[np.ndarray | None]] = OrderedDict()
        self._lock = threading.Lock()

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
        if not self._waiting:
            return
        if self._processes is None:
            self._processes = max(1, default_processes() // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
        if self._workers is None:
            self._workers = WorkerPool(self._processes, "engine.tokens.pixels:scale")
        while self._waiting and len(self._begun) < AHEAD * self._processes:
            digest, job = self._waiting.popitem(last=False)
            self._begun[digest] = self._workers.submit(self._pixels, digest, job)

    def _pixels(self, digest: str, job: Job) -> np.ndarray | None:
        assert self._workers is not None
        try:
            asked = job(digest)
            if asked is None:
                return None
            image, recipe = asked
            shape, pixels = self._workers.ask(json.dumps(recipe).encode(), image, seconds=DEADLINE)
            return np.frombuffer(pixels, np.uint8).reshape(shape)
        except Exception as error:  # noqa: BLE001 - the one who takes the image makes it, and raises what is wrong
            log.info("an image is scaled in this process", reason=f"{type(error).__name__}: {error}")
            return None
