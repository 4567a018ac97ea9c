"""The state that a turn begins in, for credit methods that compare turns of the same state.

Invariant: it is a pure function of what the episode knows when the turn begins, so a replay writes the same one down.
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
"""Characters of a state that are kept as they are; of a longer one its digest is kept."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def is_fact_name(state_key: str) -> bool:
    """Whether a `state_key` is the name of a fact, and not an expression."""
    return _NAME.fullmatch(state_key) is not None


class StateKey:
    """How a spec's credit tells states apart.

    key = StateKey("room")                                  # the fact of that name
    key = StateKey("facts.room + string(facts.lamp)")       # CEL
    key = StateKey(None)                                    # what the model was shown since its last turn

    Raises:
        GuardError: the expression is not CEL.
    """

    __slots__ = ("_fact", "_guard")

    def __init__(self, state_key: str | None) -> None:
        self._fact = state_key if state_key is not None and is_fact_name(state_key) else None
        self._guard = Guard(state_key) if state_key is not None and self._fact is None else None

    def tell(
        self, facts: Mapping[str, Any], shown: Sequence[Message], context: Callable[[frozenset[str]], Mapping[str, Any]]
    ) -> str:
        """The state now.

        Args:
            facts: What the worlds have told.
            shown: The conversation so far, the model's own replies too.
            context: Builds the guard variables that are asked for.

        Returns:
            The same text for the same state and for no other; empty where the fact was not told yet.

        Raises:
            GuardError: the expression asks for what is not there, or is nothing that JSON can say.
        """
        if self._fact is not None:
            return _text(facts[self._fact]) if self._fact in facts else ""
        if self._guard is not None:
            return _text(self._guard.value(context(self._guard.names)))
        newest = len(shown)
        while newest > 0 and shown[newest - 1].role != "assistant":
            newest -= 1
        return _text([message.model_dump(mode="json", exclude={"tool_call_id"}) for message in shown[newest:]])


def compile_state_key(spec: CreditMethod) -> StateKey | None:
    """What a spec's credit needs written down at each turn; None where it needs nothing.

    Raises:
        GuardError: its `state_key` is not CEL.
    """
    key = spec.declared_state_key
    return StateKey(key) if key is not None or spec.needs_state_key else None


def _text(value: Any) -> str:
    try:
        text = to_json(_sorted(value), inf_nan_mode="constants").decode()
    except ValueError as error:
        raise GuardError(f"`state_key` came to something that JSON cannot say: {error}") from error
    return text if len(text) <= LONGEST else blake2b(text.encode(), digest_size=16).hexdigest()


def _sorted(value: Any) -> Any:
    """Mappings in the order of their keys, so that equal ones are written alike."""
    if isinstance(value, Mapping):
        return {str(key): _sorted(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_sorted(item) for item in value]
    return value
