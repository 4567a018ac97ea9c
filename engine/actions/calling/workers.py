"""A call of a spec's code -> its answer or a typed error: never on the main loop, and always with a deadline.

Where code runs:
- plain functions: in threads (`threads.py`);
- `async` functions: on an event loop in a thread of its own, a code loop (`code_loop.py`). There is one for all
  episodes, and more once code has blocked it; all calls of an episode's objects find the same one;
- `async` functions of the engine that are marked `@on_main_loop`: on the main loop. They wait for the engine's own
  parts (models, worker processes) and must never block.

A deadline begins when the call begins, not while it waits for a thread or for a loop that another call blocks.
If the process got too little CPU or Python's lock was busy while a call ran (`LoopDelay`), the deadline is extended
once. A call past its deadline is abandoned: its caller gets a typed error, whatever the thread does. Code that
continues to compute is interrupted (`interrupt.py`).
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from engine import plugin
from engine.actions.calling.code_call import CodeCall, LoopReplacedError
from engine.actions.calling.code_loop import CodeLoop, CodeLoops
from engine.actions.calling.host import CodeHere, CodeHost, CodeOrigin, EpisodeHost, HostedCallable, SpecCode
from engine.actions.calling.interrupt import Interrupter
from engine.actions.calling.threads import Threads
from engine.deadline import Deadlines
from engine.errors import EngineError, SpecCodeError
from engine.schemas.base import Struct
from engine.schemas.trajectory import Blame
from engine.storable import words_of

if TYPE_CHECKING:
    from engine.schemas.entry import Effects, IsolationSpec


MAX_THREADS = 1024
"""Maximum number of plain calls that run at once; further calls wait for a thread, and their deadlines begin later."""
STARVED_SHARE = 0.1
"""A call's deadline is extended if the main loop was late for at least this share of it."""
REPEATS = 10
"""Maximum number of repetitions of a call whose loop was blocked by others."""

F = TypeVar("F", bound=Callable[..., Any])


def on_main_loop(function: F) -> F:
    """Mark an `async` function of the engine that `call_spec_code` awaits on the main loop. It must never block."""
    function.on_main_loop = True  # type: ignore[attr-defined]
    return function


class Workers:
    """Runs a spec's code, in threads and on code loops."""

    def __init__(self, most: int = MAX_THREADS) -> None:
        self.interrupter = Interrupter()
        self.threads = Threads(most, self.interrupter)
        self.code_loops = CodeLoops(self.interrupter)
        self.delay = LoopDelay()
        self._deadlines = _ByLength()
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
                raise _loop_replaced(call)
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
            self._deadlines[call.seconds].watch(call)

    def end(self, call: CodeCall) -> None:
        """Count a call that has a result, is lost, or was abandoned."""
        if call.seconds is not None:
            self._deadlines[call.seconds].calls.pop(call, None)
        self.delay.calls -= 1

    def within(self, seconds: float | None) -> AbstractContextManager[Any]:
        """Return a context manager with a deadline; None is no deadline."""
        return nullcontext() if seconds is None else self._deadlines[seconds].begin()

    def close(self) -> None:
        """End the threads and close the hosts. Busy threads end after their call; hung threads end with the process."""
        while self.at_close:
            self.at_close.pop()()
        for host in self._hosts.values():
            host.close()
        self.threads.close()
        self.code_loops.close()


class _ByLength(dict[float, Deadlines]):
    """A cache of deadlines by their length; a spec has few."""

    def __missing__(self, seconds: float) -> Deadlines:
        deadlines = self[seconds] = Deadlines(seconds)
        return deadlines


class CodePlace(Struct, frozen=True, kw_only=True):
    """Where a function runs; the same for each of its calls."""

    is_async: bool
    on_main_loop: bool
    """It is the engine's, and is awaited on the main loop."""
    bound: bool
    """It belongs to an object, which may hold locks or sessions of its loop."""


def place_of(function: Callable[..., Any]) -> CodePlace:
    """Return where a function runs."""
    bare = _bare(function)
    waits = is_async(bare)
    bound = not inspect.isfunction(bare) and not inspect.isbuiltin(bare)
    return CodePlace(is_async=waits, on_main_loop=waits and _is_ours(bare), bound=bound)


def _bare(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, partial):
        function = function.func
    return function


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call gives a coroutine, for functions, methods and objects with an async `__call__`."""
    function = _bare(function)
    code = getattr(function, "__code__", None)
    if code is not None and code.co_flags & inspect.CO_COROUTINE:  # most are; `inspect` takes longer to say so
        return True
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  (an object's own, not whether it has one)
    )


def _is_ours(function: Callable[..., Any]) -> bool:
    """Return whether a function or its `__call__` is marked `@on_main_loop`."""
    if getattr(function, "on_main_loop", False) is True:
        return True
    called = getattr(type(function), "__call__", None)  # noqa: B004  (the method, not whether it has one)
    return getattr(called, "on_main_loop", False) is True


async def call_spec_code(
    workers: Workers,
    function: Callable[..., Any],
    *args: Any,
    seconds: float | None,
    blame: Blame,
    what: str,
    effects: Effects = "pure",
    bound: bool | None = None,
    place: CodePlace | None = None,
) -> Any:
    """Call a spec's code, in the place that the module's docstring describes.

    Keyword arguments come in a `functools.partial`, so that no name of theirs can clash with one of ours. An `external`
    call is never repeated where its loop is replaced. A `bound` call belongs to an object of the episode, which may
    hold locks or sessions of its loop; left out: methods and objects do, functions do not. `place`: where the function
    runs, if the caller knows it.

    Raises:
        SpecCodeError: kind `<blame>_timeout` past the deadline, `<blame>_error` for what it raised.
        LoopReplacedError: another call blocked its loop, and it cannot be repeated by itself.
    """
    if isinstance(function, HostedCallable):
        return await function.call(args, seconds=seconds, blame=blame, what=what)
    place = place or place_of(function)
    if place.on_main_loop:
        return await _here(workers, function, args, seconds, blame, what)
    if bound is None:
        bound = place.bound
    call = CodeCall(function, args, seconds, what, blame, effects, bound)
    for tries in range(1 + REPEATS):
        workers.begin(call, place, tries)
        try:
            await call.waiter
            if not call.delivered and not call.lost:
                await _more_time(workers, call)
        except asyncio.CancelledError:
            assert call.place is not None
            call.place.abandon(call)
            raise
        finally:
            workers.end(call)
        if not call.lost:
            assert call.result is not None
            value, error = call.result
            if error is None:
                return value
            _fail(what, blame, error)
        if bound or effects == "external":
            raise _loop_replaced(call)
        call, lost = CodeCall(function, args, seconds, what, blame, effects, bound), call
    raise _loop_replaced(lost, repeatable=False)


def _loop_replaced(call: CodeCall, *, repeatable: bool = True) -> LoopReplacedError:
    """The error of a call whose loop was replaced, and which is not repeated by itself."""
    assert isinstance(call.place, CodeLoop)
    again = repeatable and call.effects != "external" and call.scope is not None and not call.scope.last
    return LoopReplacedError(call.what, call.place.blocker, call.blame, repeatable=again)


async def _here(
    workers: Workers,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    seconds: float | None,
    blame: Blame,
    what: str,
) -> Any:
    """Await a function of the engine on the main loop."""
    deadline = workers.within(seconds)
    try:
        with deadline:
            return await function(*args)
    except TimeoutError as error:
        if seconds is not None and getattr(deadline, "over", False):
            raise _late(what, blame, seconds) from None
        _fail(what, blame, error)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001  (raised again, as a failure)
        _fail(what, blame, error)


async def _more_time(workers: Workers, call: CodeCall) -> None:
    """The deadline of a call has passed: wait on, where its own time has not; else abandon it."""
    seconds, extended = call.seconds, False
    assert seconds is not None  # or there is no deadline
    assert call.place is not None
    while not call.delivered and not call.lost:
        left = call.place.remaining(call, seconds)
        if left <= 0 and not extended and workers.delay.since(call.delay) > STARVED_SHARE * seconds:
            left, extended = seconds, True
        deadline: AbstractContextManager[Any] = nullcontext()
        if left > 0:  # it waited for a thread or a blocked loop, or its deadline is extended
            deadline = Deadlines(left).begin()
        elif call.place.abandon(call):  # else it has finished, and its result will arrive
            raise _late(call.what, call.blame, seconds)
        with suppress(TimeoutError), deadline:
            await call.wait()


def _late(what: str, blame: Blame, seconds: float) -> SpecCodeError:
    """Return the failure of a call that took too long."""
    return SpecCodeError(
        f"{what} did not answer within {seconds:g} s; give it a longer deadline or make it faster",
        blame=blame,
        kind=f"{blame}_timeout",
    )


def _fail(what: str, blame: Blame, error: BaseException) -> NoReturn:
    """Raise the exception of a call as a typed failure."""
    if isinstance(error, EngineError):
        raise error
    if isinstance(error, asyncio.CancelledError):
        raise SpecCodeError(f"{what} cancelled itself", blame=blame, kind=f"{blame}_error") from None
    trace = "".join(traceback.format_exception(error))
    raise SpecCodeError(f"{what} raised {words_of(error)}", blame=blame, kind=f"{blame}_error", trace=trace) from error


TICK = 0.05
"""Seconds between two events of the timer of `LoopDelay`."""


class LoopDelay:
    """Sums the delays of a timer of the main loop while calls run; the caller counts calls and calls `start` for a new
    loop.

    The timer fires late if threads hold Python's lock, the loop's own work takes long, or the machine is loaded. Calls
    in threads wait for the same reasons, and their wall time counts against their deadlines.
    """

    __slots__ = ("_due", "calls", "loop", "seconds")

    def __init__(self) -> None:
        self.calls = 0
        """Number of running calls; the timer stops at its next event if it is 0."""
        self.seconds = 0.0
        """Total delay so far."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """The loop whose timer runs; None: no timer runs."""
        self._due = 0.0

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
