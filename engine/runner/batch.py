"""The groups that a step trains on or leaves out, and their metrics.

Invariants:
- A group is used as a whole or not at all, because its episodes are each other's baseline.
- The metrics of a batch count all of its episodes, those that are not trained on too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import TrainError
from engine.runner.summary import RunSummary, label
from engine.schemas.base import Struct

if TYPE_CHECKING:
    from engine.schemas.trajectory import Trajectory
    from engine.store.rows.row import TrainingRow

ZERO_ADVANTAGE = 1e-9
"""Advantages below this value count as 0: they are rounding errors of equal rewards."""


class Group(Struct, frozen=True, eq=False):
    """The finished episodes of one task."""

    number: int
    """Number of the group in the order of starts, from 0."""
    task_id: str
    version: int
    """Version of the weights when the group started."""
    trajectories: Sequence[Trajectory]
    rows: Sequence[TrainingRow]
    """The training rows of the group."""
    resumed: int = 0
    """Number of its episodes that continued from the journal of an earlier launch."""
    regenerated_tokens: int = 0
    """Tokens of its episodes that were sampled again because a launch had ended; see `StoredEpisodes`."""
    small: bool = False
    """Whether it has no rows because it has fewer trainable episodes than `train.min_group`."""

    @property
    def why_no_rows(self) -> str:
        """For a log, of a group without rows."""
        if self.small and any(trajectory.outcome.trainable for trajectory in self.trajectories):
            return "the group has fewer trainable episodes than `train.min_group`"
        return "no episode of the group can be trained on"

    @property
    def without_signal(self) -> bool:
        """Whether every advantage is 0, so that the group has no gradient. False before a critic has given values."""
        if any(row.credit is not None and row.credit.needs_values for row in self.rows):
            return False
        return without_signal(self.rows)


@dataclass(slots=True)
class Batch:
    """The groups collected for one step."""

    version: int
    """Version of the weights that are trained on the batch."""
    used: list[Group] = field(default_factory=list)
    """Groups to train on, in the order in which they started."""
    left_out: list[Group] = field(default_factory=list)
    """Groups without training rows, or dropped by dynamic sampling."""
    cancelled: list[int] = field(default_factory=list)
    """Numbers of the cancelled groups: stragglers, or too stale for the next batch."""
    stale: list[int] = field(default_factory=list)
    """Numbers of the groups of an earlier launch that were too stale to continue."""
    skipped: list[int] = field(default_factory=list)
    """Numbers of the draws that the filter skipped."""
    forced: int = 0
    """Number of groups that were sampled although the filter skipped every other draw."""

    @property
    def rows(self) -> list[TrainingRow]:
        """All rows to train on."""
        return [row for group in self.used for row in group.rows]

    def no_data(self, faults: Sequence[str]) -> TrainError:
        """The error of a batch in which no group has a training row.

        Args:
            faults: Episodes that the engine could not finish.
        """
        outcomes = [trajectory.outcome for group in self.left_out for trajectory in group.trajectories]
        listed = ", ".join(f"{name} {count}" for name, count in Counter(map(label, outcomes)).most_common(4))
        failures = [outcome.failure.message for outcome in outcomes if outcome.failure is not None]
        if failures:
            listed = f"{listed}; the first failure: {failures[0]}"
        if faults:
            listed = f"{listed}{'; ' if listed else ''}{len(faults)} could not be finished, for example {faults[0]}"
        if small := sum(
            any(trajectory.outcome.trainable for trajectory in group.trajectories)
            for group in self.left_out
            if group.small
        ):
            listed += f"; {small} groups have fewer trainable episodes than `train.min_group`"
        return TrainError(
            f"no episode of {len(self.left_out)} groups can be trained on: {listed or 'none was finished'}",
            kind="no_data",
        )

    def metrics(self, mix: Collection[str] = ()) -> dict[str, float]:
        """Metrics of all episodes of the batch, including those that are not trained on.

        Args:
            mix: Names of the sources of `tasks.mix`; each has its own figures.
        """
        groups = [*self.used, *self.left_out]
        summary = RunSummary(mix=mix)
        for group in groups:
            for trajectory in group.trajectories:
                summary.add(trajectory)
        episodes = max(summary.episodes, 1)
        turns = sum(count for _, count in summary.turn_rewards)
        masked = summary.episodes - summary.trainable
        metrics = {
            "reward/mean": summary.mean_reward,
            "episode/solved": summary.solved / episodes,
            "episode/turns": turns / episodes,
            "episode/tokens": summary.counts["sampled_tokens"] / episodes,
            "episodes/count": float(summary.episodes),
            "episodes/masked": float(masked),
            "groups/used": float(len(self.used)),
            "groups/equal": float(sum(group.without_signal and not group.small for group in groups)),
            "groups/small": float(sum(group.small for group in groups)),
            "groups/cancelled": float(len(self.cancelled)),
            "groups/sampled": float(len(groups)),
            "rollout/resumed_episodes": float(sum(group.resumed for group in groups)),
            "rollout/regenerated_tokens": float(sum(group.regenerated_tokens for group in groups)),
            "rollout/dropped_stale_groups": float(len(self.stale)),
        }
        metrics |= {f"reward/{name}": value / episodes for name, value in sorted(summary.names.items())}
        metrics |= {f"reward/turn/{turn}": total / count for turn, (total, count) in enumerate(summary.turn_rewards)}
        for name, sums in summary.sources.items():
            metrics |= {f"source/{name}/episodes": float(sums.episodes)}
            if sums.episodes:
                metrics |= {
                    f"source/{name}/reward": sums.reward / sums.episodes,
                    f"source/{name}/solved": sums.solved / sums.episodes,
                }
        if summary.unchecked_prompts:
            metrics["rollout/unchecked_prompts"] = float(summary.unchecked_prompts)
        metrics |= {f"outcome/{name}": count / episodes for name, count in sorted(summary.outcomes.items())}
        return metrics | self._staleness()

    def _staleness(self) -> dict[str, float]:
        behind: Counter[int] = Counter()
        for row in self.rows:
            versions = row.branch.weight_versions[row.places]
            for version, count in zip(*np.unique(versions, return_counts=True), strict=True):
                behind[self.version - int(version)] += int(count)
        tokens = behind.total()
        return {
            "staleness/mean": sum(value * count for value, count in behind.items()) / tokens if tokens else 0.0,
            "staleness/max": float(max(behind, default=0)),
            "tokens/trained": float(tokens),
        }


def without_signal(rows: Sequence[TrainingRow]) -> bool:
    """Whether every advantage is 0."""
    return not any(np.abs(row.advantages).max(initial=0.0) > ZERO_ADVANTAGE for row in rows)
