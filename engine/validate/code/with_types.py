"""Rules about the annotations of a spec's code, which are read as text: no code is imported for them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from engine.spec.added import Called
from engine.spec.text.diagnostic import DataPath
from engine.spec.text.near import short
from engine.validate.code.annotations import (
    RESET,
    REWARDS,
    STEP,
    TASK_ROWS,
    TOOL_RESULT,
    TOOLS,
    USER_TURN,
    Scope,
    Wanted,
    excludes,
    returns_wrong,
    scope_of,
)
from engine.validate.code.code_context import NamedEntry
from engine.validate.code.code_facts import Method, ReadCode
from engine.validate.code.source import Definition
from engine.validate.code.spec_code import actions, called
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule

_METHODS: Mapping[str, Mapping[str, tuple[Wanted, str]]] = {
    "environment": {
        "reset": (Wanted(classes=frozenset({RESET})), "a `Reset`"),
        "step": (Wanted(classes=frozenset({STEP})), "a `Step`"),
        "score": (REWARDS, "a `list[RewardEvent]`"),
        "tools": (TOOLS, "a list of functions"),
    },
    "user": {"respond": (Wanted(classes=frozenset({USER_TURN})), "a `UserTurn`")},
    "tool": {"__call__": (TOOL_RESULT, "text, a `ToolReply` or what JSON can hold")},
}
"""What each method must return."""


@rule("code.with-type", "error", "a value of `with` has another type than the parameter's annotation")
def with_type(ctx: CheckContext) -> Iterator[Finding]:
    """Values of `with`, compared with the annotations of constructors and functions. Annotations that cannot be read allow all."""
    for call in _calls(ctx):
        text = ctx.code_text(call.use) if call.with_ else None
        signature = None if text is None else text.signature
        if text is None or signature is None or text.constructor is None:
            continue
        scope = scope_of(text.constructor, ctx.sources)
        for key, value in call.with_.items():
            parameter = signature.parameters.get(key)
            ctx.work.spend(1)
            if (
                parameter is None
                or not isinstance(parameter.annotation, ast.expr)
                or _from_environment(ctx, (*call.path_with, key))
            ):
                continue
            if excludes(parameter.annotation, value, scope) and not _like_default(parameter, value, scope):
                wanted = ast.unparse(parameter.annotation).strip("'\"")
                yield Finding(
                    f"`{call.use}` takes `{key}: {short(wanted)}`; it is {_shown(value)}",
                    (*call.path_with, key),
                    _fix(wanted, value),
                )


def _calls(ctx: CheckContext) -> Iterator[Called]:
    for item in ctx.spec_code:
        yield Called(
            use=item.entry.use,
            arguments=(),
            with_=item.entry.with_,
            path=(*item.path, "use"),
            path_with=(*item.path, "with"),
        )
    yield from called(ctx)
    yield from actions(ctx)


def _from_environment(ctx: CheckContext, path: DataPath) -> bool:
    """Whether an environment variable gave the value, or a part of it: it may be another one elsewhere."""
    return any(known[: len(path)] == path for known in ctx.loaded.references)


def _like_default(parameter: inspect.Parameter, value: Any, scope: Scope) -> bool:
    """Whether a value has the type of a default that the annotation excludes too: annotations such as `limit: int = None` are common."""
    default = parameter.default
    if not isinstance(default, ast.Constant) or type(default.value) is not type(value):
        return False
    return excludes(parameter.annotation, default.value, scope)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f'the text "{short(value)}"'
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return "a mapping" if isinstance(value, Mapping) else "a list" if isinstance(value, list) else f"{value}"


def _fix(wanted: str, value: Any) -> str | None:
    if wanted == "str" and not isinstance(value, Mapping | list) and value is not None:
        return f'quote it: "{_shown(value)}"'
    if wanted == "bool" and isinstance(value, str):
        return "write true or false, without quotes: YAML 1.2 has no yes and no"
    if wanted in ("int", "float") and isinstance(value, str):
        return "write a number without quotes"
    if wanted == "int" and isinstance(value, float):
        return "write a whole number"
    if wanted.startswith("list") and not isinstance(value, list | Mapping):
        return f"write it as a list: [{value}]"
    return None


@rule("code.returns", "error", "a function or method is annotated with another result than the engine takes")
def returns(ctx: CheckContext) -> Iterator[Finding]:
    """`respond` returns a `UserTurn`, `reset` a `Reset`, a scorer a `list[RewardEvent]`, … Without an annotation nothing is said."""
    for item in ctx.spec_code:
        text = ctx.code_text(item.entry.use)
        if text is not None:
            yield from _of_part(ctx, item, text)
    for call in actions(ctx):
        text = ctx.code_text(call.use)
        if text is not None and text.kind == "function":
            yield from _wrong(ctx, text.definition, call.use, Wanted(classes=frozenset({STEP})), "a `Step`", call.path)
    tasks = ctx.spec.tasks
    text = ctx.code_text(tasks.use) if tasks.source == "python" and tasks.use else None
    if text is not None and text.kind == "function":
        yield from _wrong(ctx, text.definition, str(tasks.use), TASK_ROWS, "the rows", ("tasks", "use"))


def _of_part(ctx: CheckContext, item: NamedEntry, text: ReadCode) -> Iterator[Finding]:
    path = (*item.path, "use")
    if text.kind == "class":
        for name, (wanted, words) in _METHODS.get(item.role, {}).items():
            method = text.method(name)
            if isinstance(method, Method) and method.definition is not None:
                yield from _wrong(ctx, method.definition, f"{item.entry.use}.{name}", wanted, words, path)
    elif text.kind == "function" and item.role == "scorer":
        yield from _wrong(ctx, text.definition, item.entry.use, REWARDS, "a `list[RewardEvent]`", path)
    elif text.kind == "function" and item.role == "tool":
        wanted, words = _METHODS["tool"]["__call__"]
        yield from _wrong(ctx, text.definition, item.entry.use, wanted, words, path)


def _wrong(
    ctx: CheckContext, function: Definition, name: str, wanted: Wanted, words: str, path: DataPath
) -> Iterator[Finding]:
    found = returns_wrong(function, wanted, ctx.sources)
    if found is not None:
        place = f"{function.module.file.name}:{function.node.lineno}"
        yield Finding(
            f"`{name}` is annotated `-> {short(found)}` ({place}), and must return {words}",
            path,
            "correct the function, or its annotation",
        )
