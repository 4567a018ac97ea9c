"""What a credit method declares of itself is what its formula does, and nothing asks for its name."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import fields, replace
from pkgutil import resolve_name
from typing import ClassVar, get_args

import numpy as np
import pytest
from credit_kit import sealed
from hypothesis import given
from hypothesis import strategies as st
from installed_plugins import needs_plugin

from engine.errors import LedgerError
from engine.rewards.credit import Member, Values, credit, credit_tokens
from engine.rewards.state_key import compile_state_key
from engine.schemas.credit import CREDITS, CreditMethod, read_credit

METHODS: dict[str, type[CreditMethod]] = {
    get_args(method.model_fields["method"].annotation)[0]: method for method in CREDITS.members()
}
OWN = {"entry": {"use": "credit_of_my_own:last_takes_all"}}
VARIANTS = [
    {"method": "outcome"},
    {"method": "turn_return"},
    {"method": "turn_return", "baseline": "none", "gamma": 0.5},
    *({"method": "turn_discount", "form": form, "gamma": 0.5} for form in ("sum", "max", "attempts")),
    {"method": "mt_grpo"},
    {"method": "mt_grpo", "outcome": ["reward"], "weight": 0.0},
    {"method": "gigpo"},
    {"method": "gigpo", "weight": 0.0},
    {"method": "score"},
    {"method": "progress"},
    {"method": "redistribute"},
    {"method": "redistribute", "state_key": "room"},
    {"method": "bilevel_gae"},
    {"method": "turn_ppo"},
    {"method": "gae"},
    {"method": "gae", "gamma": 0.9, "lam": 0.5},
]


def member(rewards: Sequence[float], states: Sequence[str]) -> Member:
    turns = len(rewards)
    values = np.linspace(0.1, 0.7, 2 * turns)
    return Member(
        ledger=sealed(*rewards), state_keys=states, values=values, ends=[2 * turn + 2 for turn in range(turns)]
    )


GROUP = [member((1.0, 0.0, 2.0), "aba"), member((0.0, 1.0), "ab"), member((4.0, -1.0, 0.5), "acb")]


def changed(spec: CreditMethod, moved: Sequence[float]) -> bool:
    """Whether the advantages change when the first episode's rewards are these."""
    before, after = credit(spec, GROUP), credit(spec, [replace(GROUP[0], ledger=sealed(*moved)), *GROUP[1:]])
    return any(not np.allclose(old, new, atol=1e-12) for old, new in zip(before, after, strict=True))


@needs_plugin("credit_methods")
@needs_plugin("critic")
def test_the_variants_are_all_methods() -> None:
    assert {str(variant["method"]) for variant in VARIANTS} | {"entry"} == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_each_method_declares_every_fact_and_its_formula_is_there(method: str) -> None:
    spec = METHODS[method]
    assert all(hasattr(spec, name) for name in inspect.get_annotations(CreditMethod))
    for formula in (spec.formula, spec.token_formula):
        assert formula is None or len(inspect.signature(resolve_name(formula)).parameters) == 2 + spec.takes_folder
    assert set(spec.reward_keys) <= set(spec.model_fields)


@needs_plugin("credit_methods")
@needs_plugin("critic")
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_moving_rewards_between_turns_changes_advantages_where_it_is_declared(variant: dict[str, object]) -> None:
    spec = read_credit(variant)
    moves = [(0.0, 1.0, 2.0), (1.0, 1.0, 1.0), (0.0, 0.0, 3.0), (3.0, 0.0, 0.0)]
    assert any(changed(spec, moved) for moved in moves) == spec.uses_turn_rewards


@needs_plugin("credit_methods")
@needs_plugin("critic")
@given(st.sampled_from(VARIANTS), st.lists(st.floats(-5, 5), min_size=1, max_size=5))
def test_a_group_of_one_has_no_advantage_where_it_is_declared(variant: dict[str, object], rewards: list[float]) -> None:
    spec = read_credit(variant)
    found = credit(spec, [member(rewards, "abcde"[: len(rewards)])])[0]
    assert spec.zero_without_group is False or np.abs(found).max() < 1e-9


@needs_plugin("credit_methods")
@needs_plugin("critic")
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_method_without_what_it_needs_says_so_and_no_other_method_asks(variant: dict[str, object]) -> None:
    spec = read_credit(variant)
    needs = {"values": spec.needs_values, "state_keys": compile_state_key(spec) is not None}
    for name, needed in needs.items():
        bare = [replace(each, **{name: None}) for each in GROUP]
        if needed:
            with pytest.raises(LedgerError, match=f"`method: {variant['method']}` needs"):
                credit(spec, bare)
        else:
            credit(spec, bare)
    assert {each.name for each in fields(Member)} == {"ledger", "state_keys", "values", "ends", "after", "penalties"}


class TotalCredit(CreditMethod):
    """A method of a test's own: the episode's reward, for every turn."""

    formula: ClassVar[str] = f"{__name__}:total"


def total(spec: TotalCredit, group: Sequence[Member]) -> list[Values]:
    return [np.full(each.ledger.turns, each.ledger.total) for each in group]


def test_a_method_that_declares_its_facts_needs_no_other_change() -> None:
    assert [values.tolist() for values in credit(TotalCredit(), GROUP[:2])] == [[3.0, 3.0, 3.0], [1.0, 1.0]]
    assert credit_tokens(TotalCredit(), GROUP[1:2])[0][0].tolist() == [1.0, 1.0]
    assert compile_state_key(TotalCredit()) is None
