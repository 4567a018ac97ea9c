"""Drops stored episodes while a training runs: only after a checkpoint, and only what no resume from a kept checkpoint
needs.

Each group is dropped whole or not at all. What cannot be dropped is tried again after the next checkpoint, and by
`engine compact`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from engine.errors import StoreError
from engine.plugins.retention.command import disk_lines
from engine.plugins.retention.compact import compact_training, plan_of
from engine.plugins.retention.spec import KeepSpec
from engine.runner.observers import TrainingObserver

if TYPE_CHECKING:
    from engine.plugins.retention.compact import Compacted
    from engine.schemas.episode import EpisodeSpec
    from engine.spec.load import LoadedSpec
    from engine.store.store import RunStore

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class CompactedTraining(TrainingObserver):
    """Drops the episodes of the training in a folder that `rollout.keep` does not keep."""

    folder: Path
    spec: EpisodeSpec
    keep: KeepSpec
    dropped_until: int | None = None
    """Groups of steps up to this one were dropped in this launch already."""
    _store: RunStore = field(init=False)
    _disk: Compacted | None = None

    def opened(self, store: RunStore) -> None:
        """See `TrainingObserver`."""
        self._store = store

    async def checkpointed(self, timed: Callable[[str], AbstractContextManager[None]]) -> Mapping[str, float]:
        """Drop episodes. Returns the size of the store."""
        before, episodes = self._store.space(), 0
        try:
            with timed("compact"):
                plan = await asyncio.to_thread(plan_of, self.folder, self.spec, self.keep, after=self.dropped_until)
                for group in plan.groups:
                    episodes += len(await self._store.drop(group, keep_failed=self.keep.failures) or ())
            self.dropped_until = plan.until
        except StoreError as error:
            log.warning("episodes could not be dropped", reason=str(error))
        after = self._store.space()
        return {
            "store/dropped_episodes": float(episodes),
            "store/bytes_before": float(before.used),
            "store/bytes": float(after.used),
            "store/file_bytes": float(after.file),
        }

    async def ended(self, step: int, metrics: Mapping[str, float]) -> None:
        """Drop the rest, and shrink the file."""
        try:
            _, self._disk = await asyncio.to_thread(compact_training, self.folder, self.spec, self.keep)
        except StoreError as error:
            log.warning("the run store could not be compacted; `engine compact` does it later", reason=str(error))

    def close(self) -> str | None:
        """Return what a compaction did."""
        return None if self._disk is None else "\n".join(disk_lines(self._disk))


def observe(loaded: LoadedSpec, folder: Path) -> CompactedTraining | None:
    """The hook `observe_training`."""
    spec = loaded.spec
    keep = KeepSpec.section_of(spec.rollout)
    if keep is None or spec.train is None or not spec.train.samples_episodes:
        return None
    return CompactedTraining(folder, spec, keep)
