"""The training rows of groups, with the bonuses and the treatment of cut replies that the spec asks for.

Invariant: a row is trained on only if all of its token ids are known and its episode is `trainable`: no fault of an
environment, tool, user or backend ended it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from engine.errors import TrainError
from engine.runner.batch import Group
from engine.schemas.reward import Posting
from engine.schemas.train import OVERLONG_PENALTY, OverlongPenalty
from engine.spec.code.entry import load_entry
from engine.store.rows.build import RowBuilder
from engine.store.rows.row import columns_of

if TYPE_CHECKING:
    from pathlib import Path

    from engine.runner.groups import GroupRequest
    from engine.schemas.episode import EpisodeSpec
    from engine.schemas.limits import LimitsSpec
    from engine.schemas.train import BonusSpec, TrainSpec
    from engine.schemas.trajectory import Trajectory, Turn
    from engine.store.rows.columns import Columns
    from engine.store.rows.row import TrainingRow


class GroupBuilder:
    """Builds groups and their training rows, with the credit, the bonuses and the treatment of cut replies of the spec.

    If the credit needs a critic's values, or there are KL penalties in the reward, rows have the `credit` that
    `credited_columns` reads. Advantages are then without penalties; without values they hold the bonuses only.

    Raises:
        EntryError: a bonus function cannot be imported.
    """

    def __init__(self, spec: EpisodeSpec, train: TrainSpec, base: Path | None) -> None:
        credit = spec.rewards.credit
        self._builder = RowBuilder(
            credit=credit,
            placement=spec.rewards.placement,
            base=base,
            members=credit.needs_values or train.kl.in_reward,
        )
        self._train = train
        self._limits = spec.limits
        self._most = most_reply_tokens(spec)
        self._bootstrap = train.critic.bootstraps if train.critic is not None else frozenset()
        self._bonuses: list[tuple[BonusSpec, Callable[..., Any]]] = [
            (bonus, load_entry(bonus.use, base)) for bonus in train.advantage_bonuses
        ]

    def group(self, request: GroupRequest, trajectories: Sequence[Trajectory]) -> Group:
        """Make a group of its finished episodes. It has no rows if too few of them are trainable (`train.min_group`).

        Raises:
            LedgerError: as in `rows`.
            TrainError: as in `rows`.
        """
        small = self.is_small(trajectories, request.samples)
        return Group(
            number=request.number,
            task_id=request.task.id,
            version=request.version,
            trajectories=trajectories,
            rows=[] if small else self.rows(trajectories),
            small=small,
        )

    def is_small(self, trajectories: Sequence[Trajectory], samples: int) -> bool:
        """Whether a group of `samples` episodes has fewer trainable ones than credit needs (`train.min_group`)."""
        trainable = sum(trajectory.outcome.trainable and bool(trajectory.turns) for trajectory in trajectories)
        return trainable < self._train.smallest_group(self._builder.credit, samples)

    def rows(self, trajectories: Sequence[Trajectory]) -> list[TrainingRow]:
        """Build the training rows of a group, however small it is; bonuses are added to the advantages of trained
        tokens.

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
            cut = {  # the branch of the last turn, where a limit of `train.critic.bootstrap` cut the episode after it
                trajectory.episode_id: trajectory.turns[-1].branch
                for trajectory in trajectories
                if cut_by(trajectory, self._limits, self._most) in self._bootstrap
            }
            rows = [
                replace(
                    row,
                    credit=row.credit and replace(row.credit, cut=cut.get(row.episode.episode_id) == row.branch.index),
                )
                for row in rows
            ]
        for bonus, function in self._bonuses:
            rows = [
                _with_bonus(row, columns, bonus, function) for row, columns in zip(rows, columns_of(rows), strict=True)
            ]
        return rows


def _with_bonus(row: TrainingRow, columns: Columns, bonus: BonusSpec, function: Callable[..., Any]) -> TrainingRow:
    """The row with a bonus of each trained token in its advantages, and in its credit if that is computed again.

    The function gets the row's columns (docs/rows.md).
    """
    values = np.asarray(function(columns, **bonus.with_), np.float32)
    if values.shape != row.branch.input_ids.shape or not np.isfinite(values).all():
        raise TrainError(
            f"the bonus {bonus.use} returned shape {values.shape} for {row.episode.episode_id}; "
            f"it must return one finite number for each of the row's {len(row.branch.input_ids)} tokens",
            kind="train_setup",
        )
    values, credit = (bonus.coefficient * values[row.places]).astype(np.float32), row.credit
    if credit is not None:
        credit = replace(credit, bonuses=values if credit.bonuses is None else credit.bonuses + values)
    return replace(row, advantages=row.advantages + values, credit=credit)


def cut_by(trajectory: Trajectory, limits: LimitsSpec, most: int) -> str | None:
    """The limit that cut an episode; None if it ended by itself.

    An episode that ended because its last reply was cut has no limit in its outcome: it is that of the reply. `most`:
    tokens of a reply.
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
