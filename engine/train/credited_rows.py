"""Rows with a critic's values: advantages from the credit method, and the targets of the values.

Pure functions of rows, values and the credit method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from engine.rewards.credit import Member, Values, credit_tokens

if TYPE_CHECKING:
    from engine.schemas.credit import CreditMethod
    from engine.store.export import Row

LEDGER = "ledger"
"""Column of the sealed ledger of a row whose advantages need a critic."""
CUT = "cut"
"""Column: whether a limit cut the episode after this row, so that its last state has a value."""


def with_last_state(row: Row) -> Row:
    """The row, and for a row that was cut one more trained token: the value before it is that of the last state.

    Which token it is does not matter: a value depends on the tokens before it.
    """
    if not row[CUT]:
        return row
    ids, mask = row["input_ids"], row["loss_mask"]
    return row | {"input_ids": np.append(ids, ids[:1]), "loss_mask": np.append(mask, mask.dtype.type(1))}


def credited_rows(
    rows: Sequence[Row],
    values: Sequence[Values],
    credit: CreditMethod,
    *,
    by_turn: bool,
    targets: CreditMethod | None = None,
) -> list[Row]:
    """Compute what a critic's values give to rows.

    Args:
        rows: Rows of whole groups, with `ledger` and `cut`. Their advantages hold bonuses only.
        values: For each row of `with_last_state`, the value before each trained token.
        credit: A method with `needs_values`.
        by_turn: The value before the first token of a turn is that of all its tokens.
        targets: The method that computes the targets. Default: `credit`.

    Returns:
        The rows with `advantages` added, and `values`, `returns` and `has_value`, each [trained tokens]: the values, their targets,
        and 1.0 on tokens before which a value is trained. The target of a value is the advantage plus the value; if the method
        reads one value for each turn, the turn's advantage plus that value, for all tokens of the turn.

    Raises:
        LedgerError: the credit method failed.
    """
    done: list[Row | None] = [None] * len(rows)
    tasks: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        tasks.setdefault(row["task_id"], []).append(index)
    for indices in tasks.values():
        episodes = [
            list(found)
            for _, found in groupby(
                sorted(indices, key=lambda i: rows[i]["episode_id"]), lambda i: rows[i]["episode_id"]
            )
        ]
        turns = [_Turns([rows[i] for i in found], [values[i] for i in found], by_turn) for found in episodes]
        members = [each.member for each in turns]
        credited = credit_tokens(credit, members)
        whole = credited
        if targets is not None or any(member.ledger.parts for member in members):
            # a value counts all rewards, whichever tokens they are for
            whole = credit_tokens(
                targets or credit, [replace(each, ledger=replace(each.ledger, parts=())) for each in members]
            )
        for found, each, advantages, plain in zip(episodes, turns, credited, whole, strict=True):
            for index, row in zip(found, each.rows(advantages, plain, credit), strict=True):
                done[index] = row
    return [row for row in done if row is not None]


class _Turns:
    """The turns of one episode, over all of its rows. A turn is sampled in one row."""

    def __init__(self, rows: Sequence[Row], values: Sequence[Values], by_turn: bool) -> None:
        self._rows = rows
        self._by_turn = by_turn
        self._turn_ids = [row["turn_ids"][row["loss_mask"] == 1] for row in rows]
        ledger = rows[0][LEDGER]
        self._values = [np.zeros(0)] * ledger.turns
        after = 0.0
        for row, turn_ids, found in zip(rows, self._turn_ids, values, strict=True):
            if row[CUT]:
                after = float(found[-1])
            for turn in np.unique(turn_ids):
                mine = np.asarray(found[: len(turn_ids)][turn_ids == turn], np.float64)
                self._values[turn] = np.full(len(mine), mine[0]) if by_turn else mine
        ends = np.cumsum([len(each) for each in self._values]).tolist()
        flat = np.concatenate(self._values) if self._values else np.zeros(0)
        self.member = Member(ledger, values=flat, ends=ends, after=after)

    def rows(self, advantages: Sequence[Values], plain: Sequence[Values], credit: CreditMethod) -> list[Row]:
        """The episode's rows with what `credited_rows` adds. `plain`: the advantages if no reward were addressed to a part of a turn."""
        told = []
        for row, turn_ids in zip(self._rows, self._turn_ids, strict=True):
            gained, held, targets, trained = (np.zeros(len(turn_ids)) for _ in range(4))
            for turn in np.unique(turn_ids):
                here = np.flatnonzero(turn_ids == turn)
                values = self._values[turn]
                gained[here], held[here] = advantages[turn], values
                targets[here] = plain[turn] + (values[0] if credit.value_level == "turn" else values)
                trained[here[:1] if self._by_turn else here] = 1.0
            placed = row["advantages"].copy()
            placed[row["loss_mask"] == 1] += gained
            told.append(row | {"advantages": placed, "values": held, "returns": targets, "has_value": trained})
        return told


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
