"""One agent program: what runs, its requests in the order in which they are answered, and its end.

Invariant: after `stop` the program does not run, its key is refused, and its waiting requests are answered with an
error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any

from engine.errors import SpecCodeError
from engine.plugins.agents.inbox import Exchange, Inbox
from engine.plugins.agents.server import server_of_loop
from engine.plugins.agents.wire.requests import MODEL, ApiError, Replies, Session
from engine.schemas.base import Struct

if TYPE_CHECKING:
    from engine.plugins.agents.prefetch import PrefetchingSampler

_PATIENCE = 10.0
"""Seconds for which a resume waits for the recorded request while the program has sent others."""


class Endpoint(Struct, frozen=True, kw_only=True):
    """What a program needs to reach the model."""

    address: str
    """`http://host:port`, without a path."""
    key: str
    model: str = MODEL


class ProgramEnd(Struct, frozen=True, kw_only=True):
    """How a program ended."""

    status: int | None
    """Its exit status, negative for a signal; None: it ran out of time and was killed."""
    output: str
    """The end of what it wrote to stdout and stderr."""
    reward: str | None
    """The JSON of its reward; None if it gave none."""


class ProgramBody:
    """What runs: a process (command.py), a coroutine, or a program elsewhere."""

    output = ""
    """The end of what it wrote."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Its exit status; done when nothing of it runs any more."""

    async def start(self, endpoint: Endpoint) -> None:
        """Start it. Raises OSError if that is not possible."""
        raise NotImplementedError

    async def stop(self) -> None:
        """End it with everything that it started; a second call does nothing."""

    async def reward(self) -> str | None:
        """The JSON of its reward; None if it gave none."""
        raise NotImplementedError

    async def close(self) -> None:
        """Remove what it left; a second call does nothing."""


Call = Callable[[Mapping[str, Any]], Awaitable[Any]]
"""Calls the spec's function with keyword arguments. Raises SpecCodeError for what it raises."""


class CoroutineProgram(ProgramBody):
    """A coroutine of the spec's code, on a loop of its own (`engine.actions.calling.workers`): it is cancelled at its
    end. It ends with status 0 if it returns, and with status 1 if it raises.

    Args:
        call: Calls it.
        task: Its task.
        passes: The errors that are not the program's, and that `ended` raises.
    """

    def __init__(self, call: Call, task: Mapping[str, Any], passes: type[BaseException]) -> None:
        super().__init__()
        self._call, self._task, self._passes = call, task, passes
        self._returned: Any = None
        self._running: asyncio.Task[None] | None = None

    async def start(self, endpoint: Endpoint) -> None:
        """Start it."""
        arguments = {
            "task": self._task,
            "base_url": f"{endpoint.address}/v1",
            "key": endpoint.key,
            "model": endpoint.model,
        }
        self._running = asyncio.create_task(self._run(arguments))

    async def _run(self, arguments: Mapping[str, Any]) -> None:
        try:
            self._returned = await self._call(arguments)
            self.ended.set_result(0)
        except self._passes as error:
            self.ended.set_exception(error)
            self.ended.exception()
        except SpecCodeError as error:
            self.output = str(error)
            self.ended.set_result(1)
        finally:
            if not self.ended.done():
                self.ended.set_result(1)

    async def stop(self) -> None:
        """Cancel it."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def reward(self) -> str | None:
        """The JSON of what it returned; None if it returned None or has not returned."""
        if self._returned is None:
            return None
        try:
            return json.dumps(self._returned)
        except (TypeError, ValueError):
            return repr(self._returned)


class ServedProgram(ProgramBody):
    """A program elsewhere: it gets its endpoint over HTTP, and says itself when it has ended (`engine serve --api`).
    The engine cannot end it, and refuses its key from then on.

    Args:
        task: Its task.
    """

    def __init__(self, task: Mapping[str, Any]) -> None:
        super().__init__()
        self.task = task
        self.endpoint: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
        """Where it reaches the model; done when it may begin."""
        self._reward: str | None = None
        self._abandoned = False

    async def start(self, endpoint: Endpoint) -> None:
        """Let it begin."""
        self.endpoint.set_result(endpoint)

    def end(self, status: int, reward: str | None) -> None:
        """Note that it has ended, with the JSON of its reward. A second call does nothing."""
        if not self.ended.done():
            self._reward = reward
            self.ended.set_result(status)

    def abandon(self) -> None:
        """Note that its episode is given up, so that it fails."""
        self._abandoned = True
        self.end(-1, None)

    async def reward(self) -> str | None:
        """The JSON of its reward.

        Raises:
            SpecCodeError: Its episode was given up.
        """
        if self._abandoned:
            raise SpecCodeError("the program gave its episode up", blame="environment", kind="agent_abandoned")
        return self._reward


class ServedPrograms:
    """The programs elsewhere whose episodes are open, by episode id."""

    def __init__(self) -> None:
        self._expected: dict[str, asyncio.Future[ServedProgram]] = {}

    def expect(self, episode: str) -> asyncio.Future[ServedProgram]:
        """Expect the program of an episode that is opened now; done when the episode needs it."""
        self._expected[episode] = asyncio.get_running_loop().create_future()
        return self._expected[episode]

    def body(self, episode: str, task: Mapping[str, Any]) -> ServedProgram:
        """The program of an episode that needs it now.

        Raises:
            SpecCodeError: The episode was not opened, or begins again: its program has the key of the first time.
        """
        expected = self._expected.pop(episode, None)
        if expected is None:
            raise SpecCodeError(
                "the episode had to begin again, and its program elsewhere cannot", blame="engine", kind="agent_lost"
            )
        program = ServedProgram(task)
        if not expected.done():
            expected.set_result(program)
        return program


class AgentProgram:
    """A program and its requests.

    Args:
        body: What runs.
        seconds: Its time.
        inbox: Its requests; None: those of a program without an episode.
        idle: Its time without a request.
    """

    def __init__(self, body: ProgramBody, seconds: float, inbox: Inbox | None = None, idle: float = inf) -> None:
        self.inbox = inbox or Inbox(Session())
        """Its requests."""
        self.inbox.on_request = self._begin_ahead
        self.ahead: PrefetchingSampler | None = None
        """Samples replies ahead; None: requests are answered one after the other."""
        self.current: Exchange | None = None
        """The request that is answered now."""
        self._body = body
        self._seconds, self._idle = seconds, idle
        self._deadline = 0.0
        self._started = False

    async def start(self) -> None:
        """Start the program. Raises OSError if that is not possible."""
        address = await server_of_loop().open(self.inbox.key, self.inbox)
        self._started = True
        await self._body.start(Endpoint(address=address, key=self.inbox.key))
        self._body.ended.add_done_callback(lambda _: self.inbox.woken.set())
        self._deadline = asyncio.get_running_loop().time() + self._seconds

    async def next(self, recorded: Callable[[Exchange], bool] | None = None) -> Exchange | ProgramEnd:
        """Wait for the next request, or for the program's end or that of its time, after which it is stopped.

        A request that comes alone is next at once. Requests that come while another one is answered are sampled at the
        same time, and the first one whose reply is there is next.

        Args:
            recorded: On a resume: whether a request is the one that was next before.
        """
        loop, inbox = asyncio.get_running_loop(), self.inbox
        others_since: float | None = None
        deadline = min(self._deadline, loop.time() + self._idle)
        while not self._body.ended.done():
            now = loop.time()
            if now >= (self._deadline if inbox.waiting else deadline):
                name = "timeout" if inbox.waiting or deadline == self._deadline else "idle"
                return await self._end(None, f"the program ran out of time: `agent.{name}` of the spec")
            inbox.woken.clear()
            if recorded is not None:
                others_since = others_since or (now if inbox.waiting else None)
                patient = others_since is None or now < others_since + _PATIENCE
                exchange = next(
                    filter(recorded, inbox.waiting), None if patient or not inbox.waiting else inbox.waiting[0]
                )
            else:
                exchange = self._first()
            if exchange is not None:
                inbox.waiting.remove(exchange)
                self.current = exchange
                return exchange
            until = self._deadline if inbox.waiting else deadline
            if others_since is not None:
                until = min(until, others_since + _PATIENCE)
            try:
                async with asyncio.timeout_at(until):
                    await inbox.woken.wait()
            except TimeoutError:
                continue
        return await self._end(self._body.ended.result(), "the program has ended")

    def _first(self) -> Exchange | None:
        """The waiting request that is answered next; None: none is ready."""
        waiting, ahead = self.inbox.waiting, self.ahead
        if not waiting or ahead is None:
            return waiting[0] if waiting else None
        alone = len(waiting) == 1 and not ahead.has_begun(waiting[0])
        if not alone or waiting[0].request.replies > 1:
            for exchange in waiting:
                ahead.begin(exchange)
        if alone:
            return waiting[0]
        if (ready := next(filter(ahead.is_ready, waiting), None)) is not None:
            return ready
        return None if any(map(ahead.has_begun, waiting)) else waiting[0]  # a limit stops those that are left

    def _begin_ahead(self, exchange: Exchange) -> None:
        """Begin to sample the replies to a request that came while another one is answered."""
        if self.ahead is not None and (self.current is not None or len(self.inbox.waiting) > 1):
            self.ahead.begin(exchange)

    def answer(self, replies: Replies) -> None:
        """Send the replies to the current request."""
        assert self.current is not None
        self.inbox.send(self.current, replies)
        self.current = None

    def refuse(self, fault: ApiError) -> None:
        """Send an error to the current request."""
        assert self.current is not None
        if not self.current.answer.done():
            self.current.answer.set_exception(fault)
        self.current = None

    async def stop(self, why: str = "the episode is over") -> None:
        """Answer waiting requests with an error, end the program, and remove what it left."""
        current, self.current = self.current, None
        if self.ahead is not None:
            self.ahead.close()
        if self._started:
            await self.inbox.close(self.fault() or ApiError(why, code="episode_over"), *([current] if current else []))
        await self._body.stop()
        await self._body.close()

    def fault(self) -> ApiError | None:
        """The error that says which limit ended the episode; None: none did."""
        return None

    async def end(self) -> ProgramEnd | None:
        """Stop a program that has not ended, and return its end; None if it has ended, or did not start."""
        ended = self.inbox.over is not None or not self._started
        return None if ended else await self._end(None, "the episode is over")

    async def _end(self, status: int | None, why: str) -> ProgramEnd:
        await self._body.stop()
        reward = await self._body.reward()
        output = self._body.output
        await self.stop(why)
        return ProgramEnd(status=status, output=output, reward=reward)
