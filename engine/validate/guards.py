"""Rules about guards: the `conditions` of transitions, the `when` of reward rules and the `state_key` of credit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from engine.machine.guards import MAX_CHARACTERS, guard_problems
from engine.machine.inference import Kind
from engine.rewards.state_key import is_fact_name
from engine.spec.text.diagnostic import DataPath
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule

STATE_KEY: DataPath = ("rewards", "credit", "state_key")
"""The one expression whose result may have any type."""


def expressions(ctx: CheckContext) -> Iterator[tuple[DataPath, str]]:
    """Yield the position and the text of every expression that the spec itself contains."""
    for index, item in enumerate(ctx.spec.machine.transitions):
        if item.conditions is not None:
            yield ("machine", "transitions", index, "conditions"), item.conditions
    for index, reassign in enumerate(ctx.spec.rewards.reassign):
        if reassign.when is not None:
            yield ("rewards", "reassign", index, "when"), reassign.when
    key = ctx.spec.rewards.credit.declared_state_key
    if key is not None and not is_fact_name(key):
        yield STATE_KEY, key


_problems = lru_cache(maxsize=8192)(guard_problems)


def _problems_of_kind(ctx: CheckContext, kind: Kind) -> Iterator[Finding]:
    for path, expression in expressions(ctx):
        ctx.work.spend(min(len(expression), MAX_CHARACTERS))
        for problem in _problems(expression):
            if problem.kind == kind and not (kind == "not-boolean" and path == STATE_KEY):
                yield Finding(problem.message, path, problem.fix, offset=problem.column - 1)


@rule("guard.parse", "error", "a guard is not valid CEL")
def guard_parse(ctx: CheckContext) -> Iterator[Finding]:
    """It has a syntax error, or uses a part of CEL that guards do not support."""
    return _problems_of_kind(ctx, "parse")


@rule("guard.unknown-name", "error", "a guard names a variable, a field or a function that does not exist")
def guard_unknown_name(ctx: CheckContext) -> Iterator[Finding]:
    """The fix names the most similar one that exists."""
    return _problems_of_kind(ctx, "unknown-name")


@rule("guard.wrong-type", "error", "types in a guard do not match")
def guard_wrong_type(ctx: CheckContext) -> Iterator[Finding]:
    """An operator or a function cannot be applied to the types of its operands."""
    return _problems_of_kind(ctx, "wrong-type")


@rule("guard.not-boolean", "error", "a guard does not return true or false")
def guard_not_boolean(ctx: CheckContext) -> Iterator[Finding]:
    """It returns a number, a string, a list or a map."""
    return _problems_of_kind(ctx, "not-boolean")


@rule("guard.too-costly", "error", "a guard may take too long")
def guard_too_costly(ctx: CheckContext) -> Iterator[Finding]:
    """Nested loops multiply, and no other episode runs while a guard is evaluated."""
    return _problems_of_kind(ctx, "too-costly")
