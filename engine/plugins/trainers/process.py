"""What an adapter has once in a process of a trainer: a loop in a thread, a folder, since a run store has one writer,
and its episodes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

_Result = TypeVar("_Result")
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class LoopThread:
    """Runs coroutines on one loop, whichever thread calls. The thread begins with the first call.

    >>> loop = LoopThread()
    >>> loop.call(asyncio.sleep(0, "done"))
    'done'
    >>> loop.close()
    """

    _loop: asyncio.AbstractEventLoop
    _thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether a call was made, and the loop is not closed."""
        return self._thread is not None

    def submit(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Run a coroutine without waiting for it."""
        if self._thread is None:
            self._loop = asyncio.new_event_loop()
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


def lock_process_number(folder: Path) -> tuple[int, FileLock]:
    """The first number, from 0, whose `process-<number>` in a folder no other living process has, and its lock: no
    other takes it until the lock is released."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in count():
        lock = FileLock(folder / f"process-{number}.lock", thread_local=False)  # another thread may release it
        with suppress(Timeout):
            lock.acquire(timeout=0)
            return number, lock
    raise AssertionError  # `count` does not end


class OncePerProcess(dict[_Key, _Value]):
    """What the calls of a trainer in this process share, which the first of them opens."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def opened(self, key: _Key, opening: Callable[[], _Value]) -> _Value:
        """The value of a key; the first call opens it, and calls of other threads wait for it."""
        with self._lock:
            if key not in self:
                self[key] = opening()
            return self[key]

    def forget(self, value: _Value) -> None:
        """Let the next call open it again."""
        for key in [key for key, other in self.items() if other is value]:
            del self[key]
