"""Training rows that no run has, from the columns that a test names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from engine.schemas.trajectory import ImageSpan
from engine.store.rows.row import RowCredit, RowEpisode, TrainingRow


def row_of(columns: Mapping[str, Any] | None = None, **changes: Any) -> TrainingRow:
    """A row of columns as `TrainingRow.columns` has them; `input_ids` and `loss_mask` are needed. `group`, `cut`, `needs_values` and
    `bonuses` [T] make its credit."""
    given = {**(columns or {}), **changes}
    names = ("run_id", "task_id", "episode_id", "sample_index", "turn_rewards")
    row = TrainingRow.of_tokens(
        given["input_ids"],
        given["loss_mask"],
        turn_ids=given.get("turn_ids"),
        advantages=given.get("advantages"),
        logprobs=given.get("logprobs"),
        weight_versions=given.get("weight_versions"),
        images=[ImageSpan(**{"start": 0, "end": 0, "grid": []} | image) for image in given.get("images") or ()],
        routed_experts=given.get("routed_experts"),
        episode=RowEpisode(**{name: given[name] for name in names if name in given}),
        index=given.get("branch", 0),
    )
    if "group" in given:
        bonuses = given.get("bonuses")
        credit = RowCredit(
            members=given["group"],
            needs_values=given.get("needs_values", "cut" in given),
            cut=given.get("cut", False),
            bonuses=None if bonuses is None else np.asarray(bonuses, np.float32)[row.places],
        )
        row = replace(row, credit=credit)
    return row


def with_branch(row: TrainingRow, **changes: Any) -> TrainingRow:
    """The row with other fields of its branch."""
    return replace(row, branch=replace(row.branch, **changes))


def with_credit(row: TrainingRow, **changes: Any) -> TrainingRow:
    """The row with other fields of its credit."""
    assert row.credit is not None
    return replace(row, credit=replace(row.credit, **changes))
