"""What rules ask of an environment that is a function with `@environment`, read as text: the same as of the class that the decorator makes."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from typing import Any

from engine.validate.code.code_facts import Method, Missing, ReadCode, read_signature
from engine.validate.code.source import FUNCTION_EVENTS, Definition, Sources, has_yield, is_function_environment

_GIVEN = frozenset({"task", "seed", "view"})
"""Parameters that the engine gives."""


class ReadFunctionEnvironment(ReadCode):
    """A function with `@environment` whose text was read."""

    def __init__(self, definition: Definition, sources: Sources) -> None:
        super().__init__(definition, sources)
        self.kind = "class"

    @property
    def constructor(self) -> Definition | None:
        """The function: `with` gives its parameters."""
        return self.definition

    @property
    def signature(self) -> inspect.Signature | None:
        """Its parameters without those that the engine gives."""
        kept = [
            item if item.kind is item.VAR_KEYWORD else item.replace(kind=item.KEYWORD_ONLY)
            for item in read_signature(self.definition).parameters.values()
            if item.name not in _GIVEN and item.kind is not item.VAR_POSITIONAL
        ]
        return inspect.Signature(kept)

    def method(self, name: str) -> Method | Missing:
        """See `CodeFacts.method`."""
        if name in ("reset", "step") or (name == "tools" and self._keyword("tools") is not None):
            return Method(None)
        return "missing" if name in ("score", "tools") else "unknown"

    def events(self) -> Sequence[str] | Missing:
        """See `CodeFacts.events`."""
        return FUNCTION_EVENTS

    def attribute(self, name: str) -> Any:
        """See `CodeFacts.attribute`."""
        node = self.definition.node
        return has_yield(node) if name == "keeps_state" and not isinstance(node, ast.ClassDef) else None

    def _keyword(self, name: str) -> ast.expr | None:
        """An argument of the decorator."""
        call = self.definition.node.decorator_list[0]
        given = call.keywords if isinstance(call, ast.Call) else []
        return next((item.value for item in given if item.arg == name), None)


def read_code(definition: Definition, sources: Sources) -> ReadCode:
    """Return what rules ask of a definition."""
    if is_function_environment(definition.node) and _is_ours(definition):
        return ReadFunctionEnvironment(definition, sources)
    return ReadCode(definition, sources)


def _is_ours(definition: Definition) -> bool:
    """Whether its decorator comes from `engine.environments`; others may have the same name."""
    mark: ast.expr = definition.node.decorator_list[0]
    while not isinstance(mark, ast.Name):
        inner = mark.func if isinstance(mark, ast.Call) else getattr(mark, "value", None)
        if not isinstance(inner, ast.expr):
            return False
        mark = inner
    for item in definition.module.text.bindings.get(mark.id, ()):
        names = [alias.name for alias in item.names] if isinstance(item, ast.Import) else []
        names += [item.module or ""] if isinstance(item, ast.ImportFrom) else []
        if any(name.startswith("engine.environments") for name in names):
            return True
    return False
