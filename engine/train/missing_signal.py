"""Detects steps without a learning signal, and says why they have none."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from engine.runner.batch import ZERO_ADVANTAGE
from engine.runner.stats import RunSummary
from engine.train.loss_columns import whitened_advantages

if TYPE_CHECKING:
    from engine.runner.batch import Batch
    from engine.schemas.train import TrainSpec
    from engine.schemas.trajectory import Trajectory

STEPS = 3
"""Number of such steps in a row after which a training warns."""
_MOST = 0.9
"""Share of the replies, or of the episodes, from which one reason explains the step."""


class MissingSignal:
    """Counts the steps of this launch in which no trained token has an advantage.

    A critic's advantages are not known before the update. With one, a step has no signal if all
    episodes earned the same in each turn.
    """

    def __init__(self, train: TrainSpec) -> None:
        self._critic = train.critic is not None
        self._whitened = train.advantage_norm == "batch"
        self._steps = 0
        self._missing = 0
        self._in_a_row = 0
        self._reason = ""

    def add(self, batch: Batch) -> str | None:
        """Count a step. Returns a warning at the third one in a row without a signal, and None at all others."""
        self._steps += 1
        if self._has_signal(batch):
            self._in_a_row = 0
            return None
        self._missing += 1
        self._in_a_row += 1
        self._reason = _reason(batch)
        if self._in_a_row != STEPS:
            return None
        return f"{STEPS} steps in a row had no learning signal: {self._reason}"

    @property
    def summary(self) -> str:
        """The steps without a signal and the reason of the last one; empty if there were fewer than `STEPS`."""
        if self._missing < min(STEPS, self._steps or 1):
            return ""
        return f"{self._missing} of {self._steps} steps had no learning signal: {self._reason}"

    def _has_signal(self, batch: Batch) -> bool:
        if self._critic:
            return len({tuple(sum(turn.rewards.values()) for turn in each.turns) for each in _episodes(batch)}) > 1
        if all(group.without_signal for group in batch.used):
            return False
        if not self._whitened:
            return True
        whitened = whitened_advantages([row.advantages for row in batch.rows])
        return any(np.abs(column).max(initial=0.0) > ZERO_ADVANTAGE for column in whitened)


def _episodes(batch: Batch) -> list[Trajectory]:
    return [each for group in [*batch.used, *batch.left_out] for each in group.trajectories]


def _reason(batch: Batch) -> str:
    """Why the advantages of a batch are 0, with what to do."""
    trajectories = _episodes(batch)
    summary = RunSummary()
    for trajectory in trajectories:
        summary.add(trajectory)
    events = Counter(turn.event for trajectory in trajectories for turn in trajectory.turns)
    rewards = {trajectory.outcome.reward for trajectory in trajectories}
    replies, groups = events.total(), len(batch.used) + len(batch.left_out)
    equal = (
        f"every episode has the reward {min(rewards):.3f}"
        if len(rewards) == 1
        else f"the episodes of each of the {groups} groups have equal rewards"
    )
    if summary.causes.failures > _MOST * summary.episodes:
        return f"{summary.causes.words(summary.episodes)}; correct that first"
    if events["truncated"] > _MOST * replies:
        return (
            f"{equal}, and {events['truncated']} of {replies} replies were cut by a limit of tokens; raise "
            "`limits.turn_tokens`, or teach the model the format first (`train.kind: sft`)"
        )
    if events["malformed"] > _MOST * replies:
        return (
            f"{equal}, and {events['malformed']} of {replies} replies were malformed; check `model.tool_calls` and "
            "the prompt, or teach the model the format first (`train.kind: sft`)"
        )
    return (
        f"{equal}, so no reply is better than another; make the tasks easier or harder, let rewards differ, or raise "
        "`rollout.samples_per_task`"
    )
