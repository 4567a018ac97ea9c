"""Builds the training rows of a group from its episodes and their sealed ledgers. Pure.

    builder = RowBuilder.of_run(store)
    rows = builder.rows(list(store.trajectories()))         # of one task

Invariants:
- The arrays of a branch are unchanged from the store. Rewards and advantages are computed from the sealed ledgers, so
  another credit method needs no new run.
- A group is the trainable finished episodes of one task; a baseline is computed from these episodes only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import LedgerError
from engine.masking import mask
from engine.rewards.credit import Member, Values, Where, credit_tokens
from engine.rewards.ledger import Ledger
from engine.schemas.base import Struct
from engine.schemas.credit import RewardsSpec
from engine.storable import stored_fields
from engine.store.rows.columns import json_text
from engine.store.rows.row import Floats, Places, RowCredit, RowEpisode, TrainingRow

if TYPE_CHECKING:
    from engine.schemas.credit import CreditSpec
    from engine.schemas.environment import Task
    from engine.schemas.trajectory import Branch, Trajectory
    from engine.store.reader import RunReader


class RowBuilder(Struct, frozen=True, kw_only=True):
    """How rows are made from finished episodes."""

    credit: CreditSpec
    placement: Where
    base: Path | None = None
    """The spec's folder, for a credit method by entry point."""
    values: Mapping[str, Sequence[Sequence[float]]] | None = None
    """A critic's values: episode id -> for each turn, one for each sampled token. None: the caller computes the credit
    that needs them, and until then advantages are 0."""
    evaluation: bool = False
    """Whether the run is an evaluation: then no row is trainable."""
    metadata: Mapping[str, Any] | None = None
    """The origin of the rows; None inside a trainer."""
    members: bool = False
    """Whether rows have `credit`, from which a trainer computes advantages again."""

    @classmethod
    def of_run(
        cls,
        store: RunReader,
        *,
        credit: CreditSpec | None = None,
        score: str | None = None,
        values: Mapping[str, Sequence[Sequence[float]]] | None = None,
    ) -> RowBuilder:
        """Return how rows are made from a run. The arguments are those of `training_rows`.

        Raises:
            StoreError: the run has no such score.
        """
        rewards = rewards_of(store, score)
        method, header = credit or rewards.credit, store.header
        metadata = {
            "spec": header.name,
            "model": (header.spec.get("model") or {}).get("path"),
            "engine_version": header.engine_version,
            "created": header.created,
            "credit": mask(json_text(method.model_dump(mode="json", by_alias=True))),
            "score": score,
        }
        return cls(
            credit=method,
            placement=rewards.placement,
            base=Path(header.spec_path).parent if header.spec_path else None,
            values=values or {},
            evaluation=header.evaluation,
            metadata=metadata,
        )

    def rows(self, group: Sequence[Trajectory], task: Task | None = None) -> list[TrainingRow]:
        """Return the training rows of the finished episodes of one task, in the order of episodes and branches.

        Raises:
            LedgerError: the credit method needs values that are missing.
        """
        members = [member_of(trajectory, (self.values or {}).get(trajectory.episode_id)) for trajectory in group]
        trained = {
            trajectory.episode_id: member
            for trajectory, member in zip(group, members, strict=True)
            if trajectory.outcome.trainable and trajectory.turns and not self.evaluation
        }
        if self.values is None and self.credit.needs_values:
            of_turns = [member.broadcast(np.zeros(member.ledger.turns)) for member in trained.values()]
        else:
            of_turns = credit_tokens(self.credit, list(trained.values()), base=self.base)
        advantages = dict(zip(trained, of_turns, strict=True))
        credit = RowCredit(members=trained, needs_values=self.credit.needs_values) if self.members else None
        return [
            row
            for trajectory, member in zip(group, members, strict=True)
            for row in self._rows_of(trajectory, member, task, advantages.get(trajectory.episode_id), credit)
        ]

    def _rows_of(
        self,
        trajectory: Trajectory,
        member: Member,
        task: Task | None,
        advantages: list[Values] | None,
        credit: RowCredit | None,
    ) -> list[TrainingRow]:
        """The rows of one episode. `advantages`: None if it is not trained on."""
        ledger = member.ledger
        episode = RowEpisode(
            run_id=trajectory.run_id,
            task_id=trajectory.task_id,
            episode_id=trajectory.episode_id,
            task_index=None if task is None else task.index,
            sample_index=trajectory.sample_index,
            seed=trajectory.seed,
            turn_rewards=np.array(ledger.totals, np.float64),
            outcome=trajectory.outcome,
            messages=trajectory.messages,
            task_fields=None if task is None else stored_fields(task.fields),
            facts=trajectory.facts,
            metadata=self.metadata,
            placement=self.placement,
            reward_parts=ledger.parts,
        )
        unchecked = Counter(turn.branch for turn in trajectory.turns if turn.prompt_unchecked)
        rows = []
        for branch in trajectory.branches:
            places = np.flatnonzero(branch.loss_mask == 1)
            trainable = advantages is not None and len(places) > 0
            rows.append(
                TrainingRow(
                    episode=episode,
                    branch=branch,
                    places=places,
                    trainable=trainable,
                    advantages=_of_places(branch, places, advantages or []) if trainable else np.zeros(0, np.float32),
                    unchecked_prompts=unchecked[branch.index],
                    credit=credit,
                )
            )
        return rows


def _of_places(branch: Branch, places: Places, advantages: Sequence[Values]) -> Floats:
    """Each turn's advantages on its sampled tokens, in order. float32 [n]."""
    of_places = np.zeros(len(places), np.float32)
    turn_ids = branch.turn_ids[places]
    for turn in np.unique(turn_ids):
        of_places[turn_ids == turn] = advantages[turn]
    return of_places


def member_of(trajectory: Trajectory, values: Sequence[Sequence[float]] | None = None) -> Member:
    """Convert a finished episode to a member of its group.

    Raises:
        LedgerError: in some turn the number of values differs from the number of sampled tokens.
    """
    turns = trajectory.turns
    sizes = [turn.end - turn.start for turn in turns]
    if values is not None and [len(of_turn) for of_turn in values] != sizes:
        raise LedgerError(
            f"{trajectory.episode_id}: values for turns of {[len(of_turn) for of_turn in values]} tokens; they have "
            f"{sizes}"
        )
    return Member(
        ledger=Ledger.of(trajectory.postings).seal(len(turns)),
        state_keys=[turn.state_key for turn in turns],
        values=None if values is None else np.array([value for of_turn in values for value in of_turn], np.float64),
        ends=list(accumulate(sizes)),
    )


def rewards_of(store: RunReader, score: str | None = None) -> RewardsSpec:
    """Return the rewards of the run's spec, or of the spec that it was scored with under this label."""
    return RewardsSpec.model_validate(store.score(score).rewards if score else store.header.rewards)
