"""How the end of an episode is written: the trajectory in one commit, and its traces."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from engine.errors import StoreError

if TYPE_CHECKING:
    from engine.episode import Episode
    from engine.schemas.trajectory import Trajectory
    from engine.store.codec import Ending
    from engine.store.store import RunStore
    from engine.traces.writer import TraceWriter

FINISHING = 64
"""Maximum number of trajectories in memory that wait to be written; each is several times as large as its episode."""


class Finisher:
    """Writes the ends of a run's episodes.

    Args:
        store: The run's store.
        traces: Where traces are written, if they are.
        exact: Whether the backend reports the exact ids of prompts and replies.
    """

    def __init__(self, store: RunStore, traces: TraceWriter | None, *, exact: bool) -> None:
        self._store = store
        self._traces = traces
        self._exact = exact
        self._waiting = asyncio.Semaphore(FINISHING)

    async def finish(self, episode: Episode, ending: Ending | None) -> Trajectory:
        """Write the end of an episode, in one commit.

        Its last action is never performed again: if this is cancelled, the episode is written first, and if the trajectory
        cannot be written, the last entry is.
        """
        cancelled: asyncio.CancelledError | None = None
        while True:
            try:
                await self._waiting.acquire()
                break
            except asyncio.CancelledError as error:
                cancelled = error
        try:
            trajectory = episode.trajectory(self._store.run_id, exact=self._exact)
            await self._store.finish(trajectory, ending)
            if self._traces is not None:
                self._traces.add(trajectory)
        except StoreError:
            raise
        except Exception:
            if ending is not None:
                await self._store.append(episode.id, *ending)
            raise
        finally:
            self._waiting.release()
        if cancelled is not None:
            raise cancelled
        return trajectory
