"""Rules about guards (`conditions` and `unless` of transitions, `when` of reward rules, `state_key` of credit) and the
names that they read: facts, and fields of the task, are known only in part."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial

from engine.machine.expression import Constant, ExpressionError, Index, Name, Select, parse
from engine.machine.guards import MAX_CHARACTERS, guard_problems
from engine.machine.inference import Kind
from engine.machine.variables import VARIABLES
from engine.rewards.state_key import is_fact_name
from engine.spec.text.diagnostic import DataPath
from engine.spec.text.near import nearest_name
from engine.validate.code.written_names import ANY_NAME, code_names
from engine.validate.context import CheckContext
from engine.validate.prompts import known_rows, no_field
from engine.validate.registry import Finding, rule

STATE_KEY: DataPath = ("rewards", "credit", "state_key")
"""The one expression whose result may have any type."""


def expressions(ctx: CheckContext) -> Iterator[tuple[DataPath, str]]:
    """Yield the position and the text of every expression that the spec itself contains."""
    for index, item in enumerate(ctx.spec.machine.transitions):
        for word, value in (("conditions", item.conditions), ("unless", item.unless)):
            path: DataPath = ("machine", "transitions", index, word)
            if isinstance(value, list):
                yield from (((*path, position), text) for position, text in enumerate(value))
            elif value is not None:
                yield path, value
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


ABOUT: dict[Kind, str] = {
    "parse": "a guard is not valid CEL",
    "unknown-name": "a guard names a variable, a field or a function that does not exist",
    "wrong-type": "types in a guard do not match",
    "not-boolean": "a guard does not return true or false",
    "too-costly": "a guard may take too long",
}
"""What each kind of problem is; each is a rule."""
for _kind, _about in ABOUT.items():
    rule(f"guard.{_kind}", "error", _about)(partial(_problems_of_kind, kind=_kind))


@lru_cache(maxsize=256)
def _reads(expression: str) -> list[tuple[str, str, int]]:
    """The fields that an expression reads: (variable, field, index of the field in the text)."""
    try:
        nodes = list(parse(expression).walk())
    except ExpressionError:
        return []  # `guard.parse` reports it
    reads: list[tuple[str, str, int]] = []
    for node in nodes:
        if isinstance(node, Select) and isinstance(node.of, Name):
            reads.append((node.of.name, node.field, node.end - len(node.field)))
        elif isinstance(node, Index) and isinstance(node.of, Name) and isinstance(node.key, Constant):
            reads.append((node.of.name, str(node.key.value), node.key.start))
    return reads


@rule("guard.unknown-fact", "warning", "a guard or `state_key` reads a fact that nothing writes")
def unknown_fact(ctx: CheckContext) -> Iterator[Finding]:
    """`facts.<name>` and `feedback.<name>` that no code of environments, users, tools and actions mentions."""
    read: list[tuple[DataPath, str, str, int | None]] = [
        (path, f"{variable}.{field}", field, at)
        for path, expression in expressions(ctx)
        for variable, field, at in _reads(expression)
        if variable in ("facts", "feedback") and field not in VARIABLES[variable].fields
    ]
    key = ctx.spec.rewards.credit.declared_state_key
    if key is not None and is_fact_name(key):
        read.append((STATE_KEY, key, key, None))
    written = code_names(ctx) if read else ANY_NAME
    if written.other_facts:
        return
    marks = {name for _, user in ctx.users for mark in user.marks for name in mark.facts}
    names = written.texts | marks
    for path, shown, name, offset in read:
        if name not in names:
            near = nearest_name(name, sorted(item for item in names if item.isidentifier()))
            yield Finding(
                f"nothing writes the fact `{shown}`: the code of environments, users and tools does not mention it",
                path,
                f"did you mean `{near}`?" if near else "check its name in the code that writes it",
                offset=offset,
            )


@rule("guard.unknown-field", "warning", "a guard reads a field that tasks do not have")
def unknown_field(ctx: CheckContext) -> Iterator[Finding]:
    """`task.<field>`, compared with `tasks.map` or the rows. A field inside of `has()` may be missing."""
    read = [
        (path, field, at)
        for path, expression in expressions(ctx)
        for variable, field, at in _reads(expression)
        if variable == "task" and f"has(task.{field})" not in expression.replace(" ", "")
    ]
    rows = known_rows(ctx) if read else []
    for path, field, offset in read:
        ctx.work.spend(1)
        yield from no_field(ctx, rows, field, path, offset)
