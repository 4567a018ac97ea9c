"""Rules over guards: the `conditions` of transitions and the `when` of reward rules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from engine.checks.context import CheckContext
from engine.checks.registry import Finding, rule
from engine.machine.guards import LONGEST, guard_problems
from engine.machine.inference import Kind
from engine.rewards.state_key import is_fact_name
from engine.spec.diagnostic import DataPath

STATE_KEY: DataPath = ("rewards", "credit", "state_key")
"""The one expression that may be of any type."""


def expressions(ctx: CheckContext) -> Iterator[tuple[DataPath, str]]:
    """Every guard that the spec itself writes, and where."""
    for index, item in enumerate(ctx.spec.machine.transitions):
        if item.conditions is not None:
            yield ("machine", "transitions", index, "conditions"), item.conditions
    for index, reassign in enumerate(ctx.spec.rewards.reassign):
        if reassign.when is not None:
            yield ("rewards", "reassign", index, "when"), reassign.when
    key = getattr(ctx.spec.rewards.credit, "state_key", None)
    if key is not None and not is_fact_name(key):
        yield STATE_KEY, key


_problems = lru_cache(maxsize=8192)(guard_problems)


def _of(ctx: CheckContext, kind: Kind) -> Iterator[Finding]:
    for path, expression in expressions(ctx):
        ctx.work.spend(min(len(expression), LONGEST))
        for problem in _problems(expression):
            if problem.kind == kind and not (kind == "not-boolean" and path == STATE_KEY):
                yield Finding(problem.message, path, problem.fix, offset=problem.column - 1)


@rule("guard.parse", "error", "a guard is not CEL")
def guard_parse(ctx: CheckContext) -> Iterator[Finding]:
    """It cannot be read, or uses what guards do not have."""
    return _of(ctx, "parse")


@rule("guard.unknown-name", "error", "a guard names a variable, a field or a function that does not exist")
def guard_unknown_name(ctx: CheckContext) -> Iterator[Finding]:
    """The nearest one that does is named."""
    return _of(ctx, "unknown-name")


@rule("guard.wrong-type", "error", "types in a guard do not fit")
def guard_wrong_type(ctx: CheckContext) -> Iterator[Finding]:
    """An operator or a function is given what it cannot take."""
    return _of(ctx, "wrong-type")


@rule("guard.not-boolean", "error", "a guard is neither true nor false")
def guard_not_boolean(ctx: CheckContext) -> Iterator[Finding]:
    """Its answer is a number, a text, a list or a map."""
    return _of(ctx, "not-boolean")


@rule("guard.too-costly", "error", "a guard may take too long")
def guard_too_costly(ctx: CheckContext) -> Iterator[Finding]:
    """Its loops inside of each other multiply; no other episode moves while a guard is evaluated."""
    return _of(ctx, "too-costly")
