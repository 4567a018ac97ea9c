"""Episodes and replies that a limit cut: which limit it was, DAPO's overlong filtering and its soft punishment."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from engine.schemas.reward import Posting
from engine.schemas.train import OVERLONG_PENALTY

if TYPE_CHECKING:
    from engine.schemas.limits import LimitsSpec
    from engine.schemas.train import OverlongPenalty
    from engine.schemas.trajectory import Trajectory
    from engine.store.export import Row


def cut_by(trajectory: Trajectory, limits: LimitsSpec) -> str | None:
    """The limit that cut an episode; None if it ended by itself.

    An episode that ended because its last reply was cut has no limit in its outcome; it was cut by `turn_tokens`, or by
    `episode_tokens` or the model's context if the reply is shorter.
    """
    outcome = trajectory.outcome
    if outcome.limit is not None or outcome.event != "truncated" or not trajectory.turns:
        return outcome.limit
    last = trajectory.turns[-1]
    if last.end - last.start >= limits.turn_tokens:
        return "turn_tokens"
    return "context" if limits.episode_tokens is None else "episode_tokens"


def cut_turns(trajectory: Trajectory) -> set[int]:
    """The turns whose reply was cut because it was too long."""
    return {turn.index for turn in trajectory.turns if turn.finish.type == "length"}


def mask_turns(row: Row, turns: Collection[int]) -> bool:
    """Exclude turns from training, in place (DAPO, arXiv 2503.14476, section 3.4). Returns whether the row still has trained tokens."""
    masked = (row["loss_mask"] == 1) & np.isin(row["turn_ids"], list(turns))
    if masked.any():
        row["loss_mask"] = np.where(masked, 0, row["loss_mask"]).astype(row["loss_mask"].dtype)
        row["advantages"] = np.where(masked, 0.0, row["advantages"]).astype(np.float32)
    return bool((row["loss_mask"] == 1).any())


def penalized(trajectory: Trajectory, penalty: OverlongPenalty, most: int) -> Trajectory:
    """Add the penalty of long replies to the rewards of their turns, as postings.

    With y the reply, L_max = `most` and L_cache = `margin` (DAPO, arXiv 2503.14476, equation 13), times `coefficient`:

        0                                          if |y| <= L_max - L_cache
        ((L_max - L_cache) - |y|) / L_cache        if L_max - L_cache < |y| <= L_max
    """
    postings = list(trajectory.postings)
    for turn in trajectory.turns:
        over = (turn.end - turn.start) - (most - penalty.margin)
        if over > 0:
            value = -penalty.coefficient * over / penalty.margin
            postings.append(
                Posting(
                    seq=len(postings),
                    turn=turn.index,
                    name=OVERLONG_PENALTY,
                    delta=value,
                    after=value,
                    at_turn=turn.index,
                    op="add",
                    cause=f"{turn.end - turn.start} of at most {most} tokens",
                    source="train.overlong",
                )
            )
    return replace(trajectory, postings=postings)
