"""The registry of rules, by their stable ids.

A rule is a function that examines a spec and yields findings; `@rule` sets its id, its severity and one line that describes
it. Rules are independent: none hides another's findings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from engine.plugin import Plugin, PluginError, guarded, installed
from engine.spec.text.diagnostic import DataPath, Diagnostic, Origin, Severity

if TYPE_CHECKING:
    from engine.validate.context import CheckContext

Check = Callable[["CheckContext"], Iterator[Diagnostic]]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found, without the rule's id and the position in the file."""

    message: str
    path: DataPath
    fix: str | None = None
    key: bool = False
    """Whether the position is that of the key and not of its value."""
    offset: int | None = None
    """Index of the character in the value, from 0; None: the whole value."""
    origin: Origin | None = None
    """The position, if it is not that of `path`."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule."""

    id: str
    severity: Severity
    about: str
    """One line that describes what it finds."""
    check: Check


RULES: dict[str, Rule] = {}
"""The rules by id, in the order in which they are applied."""
PLUGIN_OF: dict[str, Plugin] = {}
"""The plugin of each rule that a plugin adds, by the rule's id."""


def rule(id: str, severity: Severity, about: str) -> Callable[[Callable[[CheckContext], Iterator[Finding]]], Check]:
    """Register a function that yields findings as the rule `id`."""

    def register(find: Callable[[CheckContext], Iterator[Finding]]) -> Check:
        @functools.wraps(find)
        def check(ctx: CheckContext) -> Iterator[Diagnostic]:
            for found in find(ctx):
                yield Diagnostic(id, severity, found.message, found.fix, _origin(ctx, found), found.path)

        if id in RULES:
            raise PluginError(f"the rule `{id}` is there already")
        RULES[id] = Rule(id, severity, about, check)
        return check

    return register


@functools.cache
def import_plugin_rules() -> None:
    """Import the rules of plugins. One whose rules cannot be imported is left out, with all of them."""
    for plugin in list(installed().plugins.values()):
        before = list(RULES)
        with guarded(plugin):
            for module in plugin.rules:
                import_module(module)
        added = [id for id in RULES if id not in before]
        for id in added:
            if plugin.name in installed().broken:
                del RULES[id]
            else:
                PLUGIN_OF[id] = plugin


def _origin(ctx: CheckContext, found: Finding) -> Origin:
    if found.origin is not None:
        return found.origin
    if found.offset is not None:
        return ctx.loaded.inside(found.path, found.offset)
    return ctx.loaded.origin(found.path, key=found.key)
