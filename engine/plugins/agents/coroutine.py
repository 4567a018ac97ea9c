"""A program that is a coroutine of the spec's code, on a loop of its own (`engine.actions.calling.workers`): it is cancelled at its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from engine.errors import SpecCodeError
from engine.plugins.agents.program import Endpoint

Call = Callable[[Mapping[str, Any]], Awaitable[Any]]
"""Calls the spec's function with keyword arguments. Raises SpecCodeError for what it raises."""


class CoroutineProgram:
    """A coroutine. See `ProgramBody`: it ends with status 0 if it returns, and with status 1 if it raises.

    Args:
        call: Calls it.
        task: Its task.
        passes: The errors that are not the program's, and that `ended` raises.
    """

    def __init__(self, call: Call, task: Mapping[str, Any], passes: type[BaseException]) -> None:
        self._call, self._task, self._passes = call, task, passes
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """0, or 1 if it raised."""
        self.output = ""
        """What it raised."""
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

    async def close(self) -> None:
        """Nothing is left."""
