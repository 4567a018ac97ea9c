"""Calls into code that is not ours: in threads where it is synchronous, and always under a deadline.

An `async` function with nothing to wait for in it is run where it is called: it holds the event loop for as long as it
takes in either case, and a task of its own would cost more than most such calls do.

A thread that hangs cannot be stopped from outside. It is abandoned: its caller gets a typed error at the
deadline, and another thread takes its place, so that a hung call never holds a slot for ever. Threads are
daemons and do not keep the process alive.
"""

from __future__ import annotations

import asyncio
import dis
import inspect
import queue
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from functools import lru_cache, partial
from types import CodeType
from typing import Any, NoReturn

from engine.deadline import Deadlines
from engine.errors import EngineError, WorldError
from schemas.trajectory import Blame

_Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Workers:
    """Daemon threads for synchronous calls; grown on demand up to `most` that are not abandoned."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads = 0
        self._running: dict[asyncio.Future[Any], threading.Thread] = {}
        self._abandoned: set[threading.Thread] = set()
        self._deadlines = _ByLength()

    def within(self, seconds: float | None) -> AbstractContextManager[Any]:
        """The deadline of one call; None is none."""
        return nullcontext() if seconds is None else self._deadlines[seconds].begin()

    def submit(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run `function` in a thread; a future of the running loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            elif self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._work, name="episode-worker", daemon=True).start()
        self._jobs.put((loop, future, function, args))
        return future

    def abandon(self, future: asyncio.Future[Any]) -> None:
        """Give up on a call: its thread, if it is stuck in it, no longer counts."""
        with self._lock:
            thread = self._running.get(future)
            if thread is not None and thread not in self._abandoned:
                self._abandoned.add(thread)
                self._threads -= 1

    def close(self) -> None:
        """Let idle threads end. Busy ones end after their call; hung ones go with the process."""
        with self._lock:
            count = self._threads
        for _ in range(count):
            self._jobs.put(None)

    def _work(self) -> None:
        me = threading.current_thread()
        while True:
            job = self._jobs.get()
            if job is None:
                return
            loop, future, function, args = job
            if future.cancelled():  # its caller gave up while it waited for a thread
                with self._lock:
                    self._idle += 1
                continue
            with self._lock:
                self._running[future] = me
            outcome: tuple[Any, BaseException | None]
            try:
                outcome = (function(*args), None)
            except BaseException as error:  # noqa: BLE001  (handed to the caller, whatever it is)
                outcome = (None, error)
            with self._lock:
                del self._running[future]
                given_up = me in self._abandoned
                self._abandoned.discard(me)
                if not given_up:
                    self._idle += 1
            try:
                loop.call_soon_threadsafe(_settle, future, *outcome)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more
            if given_up:
                return  # another thread has taken this one's place


class _ByLength(dict[float, Deadlines]):
    """Deadlines by their length; a spec has few."""

    def __missing__(self, seconds: float) -> Deadlines:
        found = self[seconds] = Deadlines(seconds)
        return found


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    elif isinstance(error, StopIteration):  # a future refuses it
        future.set_exception(RuntimeError(f"StopIteration: {error}"))
    else:
        future.set_exception(error)


async def _contained(call: Coroutine[Any, Any, Any]) -> Any:
    """A `sys.exit()` inside a coroutine would end the event loop, and with it every other episode."""
    try:
        return await call
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _forget(task: asyncio.Future[Any]) -> None:
    """Fetch what an abandoned call raised, so that asyncio does not report it as unseen."""
    if not task.cancelled():
        task.exception()


def _settled(pending: asyncio.Future[Any]) -> asyncio.Future[None]:
    """Done when the call is, whatever came of it.

    The call itself is not waited for: one that swallows its cancellation would then be waited for for ever.
    """
    waiter: asyncio.Future[None] = pending.get_loop().create_future()

    def wake(_: object) -> None:
        if not waiter.done():
            waiter.set_result(None)

    pending.add_done_callback(wake)
    return waiter


def _leave(workers: Workers, pending: asyncio.Future[Any]) -> None:
    """Give up on a call, and let it end by itself."""
    workers.abandon(pending)
    pending.cancel()
    pending.add_done_callback(_forget)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call gives a coroutine, for functions, methods and objects with an async `__call__`."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None)
    if code is not None and code.co_flags & inspect.CO_COROUTINE:  # most are; `inspect` takes longer to say so
        return True
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  (an object's own, not whether it has one)
    )


def never_waits(function: Callable[..., Any]) -> bool:
    """Whether a call gives a coroutine that ends without ever giving way: an `async def` with nothing to wait for in it."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return code is not None and bool(code.co_flags & inspect.CO_COROUTINE) and not _gives_way(code)


@lru_cache(maxsize=512)
def _gives_way(code: CodeType) -> bool:
    # Whatever a coroutine waits for (await, async with, async for), it does so by yielding in its own code.
    return any(instruction.opname == "YIELD_VALUE" for instruction in dis.get_instructions(code))


async def _at_once(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    """Run a coroutine that never waits where we stand: what a task of its own would do, without the loop's rounds for it.

    Returns:
        (value, what it raised); CancelledError where it cancelled its task, which is ours, and which goes on.
    """
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()
    outcome: tuple[Any, BaseException | None]
    try:
        copy_context().run(function(*args).send, None)
        outcome = (None, RuntimeError("a coroutine with nothing to wait for gave way"))
    except StopIteration as done:
        outcome = (done.value, None)
    except (SystemExit, KeyboardInterrupt) as error:
        outcome = (None, RuntimeError(f"{type(error).__name__}: {error}"))
    except BaseException as error:  # noqa: BLE001  (handed to the caller, whatever it is)
        outcome = (None, error)
    if task is not None and task.cancelling() > before:
        while task.cancelling() > before:
            task.uncancel()
        try:
            await asyncio.sleep(0)  # where the cancellation comes out
        except asyncio.CancelledError as error:
            outcome = (None, error)
    return outcome


async def call_world(
    workers: Workers,
    function: Callable[..., Any],
    *args: Any,
    seconds: float | None,
    blame: Blame,
    what: str,
) -> Any:
    """Call code of a world: in a thread, or, where it is `async`, in the event loop.

    Keyword arguments come in a `functools.partial`, so that no name of theirs can clash with one of ours.

    Raises:
        WorldError: kind `<blame>_timeout` past the deadline of `seconds` (None: it has its own), `<blame>_error` for what
            it raised.
    """
    if never_waits(function):
        began = time.perf_counter()
        value, error = await _at_once(function, args)
        if seconds is not None and time.perf_counter() - began > seconds:
            raise _late(what, blame, seconds)
        if error is not None:
            _fail(what, blame, error)
        return value
    pending: asyncio.Future[Any]
    if is_async(function):
        pending = asyncio.ensure_future(_contained(function(*args)))
    else:
        pending = workers.submit(function, *args)
    try:
        with workers.within(seconds):
            await _settled(pending)
    except asyncio.CancelledError:
        _leave(workers, pending)
        raise
    except TimeoutError:
        _leave(workers, pending)
        assert seconds is not None  # or there is no deadline
        raise _late(what, blame, seconds) from None
    try:
        return pending.result()
    except BaseException as error:  # noqa: BLE001  (raised again, as a failure)
        _fail(what, blame, error)


def _late(what: str, blame: Blame, seconds: float) -> WorldError:
    """The failure of a call that took too long."""
    return WorldError(
        f"{what} did not answer within {seconds:g} s; give it a longer deadline or make it faster",
        blame=blame,
        kind=f"{blame}_timeout",
    )


def _fail(what: str, blame: Blame, error: BaseException) -> NoReturn:
    """Raise what a call raised, as the failure that it is."""
    if isinstance(error, EngineError):
        raise error
    if isinstance(error, asyncio.CancelledError):
        raise WorldError(f"{what} cancelled itself", blame=blame, kind=f"{blame}_error") from None
    trace = "".join(traceback.format_exception(error))
    raise WorldError(
        f"{what} raised {type(error).__name__}: {error}", blame=blame, kind=f"{blame}_error", trace=trace
    ) from error
