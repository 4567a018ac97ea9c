"""What runs the calls of a spec's code: threads for plain functions, code loops for `async` ones, and hosts outside of
this process.

A thread that hangs cannot be stopped from outside. When its call is given up, another thread may take its place, so
that a hung call holds no slot; if it is busy, it is interrupted (`interrupt.py`). Threads are daemons: they do not keep
the process alive.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from engine import plugin
from engine.actions.calling.code_call import CodeCall, CodePlace, call_spec_code, loop_replaced
from engine.actions.calling.code_loop import CodeLoops
from engine.actions.calling.host import CodeHere, CodeHost, CodeOrigin, EpisodeHost, SpecCode
from engine.actions.calling.interrupt import CodeThread, Interrupted, Interrupter
from engine.deadline import Deadlines
from engine.errors import SpecCodeError

if TYPE_CHECKING:
    from engine.schemas.entry import IsolationSpec

log = structlog.get_logger(__name__)

MAX_THREADS = 1024
"""Maximum number of plain calls that run at once; further calls wait for a thread, and their deadlines begin later."""


class Workers:
    """Runs a spec's code, in threads and on code loops."""

    def __init__(self, most: int = MAX_THREADS) -> None:
        self.interrupter = Interrupter()
        self.threads = Threads(most, self.interrupter)
        self.code_loops = CodeLoops(self.interrupter)
        self.delay = LoopDelay()
        self._deadlines = cache(Deadlines)
        """By their length; a spec has few."""
        self._hosts: dict[str, CodeHost] = {}
        """Those of plugins, by `isolation.mode`, made when they are needed."""
        self.at_close: list[Callable[[], None]] = []
        """Called first when these workers close: ends connections of the run."""

    def load(self, origin: CodeOrigin, isolation: IsolationSpec) -> SpecCode:
        """Load an entry point in the host of its mode. Raises: EngineError: it cannot be loaded, or the mode's plugin
        is missing."""
        if isolation.mode == "thread":
            return CodeHere(origin, partial(call_spec_code, self))
        return self._host(str(isolation.mode)).load(origin, isolation)

    def apart(self, base: Path) -> EpisodeHost | None:
        """Return a host for an episode during which the engine died; None: it runs in this process again."""
        for mode in plugin.entries("isolation_modes"):
            if (host := self._host(mode).apart(base)) is not None:
                return host
        return None

    def _host(self, mode: str) -> CodeHost:
        host = self._hosts.get(mode)
        if host is None:
            modes = plugin.loaded("isolation_modes", ("thread",))
            if mode not in modes:
                why = plugin.missing("isolation_modes", mode) or "there is no such mode"
                raise SpecCodeError(f"`isolation: {mode}`: {why}", blame="spec", kind="plugin_missing")
            host = self._hosts[mode] = modes[mode]()
        return host

    def begin(self, call: CodeCall, place: CodePlace, tries: int = 0) -> None:
        """Begin a call, whose `waiter` the caller waits for; `end` must follow.

        Raises:
            LoopReplacedError: the loop of its object was replaced.
            SpecCodeError: the system cannot start a thread.
        """
        if place.is_async:
            scope = call.scope
            if scope is None or not call.bound:
                code_loop = self.code_loops.choose(scope, tries)
            elif (bound_to := scope.code_loop) is None:
                code_loop = scope.code_loop = self.code_loops.choose(scope)
            else:
                code_loop = bound_to
            call.place = code_loop
            if code_loop.retired:
                raise loop_replaced(call)
            code_loop.start(call)
        else:
            call.place = self.threads
            self.threads.start(call)
        delay = self.delay
        if delay.loop is call.loop:
            delay.calls += 1
        else:
            delay.start(call.loop)
        call.delay = delay.seconds
        if call.seconds is not None:
            self._deadlines(call.seconds).watch(call)

    def end(self, call: CodeCall) -> None:
        """Count a call that has a result, is lost, or was abandoned."""
        if call.seconds is not None:
            self._deadlines(call.seconds).calls.pop(call, None)
        self.delay.calls -= 1

    def within(self, seconds: float | None) -> AbstractContextManager[Any]:
        """Return a context manager with a deadline; None is no deadline."""
        return nullcontext() if seconds is None else self._deadlines(seconds).begin()

    def close(self) -> None:
        """End the threads and close the hosts. Busy threads end after their call; hung threads end with the process."""
        while self.at_close:
            self.at_close.pop()()
        for host in self._hosts.values():
            host.close()
        self.threads.close()
        self.code_loops.close()


class Threads:
    """Daemon threads, started when there are more calls than threads, up to `most` that are not given up.

    A call beyond that waits for a thread, and its deadline has not begun. All counters belong to the main loop's
    thread; the threads touch queues alone.
    """

    def __init__(self, most: int, interrupter: Interrupter) -> None:
        self._most = most
        self._interrupter = interrupter
        self._waiting: queue.SimpleQueue[CodeCall | None] = queue.SimpleQueue()
        self._finished: deque[CodeCall] = deque()
        self._waking = False
        self._open = 0
        """Number of calls that run or wait for a thread."""
        self._count = 0
        """Number of threads that are not abandoned."""
        self.blocker: CodeCall | None = None
        """See `CodeLoop.blocker`; a thread is blocked by no other call."""

    def start(self, call: CodeCall) -> None:
        """Run a call when a thread is free.

        Raises:
            SpecCodeError: the system cannot start a thread.
        """
        self._open += 1
        self._grow()
        if self._count == 0:
            self._open -= 1
            raise SpecCodeError(
                "the system refuses to start a thread; raise its limit of processes and threads",
                blame="engine",
                kind="no_thread",
            )
        self._waiting.put(call)

    def _grow(self) -> None:
        """Start a thread if there are more calls than threads."""
        if self._open <= self._count or self._count >= self._most:
            return
        try:
            threading.Thread(target=self._work, name="episode-worker", daemon=True).start()
        except RuntimeError as error:  # the system allows no more: so many are the most
            log.warning("no more threads can be started", threads=self._count, error=str(error))
        else:
            self._count += 1

    def remaining(self, call: CodeCall, seconds: float) -> float:
        """Return the rest of a call's deadline."""
        return call.remaining(seconds)

    def abandon(self, call: CodeCall) -> bool:
        """Abandon a call; False if it has finished already and its result will arrive."""
        if not call.take():
            return False
        self._open -= 1
        if call.began is not None:
            self._count -= 1
            assert call.thread is not None
            self._interrupter.add(call.thread, call)
            self._grow()  # a call may wait for the thread that hangs
        return True

    def close(self) -> None:
        """End idle threads. Busy threads end after their call; hung threads end with the process."""
        for _ in range(self._count):
            self._waiting.put(None)
        self._count = 0

    def _work(self) -> None:
        thread = CodeThread()
        while (call := self._waiting.get()) is not None:
            call.thread = thread
            call.began = time.monotonic()
            if not call.untaken:  # its caller gave up while it waited for a thread
                continue
            context = call.context
            del call.context
            try:
                try:
                    call.result = (context.run(call.function, *call.args), None)
                except BaseException as error:  # noqa: BLE001  (any exception is handed to the caller)
                    call.result = (None, error)
                if given_up := not call.take():
                    self._interrupter.release(thread)
            except Interrupted:  # pending when the function returned; only calls that were given up are interrupted
                given_up = True
                self._interrupter.release(thread)
            if given_up:  # another thread may have taken this one's place
                return
            self._finished.append(call)
            if not self._waking:
                self._waking = True
                try:
                    call.loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:  # the loop is closed: nobody waits any more
                    self._waking = False

    def _deliver(self) -> None:
        self._waking = False  # before the queue is emptied, or what comes then would wait for the next call
        while self._finished:
            call = self._finished.popleft()
            self._open -= 1
            call.deliver()


TICK = 0.05
"""Seconds between two events of the timer of `LoopDelay`."""


@dataclass(slots=True, eq=False)
class LoopDelay:
    """Sums the delays of a timer of the main loop while calls run; the caller counts calls and calls `start` for a new
    loop.

    The timer fires late if threads hold Python's lock, the loop's own work takes long, or the machine is loaded. Calls
    in threads wait for the same reasons, and their wall time counts against their deadlines.
    """

    calls: int = 0
    """Number of running calls; the timer stops at its next event if it is 0."""
    seconds: float = 0.0
    """Total delay so far."""
    loop: asyncio.AbstractEventLoop | None = None
    """The loop whose timer runs; None: no timer runs."""
    _due: float = field(default=0.0, init=False)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the timer of a loop, for the first of its calls."""
        self.loop, self.calls = loop, 1
        self._due = loop.time() + TICK
        loop.call_at(self._due, self._tick)

    def since(self, before: float) -> float:
        """Return the seconds of delay since `seconds` was `before`."""
        assert self.loop is not None
        return self.seconds - before + max(0.0, self.loop.time() - self._due)

    def _tick(self) -> None:
        assert self.loop is not None
        now = self.loop.time()
        self.seconds += now - self._due
        if self.calls <= 0:
            self.loop = None
            return
        self._due = now + TICK
        self.loop.call_at(self._due, self._tick)
