"""A call into a spec's code, and the episode that makes it.

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
    from engine.schemas.trajectory import Blame


class EpisodeScope:
    """The data that the calls of one attempt of an episode share.

    Args:
        episode: Its id.
        losses: How many event loops it lost in earlier attempts.
        last: A lost call in this attempt is a failure: the episode is not resumed once more.
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
    """A call of a spec's code.

    Args:
        function: The function to call.
        args: Its arguments.
        what: Its name in messages.
        blame: The blame of its failures.
    """

    __slots__ = (
        "_untaken",
        "_waiter",
        "args",
        "began",
        "blame",
        "blocked",
        "context",
        "delivered",
        "episode",
        "function",
        "loop",
        "lost",
        "own",
        "result",
        "task",
        "thread",
        "what",
    )

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], what: str, blame: Blame) -> None:
        scope = SCOPE.get()
        self.function = function
        self.args = args
        self.what = what
        self.blame: Blame = blame
        self.episode = "" if scope is None else scope.episode
        self.loop = asyncio.get_running_loop()
        """The main loop."""
        self.context = copy_context()
        self.context.run(CALL.set, self)
        self.began: float | None = None
        """The time (`time.monotonic`) at which a thread began to run it; None before."""
        self.result: tuple[Any, BaseException | None] | None = None
        """(value, exception), set when it has finished."""
        self.thread: CodeThread | None = None
        """The thread that runs it, for plain functions."""
        self.task: asyncio.Task[None] | None = None
        """Its task, if it runs on an event loop."""
        self.blocked = 0.0
        """Seconds for which its loop had been blocked before it began."""
        self.own = 0.0
        """Seconds for which it blocked its loop itself."""
        self.delivered = False
        """Whether its result has reached the main loop."""
        self.lost = False
        """Whether its loop was replaced, so that it will have no result."""
        self._untaken = [True]
        self._waiter: asyncio.Future[None] | None = None

    def take(self) -> bool:
        """Claim the end of the call; True for the first caller. Atomic, because `list.pop` is."""
        try:
            return self._untaken.pop()
        except IndexError:
            return False

    @property
    def over(self) -> bool:
        """Whether it has finished or was abandoned."""
        return not self._untaken

    def remaining(self, seconds: float) -> float:
        """Return the rest of a deadline that began with the call; all of it while the call waits for a thread."""
        return seconds if self.began is None else self.began + seconds - time.monotonic()

    async def wait(self) -> None:
        """Wait until the call has a result or is lost."""
        if not self.delivered and not self.lost:
            self._waiter = self.loop.create_future()
            await self._waiter

    def deliver(self, *, lost: bool = False) -> None:
        """Give the result to the waiting caller. Runs in the main loop's thread."""
        self.delivered, self.lost = not lost, lost
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class LoopReplacedError(SpecCodeError):
    """The event loop that a call ran on, or that its object is bound to, was blocked by another call and replaced.

    Args:
        what: The call that was lost.
        blocker: The call that blocked the loop; None if it is not known.
        blame: The blame if the blocker is not known.
        repeatable: Whether the episode can be resumed from its journal.
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
