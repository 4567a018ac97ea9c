"""A program that runs elsewhere: it gets its endpoint over HTTP, and says itself when it has ended (`engine serve --api`)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from engine.errors import SpecCodeError
from engine.plugins.agents.program import Endpoint


class ServedProgram:
    """A program elsewhere. See `ProgramBody`.

    Args:
        task: Its task.
    """

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.task = task
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Its exit status."""
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

    async def stop(self) -> None:
        """Do nothing: the engine cannot end it. Its key is refused from now on."""

    @property
    def output(self) -> str:
        """Empty: it is elsewhere."""
        return ""

    async def reward(self) -> str | None:
        """The JSON of its reward.

        Raises:
            SpecCodeError: Its episode was given up.
        """
        if self._abandoned:
            raise SpecCodeError("the program gave its episode up", blame="environment", kind="agent_abandoned")
        return self._reward

    async def close(self) -> None:
        """Do nothing."""


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
        made = ServedProgram(task)
        if not expected.done():
            expected.set_result(made)
        return made
