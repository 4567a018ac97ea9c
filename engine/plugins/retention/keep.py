"""Which stored episodes a training drops: `rollout.keep`.

Invariants:
- Groups are kept or dropped whole, because the advantages of an episode are computed from its group.
- A group is dropped only if the batch log says that it was consumed, in a step that no resume repeats: none after the
  oldest of the newest `checkpoints.keep` checkpoints. So a resume from any of these checkpoints finds each episode that
  it needs.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from engine.plugins.retention.compact import Compacted, compact, measure_groups
from engine.store.store import episode_id_of
from engine.store.training import ROLLOUTS
from engine.train.batch_log import BatchLog
from engine.train.checkpoint import checkpoints_of, step_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.plugins.retention.spec import KeepSpec
    from engine.schemas.episode import EpisodeSpec
    from engine.train.batch_log import BatchRecord


@dataclass(slots=True)
class DropPlan:
    """The groups of a training that may be dropped, and why the others stay."""

    groups: list[list[str]] = field(default_factory=list)
    """Ids of the episodes of each group, oldest first. Of these, `keep.failures` keeps groups with a failed episode."""
    until: int = 0
    """The newest step of which groups are dropped."""
    repeated: int = 0
    """The steps after this one are repeated by a resume from the oldest checkpoint that counts; 0 without a
    checkpoint."""
    stay: Counter[str] = field(default_factory=Counter)
    """Number of consumed groups that stay, by the reason."""


def plan(
    records: Sequence[BatchRecord], keep: KeepSpec, *, repeated: int, samples: int, after: int | None = None
) -> DropPlan:
    """Choose the groups to drop.

    Args:
        records: All records of the batch log.
        keep: What stays.
        repeated: The steps after this one may be repeated by a resume.
        samples: Episodes per group.
        after: Consider only the records of steps after this one; None: all.
    """
    newest = max((record.step for record in records), default=0)
    dropped = DropPlan(until=max(0, min(repeated, newest - keep.steps)), repeated=repeated)
    for record in records:
        if after is not None and record.step <= after:
            continue
        used = set(record.used)
        for number, task_id in record.tasks.items():
            if record.step > repeated:
                dropped.stay["a resume repeats their step"] += 1
            elif record.step > dropped.until:
                dropped.stay[f"they are of the last {keep.steps} steps"] += 1
            elif keep.trained and int(number) in used:
                dropped.stay["they trained"] += 1
            elif in_sample(task_id, keep.sample):
                dropped.stay["they are in the sample"] += 1
            else:
                dropped.groups.append([episode_id_of(task_id, sample) for sample in range(samples)])
    return dropped


def in_sample(task_id: str, fraction: float) -> bool:
    """Whether a group is in the sample. It depends on its task and epoch only, so each compaction keeps the same
    groups."""
    digest = hashlib.sha256(task_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def plan_of(folder: Path, spec: EpisodeSpec, keep: KeepSpec, *, after: int | None = None) -> DropPlan:
    """Choose the groups of a training to drop, from its batch log and its checkpoints. Nothing is written.

    Raises:
        StoreError: the batch log is damaged.
    """
    assert spec.train is not None
    steps = sorted(step_of(path) for path in checkpoints_of(folder))
    repeated = min(steps[-spec.train.checkpoints.keep :], default=0)
    records = BatchLog(folder).read()
    return plan(records, keep, repeated=repeated, samples=spec.rollout.samples_per_task, after=after)


def compact_training(
    folder: Path, spec: EpisodeSpec, keep: KeepSpec, *, dry_run: bool = False
) -> tuple[DropPlan, Compacted]:
    """Drop the stored episodes of a training that nobody trains, and shrink its file.

    Args:
        folder: The training's folder.
        spec: Its spec.
        keep: What stays.
        dry_run: Write nothing, and return what would be dropped.

    Raises:
        StoreError: the training is running, or its store cannot be read or written.
        StoreError: the batch log is damaged.
    """
    dropped = plan_of(folder, spec, keep)
    work = measure_groups if dry_run else compact
    return dropped, work(folder / ROLLOUTS, dropped.groups, keep_failed=keep.failures)
