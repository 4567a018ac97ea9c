"""How often an episode was running when the engine died -> how it is isolated, so that it cannot kill the run again.

An episode that was running when the engine died may be the cause. The measures depend on the
number of crashes:

- from 2: all code of the spec that the episode calls runs in a separate worker process, so that it can only kill
  that process, which is a failure with blame;
- from 3: no other episode runs at the same time, because something else of the episode must have killed the engine;
- from 5: it ran alone at two crashes. It becomes a failure with blame `engine` and is not run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from engine.errors import EngineError

APART = 2
"""Number of crashes from which an episode's code runs in a worker process."""
BY_ITSELF = 3
"""Number of crashes from which no other episode runs at the same time."""
GIVEN_UP = 5
"""Number of crashes from which an episode is not run again."""


class CrashedError(EngineError):
    """The engine died whenever this episode was run."""

    kind = "engine_crashed"
    blame = "engine"


class CrashIsolation:
    """Admits episodes by their number of crashes.

    Args:
        crashes: How many crashes of the engine each episode was running at, by episode id.
    """

    def __init__(self, crashes: Mapping[str, int]) -> None:
        self.crashes = crashes
        self._running = 0
        self._waiting = 0
        """Number of episodes that wait for all others to end; no other episode is admitted before them."""
        self._alone = False
        self._changed = asyncio.Condition()

    def given_up(self, episode: str) -> CrashedError | None:
        """Return why an episode is not run any more; None if it is run."""
        count = self.crashes.get(episode, 0)
        if count < GIVEN_UP:
            return None
        return CrashedError(
            f"the engine died {count} times while this episode was running, the last {GIVEN_UP - BY_ITSELF} times with "
            "no other episode running; look for what its task, its images or its replies do to the engine's process"
        )

    @asynccontextmanager
    async def admitted(self, episode: str) -> AsyncIterator[bool]:
        """Wait until the episode may run; the value says whether its code runs in a worker process."""
        if not self.crashes:  # the usual case
            yield False
            return
        count = self.crashes.get(episode, 0)
        by_itself = count >= BY_ITSELF
        async with self._changed:
            self._waiting += by_itself
            try:
                await self._changed.wait_for(
                    lambda: not self._alone and not (self._running if by_itself else self._waiting)
                )
            finally:
                self._waiting -= by_itself
            self._alone = by_itself
            self._running += 1
        try:
            yield count >= APART
        finally:
            self._running -= 1
            if by_itself:
                self._alone = False
            await asyncio.shield(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
