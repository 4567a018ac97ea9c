"""A runner's question -> the next task and sample to run, until there is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from engine.runner.crash_isolation import APART, CrashIsolation
from engine.store.episode_rows import episode_id_of

if TYPE_CHECKING:
    from engine.schemas.environment import Task


class EpisodeSource(Protocol):
    """Gives a runner its episodes, one after another."""

    async def next(self) -> tuple[Task, int, int] | None:
        """Return the next episode: its task, its index in the group, and the number of its first attempt; None: no more."""

    def ended(self, task: Task, sample: int, *, finished: bool) -> None:
        """Count an episode that has ended. finished: it is stored; else the engine could not finish it."""


class InOrder:
    """Gives episodes in the order of an iterator."""

    def __init__(self, episodes: Iterator[tuple[Task, int]]) -> None:
        self._episodes = episodes

    async def next(self) -> tuple[Task, int, int] | None:
        """Return the next one."""
        episode = next(self._episodes, None)
        return None if episode is None else (*episode, 0)

    def ended(self, task: Task, sample: int, *, finished: bool) -> None:
        """Nothing depends on it."""


def unfinished_episodes(
    tasks: Sequence[Task], samples: int, done: set[str], isolation: CrashIsolation
) -> Iterator[tuple[Task, int]]:
    """Yield the unfinished episodes, task by task; last those that may have killed the engine, fewest crashes first.

    Args:
        tasks: The tasks of the run.
        samples: Episodes of a task.
        done: Ids of the episodes that are finished.
        isolation: How often the engine crashed while each episode ran.
    """
    last: list[tuple[int, Task, int]] = []
    for task in tasks:
        for sample in range(samples):
            episode_id = episode_id_of(task.id, sample)
            if episode_id in done:
                continue
            if (crashes := isolation.crashes(episode_id)) >= APART:
                last.append((crashes, task, sample))
            else:
                yield task, sample
    for _, task, sample in sorted(last, key=lambda suspect: suspect[0]):
        yield task, sample
