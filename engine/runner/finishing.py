"""Writes the end of an episode: the trajectory in one commit, and then the calls of the observers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.errors import StoreError
from engine.store.codec import encode_trajectory

if TYPE_CHECKING:
    from engine.episode import Episode
    from engine.runner.guarded import EpisodeGuard
    from engine.runner.observers import EpisodeObserver
    from engine.schemas.trajectory import Trajectory
    from engine.store.codec import Ending
    from engine.store.store import RunStore

FINISHING = 64
"""Maximum number of trajectories in memory that wait to be written; each is several times as large as its episode."""

PATIENCE = 5.0
"""Seconds for which a cancelled run waits for the guard's answer."""


class Finisher:
    """Writes the ends of a run's episodes.

    Args:
        store: The run's store.
        observers: Their `episode_ended` is called with each stored trajectory.
        guard: Compares rows with the chat template; None if the backend does not report the exact ids of prompts and replies,
            so that no row is trained on.
    """

    def __init__(self, store: RunStore, observers: Sequence[EpisodeObserver], guard: EpisodeGuard | None) -> None:
        self._store = store
        self._observers = observers
        self._guard = guard
        self._waiting = asyncio.Semaphore(FINISHING)

    async def finish(self, episode: Episode, ending: Ending | None) -> Trajectory:
        """Have an ended episode judged by the guard, and write its end in one commit.

        Its last action is never performed again: if this is cancelled, the episode is written first, and if the trajectory
        cannot be written or the guard does not answer soon, the last entry is.
        """
        cancelled: asyncio.CancelledError | None = None
        while True:
            try:
                await self._waiting.acquire()
                break
            except asyncio.CancelledError as error:
                cancelled = error
        try:
            trajectory = episode.trajectory(self._store.run_id, exact=self._guard is not None)
            written = encode_trajectory(trajectory)
            if self._guard is not None:
                judging = asyncio.ensure_future(self._guard.judged(episode, trajectory, written))
                try:
                    judged = await asyncio.shield(judging)
                except asyncio.CancelledError as error:
                    cancelled = error
                    await asyncio.wait({judging}, timeout=PATIENCE)
                    if not judging.done():
                        judging.cancel()
                        raise TimeoutError from error
                    judged = judging.result()
                if judged is not trajectory:
                    trajectory, written = judged, encode_trajectory(judged)
            await self._store.finish(trajectory, ending, written)
            for observer in self._observers:
                observer.episode_ended(trajectory)
        except StoreError:
            raise
        except Exception:
            if ending is not None:
                await self._store.append(episode.id, *ending)
            if cancelled is not None:
                raise cancelled from None
            raise
        finally:
            self._waiting.release()
        if cancelled is not None:
            raise cancelled
        return trajectory
