"""Rows whose credit is computed in the trainer, with a critic's values or with KL penalties: advantages, and the
targets of the values.

Invariant: the columns depend on rows, values, penalties and the credit method alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from engine.errors import TrainError
from engine.rewards.credit import Values, credit_tokens
from engine.train.auxiliary import AuxiliaryObjective
from engine.train.loss_columns import LossColumns
from engine.train.ratios import LEAST_LOGPROB

if TYPE_CHECKING:
    from engine.rewards.credit import Member
    from engine.schemas.credit import CreditMethod
    from engine.store.rows.row import Floats, RowCredit, TrainingRow
    from engine.train.learner import Learner

PENALTIES = "penalties"
"""Column of what each trained token pays, float64 [n], where the credit is computed again with values as well."""


def with_last_state(row: TrainingRow) -> TrainingRow:
    """The row, and for a row that was cut one more place, after its last token: the value before it is that of the last
    state."""
    if row.credit is None or not row.credit.cut:
        return row
    return replace(row, places=np.append(row.places, len(row.branch.input_ids)))


def credited_columns(
    rows: Sequence[TrainingRow],
    credit: CreditMethod,
    *,
    values: Sequence[Values | Floats] | None = None,
    penalties: Sequence[Values] | None = None,
    by_turn: bool = False,
    targets: CreditMethod | None = None,
) -> list[LossColumns]:
    """Compute the credit of rows from the ledgers of their groups, over all rows of an episode in the order of its
    turns.

    Args:
        rows: Rows of whole groups, with `credit`.
        credit: The method. With `needs_values` there must be values.
        values: For each row of `with_last_state`, the critic's value before each trained token, [tokens].
        penalties: For each row, what is subtracted from the reward of each trained token.
        by_turn: The value before the first token of a turn is that of all its tokens.
        targets: The method that computes the targets. Default: `credit`.

    Returns:
        The columns of the rows: advantages are the credit plus the bonuses. With values also the extra columns
        `values`, `returns` and `has_value`. The target of a value is the advantage plus the value; if the method reads
        one value for each turn, the turn's advantage plus that value, for all tokens of the turn. Advantages and
        targets count the penalties.

    Raises:
        LedgerError: the credit method failed.
    """
    groups: dict[str, dict[str, list[int]]] = {}
    for index, row in enumerate(rows):
        group = groups.setdefault(next(iter(_credit(row).members)), {})  # no other group has its first episode
        group.setdefault(row.episode.episode_id, []).append(index)
    columns: dict[int, LossColumns] = {}
    for group in groups.values():
        present = {
            episode: _member(
                [rows[i] for i in indices],
                None if values is None else [values[i] for i in indices],
                None if penalties is None else [penalties[i] for i in indices],
                by_turn,
            )
            for episode, indices in group.items()
        }
        members = {
            episode: present.get(episode, member)
            for episode, member in _credit(rows[next(iter(group.values()))[0]]).members.items()
            if episode in present or not credit.needs_values  # a token outside the batch has no value
        }
        advantages = credit_tokens(credit, list(members.values()))
        plain = advantages
        if values is not None and (targets is not None or any(member.ledger.parts for member in members.values())):
            # a value counts all rewards, whichever tokens they are for
            without_parts = [replace(member, ledger=replace(member.ledger, parts=())) for member in members.values()]
            plain = credit_tokens(targets or credit, without_parts)
        for episode, of_turns, of_values in zip(members, advantages, plain, strict=True):
            if episode in present:
                indices = group[episode]
                of_rows = _columns([rows[i] for i in indices], present[episode], of_turns, of_values, credit, by_turn)
                columns |= zip(indices, of_rows, strict=True)
    return [columns[index] for index in range(len(rows))]


def _credit(row: TrainingRow) -> RowCredit:
    assert row.credit is not None  # a trainer that computes credit has them made
    return row.credit


def _member(
    rows: Sequence[TrainingRow],
    values: Sequence[Values | Floats] | None,
    penalties: Sequence[Values] | None,
    by_turn: bool,
) -> Member:
    """The member of one episode with the values and penalties of all of its rows. A turn is sampled in one row."""
    member = _credit(rows[0]).members[rows[0].episode.episode_id]
    sizes = np.zeros(member.ledger.turns, np.int64)
    for row in rows:
        sizes += np.bincount(row.branch.turn_ids[row.places], minlength=len(sizes))
    member = replace(member, ends=np.cumsum(sizes).tolist(), values=None, after=0.0, penalties=None)
    if penalties is not None:
        member = replace(member, penalties=np.concatenate([np.zeros(0), *_by_turns(rows, penalties, len(sizes))]))
    if values is None:
        return member
    of_turns = [
        np.full(len(of_turn), of_turn[0]) if by_turn and len(of_turn) else of_turn
        for of_turn in _by_turns(rows, values, len(sizes))
    ]
    last_states = (float(of_row[-1]) for row, of_row in zip(rows, values, strict=True) if _credit(row).cut)
    return replace(member, values=np.concatenate([np.zeros(0), *of_turns]), after=next(last_states, 0.0))


def _by_turns(rows: Sequence[TrainingRow], numbers: Sequence[Values | Floats], turns: int) -> list[Values]:
    """Numbers of the trained tokens of each row, as float64 [trained tokens] for each turn."""
    by_turn = [np.zeros(0)] * turns
    for row, of_row in zip(rows, numbers, strict=True):
        turn_ids = row.branch.turn_ids[row.places]
        for turn in np.unique(turn_ids):
            by_turn[turn] = np.asarray(of_row[: len(turn_ids)][turn_ids == turn], np.float64)
    return by_turn


def _columns(
    rows: Sequence[TrainingRow],
    member: Member,
    advantages: Sequence[Values],
    plain: Sequence[Values],
    credit: CreditMethod,
    by_turn: bool,
) -> Iterator[LossColumns]:
    """The columns of an episode's rows. `plain`: the advantages if no reward were addressed to a part of a turn."""
    slices = member.slices()
    for row in rows:
        turn_ids = row.branch.turn_ids[row.places]
        of_row, values, returns, has_value = (np.zeros(len(turn_ids)) for _ in range(4))
        for turn in np.unique(turn_ids):
            here = np.flatnonzero(turn_ids == turn)
            of_row[here] = advantages[turn]
            if member.values is not None:
                values[here] = of_turn = member.values[slices[turn]]
                returns[here] = plain[turn] + (of_turn[0] if credit.value_level == "turn" else of_turn)
                has_value[here[:1] if by_turn else here] = 1.0
        bonuses = _credit(row).bonuses
        placed = np.zeros(len(turn_ids), np.float32) if bonuses is None else bonuses
        extra = {} if member.values is None else {"values": values, "returns": returns, "has_value": has_value}
        yield LossColumns(row=row, advantages=(placed + of_row).astype(np.float32), extra=extra)


class RewardKl(AuxiliaryObjective):
    """The objective of `train.kl.in: reward`, before all others: adds the penalties, and computes advantages again with
    them, unless the credit waits for values as well.

    Raises:
        TrainError: kind `train_setup`: the credit method takes no penalties.
    """

    def __init__(self, coefficient: float, credit: CreditMethod | None) -> None:
        if credit is None or not credit.takes_penalties:
            raise TrainError(
                "`train.kl.in: reward`: the credit method takes no penalties of tokens; use `train.kl.in: loss`, or a "
                "credit method of the engine",
                kind="train_setup",
            )
        self._coefficient = coefficient
        self._credit = credit

    def columns(
        self, columns: Sequence[LossColumns], learner: Learner, step: int
    ) -> tuple[Sequence[LossColumns], Mapping[str, float]]:
        """See `AuxiliaryObjective`. The metric is the mean of k1 over trained tokens."""
        policy = learner.per_token(columns, lambda pack: learner.policy.forward(pack, entropy=False)[0])
        reference = learner.per_token(columns, learner.policy.reference)
        k1 = [
            np.maximum(a, LEAST_LOGPROB) - np.maximum(b, LEAST_LOGPROB) for a, b in zip(policy, reference, strict=True)
        ]
        penalties = [self._coefficient * of_row.astype(np.float64) for of_row in k1]
        metrics = {"policy/kl_ref": float(np.concatenate(k1).mean(dtype=np.float64))}
        if self._credit.needs_values:
            added = zip(columns, penalties, strict=True)
            return [replace(of_row, extra={**of_row.extra, PENALTIES: paid}) for of_row, paid in added], metrics
        return credited_columns([of_row.row for of_row in columns], self._credit, penalties=penalties), metrics
