"""Batches: the groups that a step trains on, their training rows and their metrics.

Invariants:
- A group is used as a whole or not at all, because its episodes are each other's baseline.
- A row is trained on only if all of its token ids are known and its episode is `trainable`: no fault of an environment, tool,
  user or backend ended it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import TrainError
from engine.runner.stats import RunSummary, label
from engine.schemas.base import Struct
from engine.schemas.train import OverlongPenalty
from engine.store.rows.build import RowBuilder
from engine.store.rows.row import columns_of
from engine.train.loss_columns import ZERO_ADVANTAGE
from engine.train.overlong import cut_by, cut_turns, mask_turns, most_reply_tokens, penalized

if TYPE_CHECKING:
    from pathlib import Path

    from engine.schemas.episode import EpisodeSpec
    from engine.schemas.train import BonusSpec, TrainSpec
    from engine.schemas.trajectory import Trajectory
    from engine.store.rows.columns import Columns
    from engine.store.rows.row import Floats, TrainingRow


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
    """Tokens of its episodes that were sampled again because a launch of the training had ended; see `stored_groups.py`."""
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
        """Whether every advantage is 0, so that the group has no gradient. Unknown, and so false, before a critic has given values."""
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
    """Numbers of the draws that the difficulty filter skipped."""
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


class GroupBuilder:
    """Builds groups and their training rows, with the credit, the bonuses and the treatment of cut replies of the spec.

    If the credit needs a critic's values, or there are KL penalties in the reward, rows have the `credit` that `credited_columns`
    reads. Advantages are then without penalties; without values they hold the bonuses only.

    Raises:
        EntryError: a bonus function cannot be imported.
    """

    def __init__(self, spec: EpisodeSpec, train: TrainSpec, base: Path | None) -> None:
        credit = spec.rewards.credit
        members = credit.needs_values or train.kl.in_reward
        self._builder = RowBuilder(credit=credit, placement=spec.rewards.placement, base=base, members=members)
        self._train = train
        self._limits = spec.limits
        self._most = most_reply_tokens(spec)
        self._bootstrap = frozenset(train.critic.bootstrap) if train.critic is not None else frozenset()
        self._bonuses = [(bonus, _entry(bonus, base)) for bonus in train.advantage_bonuses]

    def group(
        self,
        number: int,
        task_id: str,
        version: int,
        trajectories: Sequence[Trajectory],
        *,
        samples: int,
        resumed: int = 0,
        regenerated_tokens: int = 0,
    ) -> Group:
        """Make a group of finished episodes. It has no rows if too few of them are trainable (`train.min_group`).

        Args:
            samples: Episodes that the group was to have. The other arguments are the fields of `Group`.

        Raises:
            LedgerError: as in `rows`.
            TrainError: as in `rows`.
        """
        small = self.is_small(trajectories, samples)
        rows = [] if small else self.rows(trajectories)
        return Group(number, task_id, version, trajectories, rows, resumed, regenerated_tokens, small)

    def is_small(self, trajectories: Sequence[Trajectory], samples: int) -> bool:
        """Whether a group of `samples` episodes has fewer trainable ones than credit needs (`train.min_group`)."""
        trainable = sum(trajectory.outcome.trainable and bool(trajectory.turns) for trajectory in trajectories)
        return trainable < self._train.smallest_group(self._builder.credit, samples)

    def rows(self, trajectories: Sequence[Trajectory]) -> list[TrainingRow]:
        """Build the training rows of a group, however small it is; bonuses are added to the advantages of trained tokens.

        Raises:
            LedgerError: the credit method cannot be computed.
            TrainError: kind `train_setup`: a bonus function did not return one finite number per token.
        """
        overlong = self._train.overlong
        if isinstance(overlong, OverlongPenalty):
            trajectories = [penalized(trajectory, overlong, self._most) for trajectory in trajectories]
        rows = [row for row in self._builder.rows(trajectories) if row.trainable]
        if overlong == "mask":
            turns = {trajectory.episode_id: cut_turns(trajectory) for trajectory in trajectories}
            masked = (mask_turns(row, turns[row.episode.episode_id]) for row in rows)
            rows = [row for row in masked if len(row.places)]
        if self._builder.credit.needs_values:
            last = {trajectory.episode_id: self._last_branch(trajectory) for trajectory in trajectories}
            rows = [_with_cut(row, last[row.episode.episode_id] == row.branch.index) for row in rows]
        for bonus, function in self._bonuses:
            rows = [
                _with_bonus(row, _bonus(bonus, function, row, columns))
                for row, columns in zip(rows, columns_of(rows), strict=True)
            ]
        return rows

    def _last_branch(self, trajectory: Trajectory) -> int | None:
        """The branch of the last turn, if a limit of `train.critic.bootstrap` cut the episode after it."""
        return trajectory.turns[-1].branch if cut_by(trajectory, self._limits, self._most) in self._bootstrap else None


def _with_cut(row: TrainingRow, cut: bool) -> TrainingRow:
    return replace(row, credit=row.credit and replace(row.credit, cut=cut))


def _with_bonus(row: TrainingRow, values: Floats) -> TrainingRow:
    """The row with a bonus in its advantages, and in its credit if that is computed again."""
    credit = row.credit
    if credit is not None:
        credit = replace(credit, bonuses=values if credit.bonuses is None else credit.bonuses + values)
    return replace(row, advantages=row.advantages + values, credit=credit)


def _entry(bonus: BonusSpec, base: Path | None) -> Callable[..., Any]:
    from engine.spec.code.entry import load_entry

    function: Callable[..., Any] = load_entry(bonus.use, base)
    return function


def _bonus(bonus: BonusSpec, function: Callable[..., Any], row: TrainingRow, columns: Columns) -> Floats:
    """The bonus of each trained token, float32 [n]. The function gets the row's columns (docs/rows.md)."""
    values = np.asarray(function(columns, **bonus.with_), np.float32)
    if values.shape != row.branch.input_ids.shape or not np.isfinite(values).all():
        raise TrainError(
            f"the bonus {bonus.use} returned shape {values.shape} for {row.episode.episode_id}; "
            f"it must return one finite number for each of the row's {len(row.branch.input_ids)} tokens",
            kind="train_setup",
        )
    return (bonus.coefficient * values[row.places]).astype(np.float32)


def without_signal(rows: Sequence[TrainingRow]) -> bool:
    """Whether every advantage is 0."""
    return not any(np.abs(row.advantages).max(initial=0.0) > ZERO_ADVANTAGE for row in rows)
