"""Keys that methods declare as acting between turns (`turn_keys`) change nothing in episodes of one turn, and something in others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from credit_kit import sealed
from installed_plugins import needs_plugin

from engine.rewards.credit import Member, credit
from engine.schemas.credit import CREDITS, CreditMethod, read_credit

METHODS: tuple[type[CreditMethod], ...] = CREDITS.members()
OTHER: dict[str, Any] = {"gamma": 0.3, "form": "max", "alpha": 0.2, "reward": "a", "decay": 0.1, "lam": 0.2}
CASES = [(str(method.model_fields["method"].default), key) for method in METHODS for key in method.turn_keys]


def group(turns: int) -> list[Member]:
    """Three episodes with rewards `a` and `b` in the last turn and every second one before it, two tokens a turn, and their values."""
    chance = np.random.default_rng(turns)

    def rewards(turn: int) -> dict[str, float]:
        return {name: float(chance.normal()) for name in "ab"} if (turns - turn) % 2 else {}

    return [
        Member(
            ledger=sealed(*(rewards(turn) for turn in range(turns))),
            values=chance.normal(size=2 * turns),
            ends=[2 * (turn + 1) for turn in range(turns)],
            state_keys=[str(turn % 2) for turn in range(turns)],
        )
        for _ in range(3)
    ]


def advantages(turns: int, method: str, **keys: Any) -> list[list[float]]:
    return [values.tolist() for values in credit(read_credit({"method": method} | keys), group(turns))]


@pytest.mark.parametrize(("method", "key"), CASES)
def test_it_acts_between_turns_only(method: str, key: str) -> None:
    plain, changed = advantages(1, method), advantages(1, method, **{key: OTHER[key]})
    assert [pytest.approx(each) for each in plain] == changed
    assert advantages(4, method) != advantages(4, method, **{key: OTHER[key]})


@needs_plugin("credit_methods")
def test_gamma_of_every_discounted_method_is_declared() -> None:
    assert [case for case in CASES if case[1] == "gamma"] == [
        (method, "gamma") for method in ("turn_return", "gigpo", "turn_discount", "score", "progress")
    ]
