"""Episodes of earlier launches of a training, in its run store: finished ones are used, the others continue at their turn.

Invariant: the store is asked only for what was there when this launch began. Episodes that were dropped (`keep.py`) do not count as
stored. A resume does not need them, unless the newest checkpoints were removed; they are then sampled again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.schemas.journal import GenerationRecord
from engine.store.store import episode_id_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.schemas.generation import Generation
    from engine.schemas.journal import JournalEntry
    from engine.schemas.trajectory import Trajectory
    from engine.store.reader import RunReader


class StoredEpisodes:
    """The episodes of earlier launches, by task and sample.

    Args:
        store: The run store of the training, or a reader of it and of its drivers' stores.
        samples: Episodes per group.
    """

    def __init__(self, store: RunReader, samples: int) -> None:
        self._store = store
        self._samples = samples
        dropped = store.dropped_ids()
        self._statuses = {name: status for name, status in store.statuses().items() if name not in dropped}
        self._openings = store.openings()

    def finished(self, task_id: str, sample: int) -> Trajectory | None:
        """A finished episode; None if it is not finished."""
        episode_id = episode_id_of(task_id, sample)
        return self._store.trajectory(episode_id) if self._statuses.get(episode_id) == "done" else None

    def finished_group(self, task_id: str) -> list[Trajectory]:
        """The finished episodes of a group, in the order of samples."""
        episodes = (self.finished(task_id, sample) for sample in range(self._samples))
        return [trajectory for trajectory in episodes if trajectory is not None]

    def begun(self, task_id: str, sample: int) -> bool:
        """Whether an episode was begun and not finished."""
        return self._statuses.get(episode_id_of(task_id, sample)) == "running"

    def continues(self, task_id: str, sample: int) -> bool:
        """Whether an episode that was begun and not finished has sampled a turn."""
        return self.begun(task_id, sample) and bool(_generations(self._store.journal(episode_id_of(task_id, sample))))

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

    def regenerated_tokens(self, task_id: str, sample: int) -> int:
        """Tokens of an episode, finished now, that were sampled again in any launch: an upper bound.

        A turn that was due when a launch ended counts, because its generation may have been cut off; it is sampled again with the
        same seed. An episode that had to begin again, because an effect outside cannot be repeated, has earlier attempts, all of
        whose tokens count.
        """
        self._store.refresh()
        row = self._store.episode(episode_id_of(task_id, sample))
        earlier = (self._store.journal(row.id, attempt) for attempt in range(row.attempt))
        again = sum(len(generation.output_ids) for journal in earlier for generation in _generations(journal))
        journal = self._store.journal(row.id)
        first_of_launch: dict[int, JournalEntry] = {}
        for opened in self._openings:
            if opened > (row.started or 0.0):
                entry = next((entry for entry in journal if entry.at >= opened), None)
                if entry is not None:
                    first_of_launch[entry.seq] = entry
        return again + sum(len(generation.output_ids) for generation in _generations(list(first_of_launch.values())))


def _generations(journal: Sequence[JournalEntry]) -> list[Generation]:
    return [entry.record.generation for entry in journal if isinstance(entry.record, GenerationRecord)]
