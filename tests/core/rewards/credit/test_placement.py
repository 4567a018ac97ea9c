"""Placement: a turn's value on its sampled tokens."""

from __future__ import annotations

import numpy as np
import pytest
from credit_kit import branch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import LedgerError
from engine.rewards.credit import place


def test_a_value_lands_on_its_turns_last_sampled_token() -> None:
    placed = place(branch([-1, 0, 0, 0, -1, -1, 1, 1, 1, 1]), [0.5, 0.25])
    assert placed.dtype == np.float32
    assert placed.tolist() == [0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.25]


def test_a_value_is_spread_over_its_turns_sampled_tokens() -> None:
    placed = place(branch([-1, 0, 0, 0, 0, -1, 1, -1, 1]), [1.0, -3.0], "spread")
    assert placed.tolist() == [0.0, 0.25, 0.25, 0.25, 0.25, 0.0, -1.5, 0.0, -1.5]


def test_a_turn_appears_in_the_one_branch_that_sampled_it() -> None:
    values = [1.0, 2.0, 4.0]
    first, second = branch([-1, 0, 0, -1, 1]), branch([-1, -1, -1, -1, 2, 2], index=1)
    assert place(first, values).tolist() == [0.0, 0.0, 1.0, 0.0, 2.0]
    assert place(second, values).tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 4.0]
    assert place(branch([-1, -1]), values).tolist() == [0.0, 0.0]
    assert place(branch([]), values).tolist() == []


def test_a_turn_without_a_value_is_an_error() -> None:
    with pytest.raises(LedgerError, match="branch 2 holds turn 1, but there are values for 1 turns"):
        place(branch([0, 1], index=2), [1.0])


@given(st.lists(st.integers(-1, 3), max_size=20), st.lists(st.floats(-2, 2), min_size=4, max_size=4))
def test_what_is_placed_is_the_value_of_each_turn_that_has_tokens(turn_ids: list[int], values: list[float]) -> None:
    row = branch(turn_ids)
    for where in ("last", "spread"):
        placed = place(row, values, where)  # type: ignore[arg-type]
        assert placed[row.loss_mask == 0].tolist() == [0.0] * turn_ids.count(-1)
        for turn in set(turn_ids) - {-1}:
            assert placed[row.turn_ids == turn].sum() == pytest.approx(values[turn], rel=1e-5, abs=1e-6)
