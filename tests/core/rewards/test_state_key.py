"""States: the same text for the same state, from what is known when a turn begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from installed_plugins import needs_plugin

from engine.errors import GuardError
from engine.rewards.state_key import StateKey, compile_state_key
from engine.schemas.credit import read_credit
from engine.schemas.message import Message

FACTS = {"room": {"name": "hall", "doors": [1, 2]}, "long": "x" * 200}
SHOWN = [
    Message(role="user", content="Go."),
    Message(role="assistant", content="north"),
    Message(role="tool", content="a hall", tool_call_id="c1", name="go"),
    Message(role="user", content="And now?"),
]


def tell(state_key: str | None, facts: Mapping[str, Any] = FACTS, shown: list[Message] = SHOWN) -> str:
    context = {"facts": facts, "turns": {"assistant": 1, "user": 0}}
    return StateKey(state_key).compute(facts, shown, lambda names: {name: context[name] for name in names})


def test_a_facts_name_is_that_fact_whatever_the_order_of_its_keys() -> None:
    assert tell("room") == '{"doors":[1,2],"name":"hall"}'
    assert tell("room", {"room": {"doors": [1, 2], "name": "hall"}}) == tell("room")
    assert tell("room", {}) == ""


def test_an_expression_may_be_of_any_type() -> None:
    assert tell("facts.room.name + '!'") == '"hall!"'
    assert tell("turns.assistant > 0") == "true"
    assert tell("[facts.room.doors[0], turns.user]") == "[1,0]"
    with pytest.raises(GuardError):
        tell("facts.cellar.name")
    with pytest.raises(GuardError):
        StateKey("facts.room +")


def test_left_out_it_is_what_was_shown_since_the_models_last_words() -> None:
    seen = tell(None)
    assert "a hall" not in tell(None, shown=SHOWN[:1])
    other_call = replace(SHOWN[2], tool_call_id="c2")
    assert tell(None, shown=[*SHOWN[:2], other_call, SHOWN[3]]) == seen
    assert tell(None, shown=[SHOWN[1], *SHOWN[2:]]) == seen
    assert tell(None, shown=SHOWN[:3]) != seen


def test_a_long_state_is_kept_by_its_digest() -> None:
    assert len(tell("long")) == 32
    assert tell("long", {"long": "x" * 201}) != tell("long")


@needs_plugin("credit_methods")
def test_only_methods_that_compare_states_write_them_down() -> None:
    asked = {
        name: compile_state_key(read_credit({"method": name})) is not None
        for name in ("outcome", "turn_return", "gigpo", "redistribute")
    }
    assert asked == {"outcome": False, "turn_return": False, "gigpo": True, "redistribute": False}
    assert compile_state_key(read_credit({"method": "redistribute", "state_key": "room"})) is not None
    assert compile_state_key(read_credit({"method": "entry", "use": "a:b", "state_key": "room"})) is not None
