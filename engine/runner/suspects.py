"""Episodes that may have killed the engine, and how carefully they are run.

An episode that was in flight when the engine died is one suspect among many. What is done about it grows with the
number of deaths:

- from 2 on: all code of the spec that the episode calls runs in a worker process of its own, so that it can only kill
  that, and becomes a failure with blame;
- from 3 on: no other episode is in flight meanwhile, because something else of the episode must have killed the engine;
- from 5 on: it was in flight by itself at two deaths. It becomes a failure, blamed on the engine, and is not run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from engine.errors import EngineError

APART = 2
"""Deaths after which an episode runs in a worker process."""
BY_ITSELF = 3
"""Deaths after which no other episode is in flight meanwhile."""
GIVEN_UP = 5
"""Deaths after which an episode is not run again."""


class CrashedError(EngineError):
    """The engine died whenever an episode was run."""

    kind = "engine_crashed"
    blame = "engine"


class Suspects:
    """Admits episodes.

    Args:
        crashes: By episode id, at how many deaths of the engine it was in flight.
    """

    def __init__(self, crashes: Mapping[str, int]) -> None:
        self._crashes = crashes
        self._flying = 0
        self._waiting = 0
        """Episodes that wait for all others to end; no other is admitted before them."""
        self._alone = False
        self._changed = asyncio.Condition()

    def crashes(self, episode: str) -> int:
        """At how many deaths of the engine an episode was in flight."""
        return self._crashes.get(episode, 0)

    def given_up(self, episode: str) -> CrashedError | None:
        """Why an episode is not run any more; None where it is."""
        count = self.crashes(episode)
        if count < GIVEN_UP:
            return None
        return CrashedError(
            f"the engine died {count} times while this episode was in flight, the last {GIVEN_UP - BY_ITSELF} times with no "
            "other episode beside it; look for what its task, its images or its replies do to the engine's process"
        )

    @asynccontextmanager
    async def admitted(self, episode: str) -> AsyncIterator[bool]:
        """Wait until the episode may run; whether it runs in a worker process."""
        if not self._crashes:  # as in almost every run
            yield False
            return
        count = self.crashes(episode)
        by_itself = count >= BY_ITSELF
        async with self._changed:
            self._waiting += by_itself
            try:
                await self._changed.wait_for(
                    lambda: not self._alone and not (self._flying if by_itself else self._waiting)
                )
            finally:
                self._waiting -= by_itself
            self._alone = by_itself
            self._flying += 1
        try:
            yield count >= APART
        finally:
            self._flying -= 1
            if by_itself:
                self._alone = False
            await asyncio.shield(self._tell())

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
