"""What a step trains on: the rows of whole groups, and what may not train left out.

Invariants:
- A group is used whole or not at all: its episodes are each other's baseline.
- A row trains only if every id is known and the episode's end is the policy's own doing (`trainable`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import TrainError
from engine.runner.stats import Summary
from engine.store.export import Plan, Row, group_rows

if TYPE_CHECKING:
    from pathlib import Path

    from engine.schemas.episode import EpisodeSpec
    from engine.schemas.train import BonusSpec, TrainSpec
    from engine.schemas.trajectory import Trajectory

ZERO_ADVANTAGE = 1e-9
"""An advantage below this is rounding noise of equal rewards."""


@dataclass(frozen=True, slots=True)
class Group:
    """The finished episodes of one task."""

    number: int
    """When it was begun: groups are counted from 0."""
    task_id: str
    version: int
    """The newest weights when it was begun."""
    trajectories: Sequence[Trajectory]
    rows: Sequence[Row]
    """Those that may train."""

    @property
    def without_signal(self) -> bool:
        """No turn has an advantage: there is nothing to learn from it."""
        return not any(np.abs(row["advantages"]).max(initial=0.0) > ZERO_ADVANTAGE for row in self.rows)


@dataclass(slots=True)
class Batch:
    """What one step has collected."""

    version: int
    """Of the weights that learn from it."""
    used: list[Group] = field(default_factory=list)
    """To be trained on, in the order in which they were begun."""
    left_out: list[Group] = field(default_factory=list)
    """Nothing to learn from."""
    cancelled: int = 0
    """Groups that were given up: stragglers, or too stale."""

    @property
    def rows(self) -> list[Row]:
        """Every row to be trained on."""
        return [row for group in self.used for row in group.rows]

    def metrics(self) -> dict[str, float]:
        """What the episodes show, those left out of training included."""
        groups = [*self.used, *self.left_out]
        summary = Summary()
        for group in groups:
            for trajectory in group.trajectories:
                summary.add(trajectory)
        episodes = max(summary.episodes, 1)
        turns = sum(count for _, count in summary.turn_rewards)
        masked = summary.episodes - summary.trainable
        told = {
            "reward/mean": summary.mean_reward,
            "episode/solved": summary.solved / episodes,
            "episode/turns": turns / episodes,
            "episode/tokens": summary.counts["sampled_tokens"] / episodes,
            "episodes/count": float(summary.episodes),
            "episodes/masked": float(masked),
            "groups/used": float(len(self.used)),
            "groups/equal": float(len(self.left_out)),
            "groups/cancelled": float(self.cancelled),
        }
        told |= {f"reward/{name}": value / episodes for name, value in sorted(summary.names.items())}
        told |= {f"reward/turn/{turn}": total / count for turn, (total, count) in enumerate(summary.turn_rewards)}
        told |= {f"outcome/{name}": count / episodes for name, count in sorted(summary.outcomes.items())}
        return told | self._staleness()

    def _staleness(self) -> dict[str, float]:
        behind: Counter[int] = Counter()
        for row in self.rows:
            versions = row["weight_versions"][row["loss_mask"] == 1]
            for version, count in zip(*np.unique(versions, return_counts=True), strict=True):
                behind[self.version - int(version)] += int(count)
        tokens = behind.total()
        return {
            "staleness/mean": sum(value * count for value, count in behind.items()) / tokens if tokens else 0.0,
            "staleness/max": float(max(behind, default=0)),
            "tokens/trained": float(tokens),
        }


class RowBuilder:
    """Trajectories of one group -> its rows, with the spec's credit and its bonuses.

    Raises:
        EntryError: a bonus cannot be had.
    """

    def __init__(self, spec: EpisodeSpec, train: TrainSpec, base: Path | None) -> None:
        self._plan = Plan(spec.rewards.credit, spec.rewards.placement, base, {}, None, False)
        self._bonuses = [(bonus, _entry(bonus, base)) for bonus in train.advantage_bonuses]

    def rows(self, trajectories: Sequence[Trajectory]) -> list[Row]:
        """The rows that may train, advantages and bonuses on their sampled tokens.

        Raises:
            LedgerError: the credit method cannot be carried out.
            TrainError: a bonus answers something that is no number for each token.
        """
        rows = list(group_rows(trajectories, self._plan, trainable_only=True))
        for bonus, function in self._bonuses:
            for row in rows:
                row["advantages"] = row["advantages"] + _bonus(bonus, function, row)
        return rows


def _entry(bonus: BonusSpec, base: Path | None) -> Callable[..., Any]:
    from engine.spec.entry import load_entry

    function: Callable[..., Any] = load_entry(bonus.use, base)
    return function


def _bonus(bonus: BonusSpec, function: Callable[..., Any], row: Row) -> np.ndarray:
    """The bonus of each sampled token, 0.0 on the others. float32 [tokens]."""
    given = np.asarray(function(row, **bonus.with_), np.float32)
    if given.shape != row["input_ids"].shape or not np.isfinite(given).all():
        raise TrainError(
            f"the bonus {bonus.use} answered shape {given.shape} for {row['episode_id']}; "
            f"it must be one finite number for each of the row's {len(row['input_ids'])} tokens",
            kind="train_setup",
        )
    return np.where(row["loss_mask"] == 1, bonus.coefficient * given, 0.0).astype(np.float32)


def whitened_advantages(rows: Sequence[Row]) -> list[np.ndarray]:
    """Advantages brought to mean 0 and standard deviation 1 over a batch's sampled tokens.

    REINFORCE++ (arXiv 2501.03262, section 3.2). Where all are alike, only the mean is taken off.

    Returns:
        For each row, float32 [tokens]; 0.0 where nothing was sampled.
    """
    masks = [row["loss_mask"] == 1 for row in rows]
    if not any(mask.any() for mask in masks):
        return [np.zeros(len(mask), np.float32) for mask in masks]
    flat = np.concatenate([row["advantages"][mask] for row, mask in zip(rows, masks, strict=True)]).astype(np.float64)
    mean, spread = flat.mean(), flat.std()
    scale = 1.0 / spread if spread > ZERO_ADVANTAGE else 1.0
    return [
        np.where(mask, (row["advantages"] - mean) * scale, 0.0).astype(np.float32)
        for row, mask in zip(rows, masks, strict=True)
    ]


def mean_metrics(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over those that have it; the greatest of those that are named `…max`."""
    names = dict.fromkeys(name for each in metrics for name in each)
    found = {name: [each[name] for each in metrics if name in each] for name in names}
    return {name: max(values) if name.endswith("max") else sum(values) / len(values) for name, values in found.items()}
