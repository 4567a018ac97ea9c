"""Episodes of earlier launches of a training, in its run store: finished ones are used, the others continue at their turn.

Invariant: the store is asked only for what was there when this launch began.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.schemas.journal import GenerationRecord
from engine.store.store import episode_id_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.schemas.generation import Generation
    from engine.schemas.journal import JournalEntry
    from engine.schemas.trajectory import Trajectory
    from engine.store.store import RunStore


@dataclass(frozen=True, slots=True)
class Journaled:
    """What an unfinished episode had written when this launch began."""

    attempt: int
    entries: int
    """Number of journal entries."""
    turns: int
    """Number of sampled turns."""
    tokens: int
    """Number of sampled tokens."""


class StoredEpisodes:
    """The episodes of earlier launches, by task and sample.

    Args:
        store: The run store of the training.
        samples: Episodes per group.
    """

    def __init__(self, store: RunStore, samples: int) -> None:
        self._store = store
        self._samples = samples
        self._statuses = store.statuses()

    def finished(self, task_id: str, sample: int) -> Trajectory | None:
        """A finished episode; None if it is not finished."""
        episode_id = episode_id_of(task_id, sample)
        return self._store.trajectory(episode_id) if self._statuses.get(episode_id) == "done" else None

    def finished_group(self, task_id: str) -> list[Trajectory]:
        """The finished episodes of a group, in the order of samples."""
        found = (self.finished(task_id, sample) for sample in range(self._samples))
        return [trajectory for trajectory in found if trajectory is not None]

    def unfinished(self, task_id: str, sample: int) -> Journaled | None:
        """What an episode that was begun and not finished has written; None for any other episode."""
        episode_id = episode_id_of(task_id, sample)
        if self._statuses.get(episode_id) != "running":
            return None
        journal = self._store.journal(episode_id)
        lengths = [len(generation.output_ids) for generation in _generations(journal)]
        return Journaled(self._store.episode(episode_id).attempt, len(journal), len(lengths), sum(lengths))

    def versions(self, task_id: str) -> tuple[int, int] | None:
        """The smallest and the largest weight version of a group's sampled tokens; None if it has none."""
        versions: set[int] = set()
        for sample in range(self._samples):
            trajectory = self.finished(task_id, sample)
            if trajectory is not None:
                for branch in trajectory.branches:
                    versions.update(branch.weight_versions[branch.loss_mask == 1].tolist())
            elif episode_id_of(task_id, sample) in self._statuses:
                for generation in _generations(self._store.journal(episode_id_of(task_id, sample))):
                    versions.update(span.version for span in generation.versions)
                    if not generation.versions:  # version 0 throughout
                        versions.add(0)
        return (min(versions), max(versions)) if versions else None

    def regenerated_tokens(self, task_id: str, sample: int, before: Journaled) -> int:
        """Tokens of an episode, finished now, that were sampled again: an upper bound, because of the turn that was under way.

        A turn whose generation was cut off is sampled again with the same seed. An episode that had to begin again, because
        an effect outside cannot be repeated, samples all of its turns again.
        """
        episode_id = episode_id_of(task_id, sample)
        if self._store.episode(episode_id).attempt != before.attempt:
            return before.tokens
        after = _generations(self._store.journal(episode_id)[before.entries : before.entries + 1])
        return sum(len(generation.output_ids) for generation in after)


def _generations(journal: Sequence[JournalEntry]) -> list[Generation]:
    return [entry.record.generation for entry in journal if isinstance(entry.record, GenerationRecord)]
