"""The names of rewards and facts that the code of a spec writes, read from its text."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from engine.actions.facts import ACTIONS
from engine.validate.code.lineage import lineage
from engine.validate.code.source import Module
from engine.validate.code.written_names import ANY_NAME, WrittenNames, written_names
from engine.validate.context import CheckContext


def names_of_plugins(ctx: CheckContext) -> frozenset[str]:
    """Return the names of rewards and facts that the actions of plugins write."""
    actions = (ACTIONS.get(str(state.action)) for state in ctx.states.values())
    return frozenset(name for facts in actions if facts is not None for name in facts.writes)


def code_names(ctx: CheckContext) -> WrittenNames:
    """Return the names that environment, tools, users, scorer, own actions and those of plugins write, with all texts in their `with`."""
    found = WrittenNames(texts=names_of_plugins(ctx))
    for item in ctx.spec_code:
        adapted = item.role == "environment" and ctx.spec.environment and ctx.spec.environment.adapter
        found |= WrittenNames(texts=frozenset(_texts_in(item.entry.with_)))
        found |= ANY_NAME if item.role == "tool server" or adapted else _names_of(ctx, item.entry.use, item.role)
    for _, state in ctx.own_actions:
        found |= WrittenNames(texts=frozenset(_texts_in(state.with_))) | _names_of(ctx, str(state.action), "action")
    return found


def _names_of(ctx: CheckContext, use: str, role: str) -> WrittenNames:
    """What the module of an entry point writes, with those of its base classes and the spec's own modules that it imports."""
    code = ctx.code_text(use)
    is_class = code is not None and isinstance(code.definition.node, ast.ClassDef)
    if code is None or (not is_class and role in ("environment", "user")):
        return ANY_NAME  # what a function builds may be any class
    family = lineage(code.definition, ctx.sources) if is_class else None
    if family is not None and not family.complete:
        return ANY_NAME
    found = WrittenNames()
    waiting: list[Module | None] = [code.definition.module]
    waiting += [item.module for item in family.classes] if family is not None else []
    seen: set[str] = set()
    while waiting:
        module = waiting.pop()
        if module is None:
            return ANY_NAME
        if module.name not in seen:
            seen.add(module.name)
            found |= written_names(module.text)
            waiting += ctx.sources.own_imports(module)
    return found


def _texts_in(value: Any) -> Iterator[str]:
    """Yield all texts and keys in a value of a document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (str(key), *_texts_in(item))
    elif isinstance(value, list):
        for item in value:
            yield from _texts_in(item)
