"""Every rule, by its stable id.

A rule is a function that looks at a spec and yields what it finds; `@rule` gives it its id, its severity and a
line that says what it is about. Rules do not know of each other, and none hides another's findings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.spec.diagnostic import DataPath, Diagnostic, Origin, Severity
from engine.spec.masking import mask_all

if TYPE_CHECKING:
    from engine.checks.context import CheckContext
    from engine.spec.load import LoadedSpec

MOST_FINDINGS = 100
"""Of one rule that are told."""
MORE = "check.more"
"""The id of what says that there are more."""
UNFINISHED = "check.unfinished"
"""The id of what says that some rules did not look at everything."""

Check = Callable[["CheckContext"], Iterator[Diagnostic]]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found, before it is given the rule's id and a position."""

    message: str
    path: DataPath
    fix: str | None = None
    key: bool = False
    """The key is meant, not its value."""
    offset: int | None = None
    """Which character of the value is meant, from 0."""
    origin: Origin | None = None
    """Where it is, if not at `path`."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule."""

    id: str
    severity: Severity
    about: str
    """What it finds, in one line."""
    check: Check


RULES: dict[str, Rule] = {}
"""In the order in which they are tried."""


def rule(id: str, severity: Severity, about: str) -> Callable[[Callable[[CheckContext], Iterator[Finding]]], Check]:
    """Register a function that yields findings as the rule `id`."""

    def register(find: Callable[[CheckContext], Iterator[Finding]]) -> Check:
        @functools.wraps(find)
        def check(ctx: CheckContext) -> Iterator[Diagnostic]:
            for found in find(ctx):
                yield Diagnostic(id, severity, found.message, found.fix, _origin(ctx, found), found.path)

        RULES[id] = Rule(id, severity, about, check)
        return check

    return register


def _origin(ctx: CheckContext, found: Finding) -> Origin:
    if found.origin is not None:
        return found.origin
    if found.offset is not None:
        return ctx.loaded.inside(found.path, found.offset)
    return ctx.loaded.origin(found.path, key=found.key)


def all_rules() -> list[Rule]:
    """Every rule, in the order in which they are tried."""
    from engine.checks import (  # noqa: F401  (importing them registers their rules)
        cycles,
        guards,
        isolation,
        limits,
        machine,
        model,
        people,
        prompts,
        rewards,
        tasks,
        tools,
        train,
        train_eval,
        transitions,
        worlds,
    )

    return list(RULES.values())


def check_spec(loaded: LoadedSpec) -> list[Diagnostic]:
    """Everything that the rules find in a spec, in the order of the document; errors before warnings at one place.

    What a spec names is imported, unless it was read with an `Access` that forbids it, or runs in worker processes alone.
    """
    return check_rules(loaded, apart=True)[0]


def check_rules(
    loaded: LoadedSpec, doing: Callable[[str], None] | None = None, *, apart: bool = False
) -> tuple[list[Diagnostic], list[str]]:
    """The same, and the ids of the rules that could not look at everything because code may not be imported.

    Args:
        loaded: The spec.
        doing: Called with the id of each rule before it is tried.
        apart: Import nothing that runs in worker processes alone.
    """
    from engine.checks.context import MOST_WORK, CheckContext
    from engine.checks.work import TooMuch, Work

    ctx = CheckContext(loaded, Work(), apart=apart)
    found: list[Diagnostic] = []
    unfinished: list[str] = []
    for item in all_rules():
        ctx.work.left = MOST_WORK
        ctx.rule = item.id
        if doing is not None:
            doing(item.id)
        of_rule: list[Diagnostic] = []
        try:
            for problem in item.check(ctx):
                of_rule.append(problem)
                if len(of_rule) == MOST_FINDINGS:
                    of_rule.append(_more(ctx, item))
                    break
        except TooMuch:
            unfinished.append(item.id)
        found += of_rule
    if unfinished:
        found.append(_unfinished(ctx, unfinished))
    return sorted(mask_all(dict.fromkeys(found), loaded.variables), key=in_order), list(ctx.skipped)


def _more(ctx: CheckContext, item: Rule) -> Diagnostic:
    message = f"`{item.id}` was broken {MOST_FINDINGS} times; where else it is broken is not told"
    return Diagnostic(MORE, "info", message, "correct these first", ctx.loaded.origin(()))


def _unfinished(ctx: CheckContext, rules: list[str]) -> Diagnostic:
    names = ", ".join(f"`{name}`" for name in rules)
    message = f"the spec is too large for these rules to look at all of it: {names}"
    fix = "they may miss something: have fewer states, transitions, rules or rows, or simpler conditions"
    return Diagnostic(UNFINISHED, "warning", message, fix, ctx.loaded.origin(("machine",), key=True))


def in_order(problem: Diagnostic) -> tuple[str, int, int, bool]:
    """Sorts findings by place, errors first."""
    origin = problem.origin
    place = (origin.file, origin.line, origin.column) if origin else ("", 0, 0)
    return (*place, problem.severity != "error")
