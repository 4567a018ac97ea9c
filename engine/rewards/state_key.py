"""The beginning of a turn -> the key of its state, for credit methods that compare turns that began in the same state.

Invariant: it is a pure function of the episode's data at the beginning of the turn, so a replay computes the same key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from pydantic_core import to_json

from engine.errors import GuardError
from engine.machine.guards import Guard
from engine.schemas.credit import CreditMethod
from engine.schemas.message import Message

LONGEST = 120
"""Maximum number of characters of a stored key; a longer key is stored as a digest."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def is_fact_name(state_key: str) -> bool:
    """Whether a `state_key` is the name of a fact, and not an expression."""
    return _NAME.fullmatch(state_key) is not None


class StateKey:
    """Computes the key of a state.

    key = StateKey("room")                                  # the fact of that name
    key = StateKey("facts.room + string(facts.lamp)")       # CEL
    key = StateKey(None)                                    # what the model was shown since its last turn

    Raises:
        GuardError: the expression is not valid CEL.
    """

    __slots__ = ("_fact", "_guard")

    def __init__(self, state_key: str | None) -> None:
        self._fact = state_key if state_key is not None and is_fact_name(state_key) else None
        self._guard = Guard(state_key) if state_key is not None and self._fact is None else None

    def compute(
        self, facts: Mapping[str, Any], shown: Sequence[Message], context: Callable[[frozenset[str]], Mapping[str, Any]]
    ) -> str:
        """Compute the key of the present state.

        Args:
            facts: The facts of the episode.
            shown: The messages so far, including the model's replies.
            context: Builds the named guard variables.

        Returns:
            Equal texts for equal states, and different texts for different states; empty if the fact is not set yet.

        Raises:
            GuardError: the expression reads something that does not exist, or its value is not valid JSON.
        """
        if self._fact is not None:
            return _text(facts[self._fact]) if self._fact in facts else ""
        if self._guard is not None:
            return _text(self._guard.value(context(self._guard.names)))
        newest = len(shown)
        while newest > 0 and shown[newest - 1].role != "assistant":
            newest -= 1
        said = [message.plain().items() for message in shown[newest:]]
        return _text([{name: value for name, value in fields if name != "tool_call_id"} for fields in said])


def compile_state_key(spec: CreditMethod) -> StateKey | None:
    """The key that a credit method needs at the beginning of each turn; None if it needs none.

    Raises:
        GuardError: `state_key` is not valid CEL.
    """
    key = spec.declared_state_key
    return StateKey(key) if key is not None or spec.needs_state_key else None


def _text(value: Any) -> str:
    try:
        text = to_json(_sorted(value), inf_nan_mode="constants").decode()
    except ValueError as error:
        raise GuardError(f"the value of `state_key` is not valid JSON: {error}") from error
    return text if len(text) <= LONGEST else blake2b(text.encode(), digest_size=16).hexdigest()


def _sorted(value: Any) -> Any:
    """The value with the keys of mappings sorted, so that equal values have equal texts."""
    if isinstance(value, Mapping):
        return {str(key): _sorted(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_sorted(item) for item in value]
    return value
