"""Episodes and replies that a limit cut: which limit it was, DAPO's overlong filtering and its soft punishment."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from engine.schemas.reward import Posting
from engine.schemas.train import OVERLONG_PENALTY

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec
    from engine.schemas.limits import LimitsSpec
    from engine.schemas.train import OverlongPenalty
    from engine.schemas.trajectory import Trajectory, Turn
    from engine.store.rows.row import TrainingRow


def cut_by(trajectory: Trajectory, limits: LimitsSpec, most: int) -> str | None:
    """The limit that cut an episode; None if it ended by itself.

    An episode that ended because its last reply was cut has no limit in its outcome: it is that of the reply. `most`: tokens of a reply.
    """
    outcome = trajectory.outcome
    if outcome.limit is not None or outcome.event != "truncated" or not trajectory.turns:
        return outcome.limit
    return _cut_reply(trajectory.turns[-1], limits, most)


def _cut_reply(turn: Turn, limits: LimitsSpec, most: int) -> str:
    """The limit that cut a reply: `turn_tokens`, or if it is shorter `episode_tokens` or the model's context."""
    if turn.end - turn.start >= most:
        return "turn_tokens"
    return "context" if limits.episode_tokens is None else "episode_tokens"


def most_reply_tokens(spec: EpisodeSpec) -> int:
    """The largest number of tokens of a reply."""
    return min(spec.limits.turn_tokens, spec.sampling.max_new_tokens or spec.limits.turn_tokens)


def masked_metrics(spec: EpisodeSpec, trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """With `overlong: mask`, the replies that it masks by the limit that cut them, and their episodes; else nothing."""
    if spec.train is None or spec.train.overlong != "mask":
        return {}
    most, episodes = most_reply_tokens(spec), 0
    limits = ("turn_tokens", "context" if spec.limits.episode_tokens is None else "episode_tokens")
    counts = dict.fromkeys(limits, 0)
    for trajectory in trajectories:
        cut = cut_turns(trajectory)
        episodes += bool(cut)
        for turn in trajectory.turns:
            if turn.index in cut:
                counts[_cut_reply(turn, spec.limits, most)] += 1
    return {"overlong/episodes": float(episodes)} | {f"overlong/{name}": float(count) for name, count in counts.items()}


def cut_turns(trajectory: Trajectory) -> set[int]:
    """The turns whose reply was cut because it was too long."""
    return {turn.index for turn in trajectory.turns if turn.finish.type == "length"}


def mask_turns(row: TrainingRow, turns: Collection[int]) -> TrainingRow:
    """The row without turns among its places (DAPO, arXiv 2503.14476, section 3.4); its arrays stay."""
    trained = ~np.isin(row.branch.turn_ids[row.places], list(turns))
    return replace(row, places=row.places[trained], advantages=row.advantages[trained])


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
