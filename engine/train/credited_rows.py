"""Rows whose credit is computed in the trainer, with a critic's values or with KL penalties: advantages, and the targets of the values.

Pure functions of rows, values, penalties and the credit method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from engine.rewards.credit import Member, Values, credit_tokens

if TYPE_CHECKING:
    from engine.schemas.credit import CreditMethod
    from engine.store.rows.export import Row

GROUP = "group"
"""Column of the members of a row's group, by episode id: all trainable episodes, also those without a row."""
BONUSES = "bonuses"
"""Column: the advantage bonuses, float32 [tokens]; not there if the spec has none."""
CUT = "cut"
"""Column, if the credit reads a critic's values: whether a limit cut the episode after this row, so that its last state has a value."""


def with_last_state(row: Row) -> Row:
    """The row, and for a row that was cut one more trained token: the value before it is that of the last state.

    Which token it is does not matter: a value depends on the tokens before it.
    """
    if not row.get(CUT):
        return row
    ids, mask = row["input_ids"], row["loss_mask"]
    return row | {"input_ids": np.append(ids, ids[:1]), "loss_mask": np.append(mask, mask.dtype.type(1))}


def credited_rows(
    rows: Sequence[Row],
    credit: CreditMethod,
    *,
    values: Sequence[Values] | None = None,
    penalties: Sequence[Values] | None = None,
    by_turn: bool = False,
    targets: CreditMethod | None = None,
) -> list[Row]:
    """Compute the credit of rows from the ledgers of their groups, over all rows of an episode in the order of its turns.

    Args:
        rows: Rows of whole groups, with `group`, and with `cut` if there are values.
        credit: The method. With `needs_values` there must be values.
        values: For each row of `with_last_state`, the critic's value before each trained token.
        penalties: For each row, what is subtracted from the reward of each trained token.
        by_turn: The value before the first token of a turn is that of all its tokens.
        targets: The method that computes the targets. Default: `credit`.

    Returns:
        The rows with other `advantages`: the credit plus the bonuses. With values also `values`, `returns` and `has_value`, each
        [trained tokens]: the values, their targets, and 1.0 on tokens before which a value is trained. The target of a value is the
        advantage plus the value; if the method reads one value for each turn, the turn's advantage plus that value, for all
        tokens of the turn. Advantages and targets count the penalties.

    Raises:
        LedgerError: the credit method failed.
    """
    done: list[Row | None] = [None] * len(rows)
    groups: dict[str, dict[str, list[int]]] = {}
    for index, row in enumerate(rows):
        group = groups.setdefault(next(iter(row[GROUP])), {})  # no other group has its first episode
        group.setdefault(row["episode_id"], []).append(index)
    for group in groups.values():
        turns = {
            episode: _Turns(
                [rows[i] for i in indices],
                None if values is None else [values[i] for i in indices],
                None if penalties is None else [penalties[i] for i in indices],
                by_turn,
            )
            for episode, indices in group.items()
        }
        first = rows[next(iter(group.values()))[0]]
        members = {
            episode: turns[episode].member if episode in turns else member
            for episode, member in first[GROUP].items()
            if episode in turns or not credit.needs_values  # there are no values of tokens that no row has
        }
        credited = credit_tokens(credit, list(members.values()))
        whole = credited
        if values is not None and (targets is not None or any(member.ledger.parts for member in members.values())):
            # a value counts all rewards, whichever tokens they are for
            without_parts = [replace(each, ledger=replace(each.ledger, parts=())) for each in members.values()]
            whole = credit_tokens(targets or credit, without_parts)
        for episode, advantages, plain in zip(members, credited, whole, strict=True):
            if episode in turns:
                credited_of_episode = turns[episode].rows(advantages, plain, credit)
                for index, row in zip(group[episode], credited_of_episode, strict=True):
                    done[index] = row
    return [row for row in done if row is not None]


class _Turns:
    """The turns of one episode, over all of its rows. A turn is sampled in one row."""

    def __init__(
        self,
        rows: Sequence[Row],
        values: Sequence[Values] | None,
        penalties: Sequence[Values] | None,
        by_turn: bool,
    ) -> None:
        self._rows = rows
        self._by_turn = by_turn
        self._turn_ids = [row["turn_ids"][row["loss_mask"] == 1] for row in rows]
        member: Member = rows[0][GROUP][rows[0]["episode_id"]]
        sizes = np.zeros(member.ledger.turns, np.int64)
        for turn_ids in self._turn_ids:
            sizes += np.bincount(turn_ids, minlength=len(sizes))
        after = 0.0
        self._values: list[Values] | None = None
        if values is not None:
            self._values = [
                np.full(len(of_turn), of_turn[0]) if by_turn and len(of_turn) else of_turn
                for of_turn in self._by_turns(values, len(sizes))
            ]
            after = next((float(of_row[-1]) for row, of_row in zip(rows, values, strict=True) if row[CUT]), 0.0)
        self.member = replace(
            member,
            ends=np.cumsum(sizes).tolist(),
            values=None if self._values is None else np.concatenate([np.zeros(0), *self._values]),
            after=after,
            penalties=None
            if penalties is None
            else np.concatenate([np.zeros(0), *self._by_turns(penalties, len(sizes))]),
        )

    def _by_turns(self, numbers: Sequence[Values], turns: int) -> list[Values]:
        """Numbers of the trained tokens of each row, as float64 [trained tokens] for each turn."""
        by_turn = [np.zeros(0)] * turns
        for turn_ids, of_row in zip(self._turn_ids, numbers, strict=True):
            for turn in np.unique(turn_ids):
                by_turn[turn] = np.asarray(of_row[: len(turn_ids)][turn_ids == turn], np.float64)
        return by_turn

    def rows(self, advantages: Sequence[Values], plain: Sequence[Values], credit: CreditMethod) -> list[Row]:
        """The episode's rows with what `credited_rows` adds. `plain`: the advantages if no reward were addressed to a part of a turn."""
        credited = []
        for row, turn_ids in zip(self._rows, self._turn_ids, strict=True):
            gained, held, targets, trained = (np.zeros(len(turn_ids)) for _ in range(4))
            for turn in np.unique(turn_ids):
                here = np.flatnonzero(turn_ids == turn)
                gained[here] = advantages[turn]
                if self._values is not None:
                    values = self._values[turn]
                    held[here] = values
                    targets[here] = plain[turn] + (values[0] if credit.value_level == "turn" else values)
                    trained[here[:1] if self._by_turn else here] = 1.0
            placed = row[BONUSES].copy() if BONUSES in row else np.zeros(len(row["input_ids"]), np.float32)
            placed[row["loss_mask"] == 1] += gained
            of_values = {} if self._values is None else {"values": held, "returns": targets, "has_value": trained}
            credited.append(row | {"advantages": placed} | of_values)
        return credited


def value_weights(rows: Sequence[Row]) -> list[Values]:
    """Factor of each trained token in the value loss of a mini-batch: the mean over all trained values. float64 [trained tokens]."""
    count = max(1.0, sum(float(row["has_value"].sum()) for row in rows))
    return [row["has_value"] / count for row in rows]


def value_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Mean value, mean target and explained variance before the first update: 1 - Var(target - value) / Var(target).

    The explained variance is 1 for exact values and 0 for a constant; it is left out if all targets are equal.
    """
    trained = [row["has_value"] > 0 for row in rows]
    values = np.concatenate([row["values"][mask] for row, mask in zip(rows, trained, strict=True)])
    targets = np.concatenate([row["returns"][mask] for row, mask in zip(rows, trained, strict=True)])
    if not len(values):
        return {}
    told = {"critic/value_mean": float(values.mean()), "critic/return_mean": float(targets.mean())}
    if (spread := float(targets.var())) > 1e-12:
        told["critic/explained_variance"] = 1.0 - float((targets - values).var()) / spread
    return told
