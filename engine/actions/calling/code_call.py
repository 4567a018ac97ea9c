"""One call into a spec's code: where it runs, its deadline, and its end.

Where code runs:
- plain functions: in threads (`workers.Threads`);
- `async` functions: on an event loop in a thread of its own, a code loop (`code_loop.py`). There is one for all
  episodes, and more once code has blocked it; all calls of an episode's objects find the same one;
- `async` functions of the engine that are marked `@on_main_loop`: on the main loop. They wait for the engine's own
  parts (models, worker processes) and must never block.

A call has two sides: the main loop, which waits for it, and the thread that runs it. Exactly one of them ends the
call (`CodeCall.take`): the thread that has finished it, or the main loop that abandons it.

A deadline begins when the call begins, not while it waits for a thread or for a loop that another call blocks.
If the process got too little CPU or Python's lock was busy while a call ran (`LoopDelay`), the deadline is extended
once. A call past its deadline is abandoned: its caller gets a typed error, whatever the thread does. Code that
continues to compute is interrupted (`interrupt.py`).
"""

from __future__ import annotations

import asyncio
import inspect
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from engine.actions.calling.host import HostedCallable
from engine.deadline import Deadlines
from engine.errors import EngineError, SpecCodeError
from engine.schemas.base import Struct
from engine.schemas.trajectory import Blame
from engine.storable import words_of

if TYPE_CHECKING:
    from engine.actions.calling.code_loop import CodeLoop
    from engine.actions.calling.interrupt import CodeThread
    from engine.actions.calling.workers import Threads, Workers
    from engine.schemas.entry import Effects


STARVED_SHARE = 0.1
"""A call's deadline is extended if the main loop was late for at least this share of it."""
REPEATS = 10
"""Maximum number of repetitions of a call whose loop was blocked by others."""


@dataclass(slots=True, eq=False)
class EpisodeScope:
    """The data that the calls of one attempt of an episode share: it lost `losses` event loops in earlier attempts. In
    the `last` one, a lost call is a failure: the episode is not resumed once more.
    """

    episode: str
    """Its id, for messages."""
    losses: int = 0
    last: bool = field(default=False, kw_only=True)
    code_loop: CodeLoop | None = field(default=None, init=False)
    """The loop that the episode's objects are bound to; None before their first asynchronous call."""


SCOPE: ContextVar[EpisodeScope | None] = ContextVar("episode_scope", default=None)
"""The scope of the episode that the running task drives."""
CALL: ContextVar[CodeCall | None] = ContextVar("call", default=None)
"""The call to which the running code belongs, including tasks and callbacks that it started."""


class CodeCall:
    """A call of a spec's code. Made where it is begun, on the main loop; see `call_spec_code` for its arguments."""

    __slots__ = (
        "args",
        "began",
        "blame",
        "blocked",
        "blocking",
        "bound",
        "context",
        "delay",
        "delivered",
        "effects",
        "ends",
        "function",
        "loop",
        "lost",
        "place",
        "result",
        "scope",
        "seconds",
        "task",
        "thread",
        "untaken",
        "waiter",
        "what",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        seconds: float | None,
        what: str,
        blame: Blame,
        effects: Effects = "pure",
        bound: bool = False,
    ) -> None:
        self.scope = SCOPE.get()
        self.function = function
        self.args = args
        self.seconds = seconds
        self.what = what
        self.blame: Blame = blame
        self.effects: Effects = effects
        self.bound = bound
        self.loop = asyncio.get_running_loop()
        """The main loop."""
        self.context = copy_context()
        """Holds the call, so who runs it takes it away: else only the collector could free the call."""
        self.context.run(CALL.set, self)
        self.place: Threads | CodeLoop | None = None
        """What runs it."""
        self.ends = 0.0
        """See `Deadlines.watch`."""
        self.delay = 0.0
        """See `LoopDelay.seconds`, when it began."""
        self.began: float | None = None
        """The time (`time.monotonic`) at which a thread began to run it; None before."""
        self.result: tuple[Any, BaseException | None] | None = None
        """(value, exception), set when it has finished."""
        self.thread: CodeThread | None = None
        """The thread that runs it, for plain functions."""
        self.task: asyncio.Task[None] | None = None
        """The task in which it waits, if it runs on an event loop."""
        self.blocked = 0.0
        """Seconds for which its loop had been blocked before it began."""
        self.blocking = 0.0
        """Seconds for which it blocked its loop itself."""
        self.delivered = False
        """Whether its result has reached the main loop."""
        self.lost = False
        """Whether its loop was replaced, so that it will have no result."""
        self.untaken = [True]
        """Empty once it has finished or was abandoned."""
        self.waiter: asyncio.Future[None] = asyncio.Future(loop=self.loop)
        """Done when the call has a result, is lost, or its time has ended."""

    @property
    def episode(self) -> str:
        """The id of its episode, for messages."""
        return "" if self.scope is None else self.scope.episode

    def take(self) -> bool:
        """Claim the end of the call; True for the first caller. Atomic, because `list.pop` is."""
        try:
            return self.untaken.pop()
        except IndexError:
            return False

    def remaining(self, seconds: float) -> float:
        """Return the rest of a deadline that began with the call; all of it while the call waits for a thread."""
        return seconds if self.began is None else self.began + seconds - time.monotonic()

    async def wait(self) -> None:
        """Wait on, after `strike`, until the call has a result or is lost."""
        if not self.delivered and not self.lost:
            self.waiter = self.loop.create_future()
            await self.waiter

    def strike(self) -> None:
        """Wake the caller, because the time of the call has ended."""
        if not self.waiter.done():
            self.waiter.set_result(None)

    def deliver(self, *, lost: bool = False) -> None:
        """Give the result to the waiting caller. Runs in the main loop's thread."""
        self.delivered, self.lost = not lost, lost
        if not self.waiter.done():
            self.waiter.set_result(None)


class LoopReplacedError(SpecCodeError):
    """The event loop that the call `what` ran on, or that its object is bound to, was blocked by another call
    (`blocker`, if known) and replaced. `repeatable`: the episode can be resumed from its journal.
    """

    def __init__(self, what: str, blocker: CodeCall | None, blame: Blame, *, repeatable: bool) -> None:
        who = (
            f"{blocker.what} of episode {blocker.episode or '?'}" if blocker is not None else "code of an unknown call"
        )
        super().__init__(
            f"{who} blocked the event loop that {what} uses, and the loop was replaced; make the code that blocks wait "
            "with `await`, or make it a plain function",
            blame=blocker.blame if blocker is not None else blame,
            kind="loop_replaced",
        )
        self.blocker = blocker
        self.repeatable = repeatable


F = TypeVar("F", bound=Callable[..., Any])


def on_main_loop(function: F) -> F:
    """Mark an `async` function of the engine that `call_spec_code` awaits on the main loop. It must never block."""
    function.on_main_loop = True  # type: ignore[attr-defined]
    return function


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
    called = getattr(type(bare), "__call__", None)  # noqa: B004  (the method, not whether it has one)
    ours = getattr(bare, "on_main_loop", False) is True or getattr(called, "on_main_loop", False) is True
    waits = is_async(bare)
    bound = not inspect.isfunction(bare) and not inspect.isbuiltin(bare)
    return CodePlace(is_async=waits, on_main_loop=waits and ours, bound=bound)


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
    """Call a spec's code, in the place that the file's first lines describe.

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
            raise loop_replaced(call)
        call, lost = CodeCall(function, args, seconds, what, blame, effects, bound), call
    raise loop_replaced(lost, repeatable=False)


def loop_replaced(call: CodeCall, *, repeatable: bool = True) -> LoopReplacedError:
    """The error of a call whose loop was replaced, and which is not repeated by itself."""
    assert call.place is not None  # a call begins in a place
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
