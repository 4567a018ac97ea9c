"""One call into a spec's code, which ends exactly once: with its result, its error, or because it is abandoned.

A call has two sides: the main loop, which waits for it, and the thread that runs it. Exactly one of them ends the
call (`CodeCall.take`): the thread that has finished it, or the main loop that abandons it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any

from engine.errors import SpecCodeError

if TYPE_CHECKING:
    from engine.actions.calling.code_loop import CodeLoop
    from engine.actions.calling.interrupt import CodeThread
    from engine.actions.calling.threads import Threads
    from engine.schemas.entry import Effects
    from engine.schemas.trajectory import Blame


class EpisodeScope:
    """The data that the calls of one attempt of an episode share: it lost `losses` event loops in earlier attempts. In
    the `last` one, a lost call is a failure: the episode is not resumed once more.
    """

    __slots__ = ("code_loop", "episode", "last", "losses")

    def __init__(self, episode: str, losses: int = 0, *, last: bool = False) -> None:
        self.losses = losses
        self.last = last
        self.episode = episode
        """Its id, for messages."""
        self.code_loop: CodeLoop | None = None
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

    @property
    def over(self) -> bool:
        """Whether it has finished or was abandoned."""
        return not self.untaken

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
