"""An event loop with a thread of its own, for trainers that call the engine from plain functions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class LoopThread:
    """Runs coroutines on one loop, whichever thread calls. The thread begins with the first call.

    >>> loop = LoopThread()
    >>> loop.call(asyncio.sleep(0, "done"))
    'done'
    >>> loop.close()
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether a call was made, and the loop is not closed."""
        return self._thread is not None

    def submit(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Run a coroutine without waiting for it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop.run_forever, name="engine-episodes", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine and wait for its result. Ctrl-C cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the thread. Later calls of `close` do nothing."""
        if self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._thread = None
