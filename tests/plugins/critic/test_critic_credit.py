"""`turn_ppo` and `bilevel_gae`: worked out by hand, with turn ends that are said."""

from __future__ import annotations

import numpy as np
import pytest
from credit_kit import advantages, sealed
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import LedgerError
from engine.plugins.critic.gae import bilevel_token_gae
from engine.plugins.critic.spec import BilevelGaeCredit, TurnPpoCredit
from engine.rewards.credit import Member, credit_tokens, returns_to_go
from engine.schemas.credit import OutcomeCredit

VALUES = np.array([0.5, 1.0, 2.0, 4.0, 1.5, 3.0])
ENDS = [2, 3, 6]
"""Turns of two tokens, one, and three."""


def test_turn_ppo_is_gae_over_the_values_that_turns_begin_with() -> None:
    # V: 0.5, 2, 4. gamma 0.5, lam 0.5; rewards 0, 0, 8
    # delta_2 = 8 - 4 = 4; delta_1 = 0 + 0.5 * 4 - 2 = 0; delta_0 = 0 + 0.5 * 2 - 0.5 = 0.5
    group = [Member(ledger=sealed(0.0, 0.0, 8.0), values=VALUES, ends=ENDS)]
    assert advantages(group, method="turn_ppo", gamma=0.5, lam=0.5) == [[0.5 + 0.25 * 1.0, 0.25 * 4.0, 4.0]]
    (by_token,) = credit_tokens(TurnPpoCredit(gamma=0.5, lam=0.5), group)
    assert [values.tolist() for values in by_token] == [[0.75, 0.75], [1.0], [4.0, 4.0, 4.0]]


def test_bilevel_gae_hands_each_turns_advantage_to_its_last_token() -> None:
    # V at the turns' last tokens: 1, 2, 3. gamma 0.5, lam 0.5: delta_2 = 8 - 3 = 5; delta_1 = 1.5 - 2 = -0.5;
    # delta_0 = 1 - 1 = 0, so A = [0.25 * 0.75, 0.75, 5]
    spec = BilevelGaeCredit(gamma=0.5, lam=0.5, token_gamma=1.0, token_lam=0.5)
    group = [Member(ledger=sealed(0.0, 0.0, 8.0), values=VALUES, ends=ENDS)]
    assert advantages(group, **spec.model_dump()) == [[0.1875, 0.75, 5.0]]
    (by_token,) = credit_tokens(spec, group)
    # inside turn 0: 1 - 0.5 + 0.5 * 0.1875; inside turn 2: 3 - 1.5 + 0.5 * 5 = 4, then 1.5 - 4 + 0.5 * 4
    assert [values.tolist() for values in by_token] == [[0.59375, 0.1875], [0.75], [-0.5, 4.0, 5.0]]


def test_a_turn_that_earned_nothing_ends_where_it_ends() -> None:
    """Read off the non-zero rewards, the first two turns would melt into the third."""
    spec = BilevelGaeCredit(gamma=0.5)
    rewards = (0.0, 0.0, 8.0)
    said = Member(ledger=sealed(*rewards), values=VALUES, ends=ENDS)
    guessed = Member(ledger=sealed(8.0), values=VALUES, ends=[6])
    assert [len(values) for values in bilevel_token_gae(spec, [said])[0]] == [2, 1, 3]
    flat = np.concatenate(bilevel_token_gae(spec, [said])[0])
    wrong = np.concatenate(bilevel_token_gae(spec, [guessed])[0])
    assert flat[:3].tolist() == [8.0 * 0.25 - 0.5, 8.0 * 0.25 - 1.0, 8.0 * 0.5 - 2.0]
    assert wrong[:3].tolist() == [8.0 - 0.5, 8.0 - 1.0, 8.0 - 2.0]


def test_a_turn_of_no_tokens_is_worth_what_follows_it() -> None:
    group = [Member(ledger=sealed(0.0, 0.0, 8.0), values=np.array([1.0, 3.0]), ends=[1, 1, 2])]
    assert advantages(group, method="turn_ppo", gamma=1.0, lam=0.0) == [[2.0, 0.0, 5.0]]
    assert advantages(group, method="bilevel_gae", lam=0.0) == [[2.0, 0.0, 5.0]]
    last = [Member(ledger=sealed(2.0, 8.0), values=np.array([1.0]), ends=[1, 1])]
    assert advantages(last, method="turn_ppo", gamma=1.0, lam=1.0) == [[9.0, 8.0]]


@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 4)), min_size=1, max_size=6), st.floats(0, 1), st.data())
def test_with_lambda_one_the_values_are_a_baseline_and_no_more(
    turns: list[tuple[float, int]], gamma: float, data: st.DataObject
) -> None:
    ends = np.cumsum([size for _, size in turns]).tolist()
    values = np.array(data.draw(st.lists(st.floats(-5, 5), min_size=ends[-1], max_size=ends[-1])))
    group = [Member(ledger=sealed(*(reward for reward, _ in turns)), values=values, ends=ends)]
    returns = returns_to_go(group[0].ledger.totals, gamma)
    starts = values[[0, *ends[:-1]]]
    assert advantages(group, method="turn_ppo", gamma=gamma, lam=1.0)[0] == pytest.approx(returns - starts, abs=1e-9)
    (by_token,) = credit_tokens(BilevelGaeCredit(gamma=gamma), group)
    expected = np.repeat(returns, [size for _, size in turns]) - values
    assert np.concatenate(by_token) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("method", ["bilevel_gae", "turn_ppo"])
def test_what_is_missing_is_said(method: str) -> None:
    with pytest.raises(LedgerError, match=f"`method: {method}` needs a critic's value for each sampled token"):
        advantages([sealed(1.0)], method=method)
    with pytest.raises(LedgerError, match="`ends` is missing"):
        advantages([Member(ledger=sealed(1.0), values=VALUES)], method=method)
    with pytest.raises(LedgerError, match="6 values for 4 sampled tokens"):
        advantages([Member(ledger=sealed(1.0), values=VALUES, ends=[4])], method=method)
    for ends in ([6], [4, 2], [-1, 6]):
        with pytest.raises(LedgerError, match="must be 2 rising numbers, one for each turn"):
            advantages([Member(ledger=sealed(1.0, 2.0), values=VALUES, ends=ends)], method=method)
    assert advantages([Member(ledger=sealed(), values=np.zeros(0), ends=[])], method=method) == [[]]


def test_other_methods_give_every_token_its_turns_advantage() -> None:
    group = [Member(ledger=sealed(0.0, 3.0), ends=[1, 3]), Member(ledger=sealed(1.0), ends=[2])]
    found = credit_tokens(OutcomeCredit(baseline="mean"), group)
    assert [[values.tolist() for values in each] for each in found] == [[[1.0], [1.0, 1.0]], [[-1.0, -1.0]]]
