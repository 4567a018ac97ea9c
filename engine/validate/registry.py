"""The rules by their stable ids, and their pages.

A rule is a function that examines a spec and yields findings; `@rule` sets its id, its severity and one line that
describes it. Rules are independent: none hides another's findings.

The page of a rule is the only place where it is explained: docs/rules/<id>.md, or pages/<id>.md of a plugin. It has a
title (the id), a line with the severity and what the rule finds, then the reason, a bad and a good example. Examples
are YAML. Other files of an example are fenced too, with their name after the language.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.resources import files
from importlib.resources.abc import Traversable
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
            for finding in find(ctx):
                path, offset = finding.path, finding.offset
                place = ctx.loaded.origin(path, key=finding.key) if offset is None else ctx.loaded.inside(path, offset)
                yield Diagnostic(id, severity, finding.message, finding.fix, finding.origin or place, path)

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


_ID = re.compile(r"[a-z0-9_]{1,60}\.[a-z0-9_-]{1,60}")
_HEAD = re.compile(r"\A# `(?P<id>[a-z0-9_.-]+)`\n\n\*(?P<severity>error|warning|info)\*: (?P<about>.+)\n")
_FOLDER = files("engine.validate") / "rules"
"""A link to docs/rules in a checkout, a folder in a wheel."""


@dataclass(frozen=True, slots=True)
class Page:
    """The page of one rule."""

    id: str
    severity: Severity
    about: str
    text: str
    """The whole page."""


@lru_cache(maxsize=256)
def page_of(rule: str) -> Page | None:
    """Return the page of a rule; None if it has none.

    Raises:
        ValueError: the page does not have the required form.
    """
    if not _ID.fullmatch(rule):
        return None
    file = next((file for folder in _folders() if (file := folder / f"{rule}.md").is_file()), None)
    if file is None:
        return None
    text = file.read_text(encoding="utf-8")
    head = _HEAD.match(text)
    if head is None:
        raise ValueError(f"{rule}.md does not begin with its id, its severity and a line that says what it finds")
    severity: Severity = (
        "error" if head["severity"] == "error" else "warning" if head["severity"] == "warning" else "info"
    )
    return Page(head["id"], severity, head["about"], text)


def rule_pages() -> dict[str, Page]:
    """The pages of all rules by their ids, sorted: what each finds, why, a bad and a good example."""
    return {id: page for id in page_ids() if (page := page_of(id)) is not None}


def page_ids() -> list[str]:
    """Return the ids of all rules that have a page."""
    names = {file.name for folder in _folders() for file in folder.iterdir()}
    return sorted(id for name in names if name.endswith(".md") and _ID.fullmatch(id := name[:-3]))


def _folders() -> list[Traversable]:
    """The folder of the core's pages, then that of each package with rules of a plugin."""
    folders = [_FOLDER]
    for face in list(installed().plugins.values()):
        with guarded(face):
            for package in dict.fromkeys(module.rpartition(".")[0] for module in face.rules):
                folders += [folder] if (folder := files(package) / "pages").is_dir() else []
    return folders
