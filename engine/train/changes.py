"""What may change when a training is resumed, and what may not.

Allowed are values that do not change what an episode or a row is: the number of steps, the learning rate and its schedule, time
limits, evaluation, checkpoints, reports, memory, and where servers are. A changed value holds from the first step that is not in
the batch log; steps that are repeated use the learning rate that they had.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import TrainError
from engine.store.header import changes_of, resumable_keys

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec

ALLOWED = (
    "train.steps",
    "train.epochs",
    "train.optimizer.lr",
    "train.optimizer.schedule",
    "train.optimizer.warmup_steps",
    "train.checkpoints.*",
    "train.memory.*",
    "train.weight_sync.*",
    "limits.*_seconds",
    "*.timeout",
    "backend.try_timeout",
    "backend.health_timeout",
    "backend.retries",
    "backend.wait",
    "backend.url",
    "backend.urls",
    "backend.launch",
    "backend.launch.*",
    "rollout.concurrency",
    "rollout.live_episodes",
    "rollout.out",
    "description",
)
"""Paths of values that a resume may change, with `resumable_keys`. `*` stands for any characters."""


def check_changes(before: EpisodeSpec, after: EpisodeSpec) -> list[str]:
    """Check that a spec differs from the one that a training began with only in values that a resume may change.

    Returns:
        The paths of the values that differ.

    Raises:
        TrainError: kind `train_setup`: other values differ; the message names them.
    """
    may_change = (*ALLOWED, *resumable_keys())
    changed, refused = changes_of(before, after, may_change)
    if refused:
        named = ", ".join(f"`{path}`" for path in refused[:8])
        raise TrainError(
            f"a resumed training cannot change {named}: its episodes and updates depend on "
            f"{'it' if len(refused) == 1 else 'them'}. Leave it out, or begin another training. What may change: "
            f"{', '.join(may_change)}",
            kind="train_setup",
        )
    return changed
