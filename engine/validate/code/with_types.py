"""Rules about values that a spec's code gets and returns: by its annotations, which are read as text, and by building
its objects once, in the child process of `engine validate --import`."""

from __future__ import annotations

import ast
import contextlib
import inspect
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from engine.spec.code.entry import raised_at
from engine.spec.code.signature import waits
from engine.spec.text.diagnostic import DataPath
from engine.spec.text.near import short
from engine.storable import words_of
from engine.validate.code.annotations import (
    RESET,
    REWARDS,
    STEP,
    TASK_ROWS,
    TOOL_RESULT,
    TOOLS,
    USER_TURN,
    Wanted,
    excludes,
    returns_wrong,
    scope_of,
)
from engine.validate.code.code_facts import Method, ReadCode
from engine.validate.code.source import Definition
from engine.validate.code.spec_code import METHODS, actions, call_of, call_problems, called
from engine.validate.context import CheckContext, NamedEntry
from engine.validate.registry import Finding, rule
from engine.validate.work import deadline

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
    """Values of `with`, against the annotations of constructors and functions. Those that cannot be read allow all."""
    for call in (*map(call_of, ctx.spec_code), *called(ctx), *actions(ctx)):
        text = ctx.code_text(call.use) if call.with_ else None
        signature = None if text is None else text.signature
        if text is None or signature is None or text.constructor is None:
            continue
        scope = scope_of(text.constructor, ctx.sources)
        for key, value in call.with_.items():
            parameter = signature.parameters.get(key)
            ctx.work.spend(1)
            path = (*call.path_with, key)
            if parameter is None or not isinstance(parameter.annotation, ast.expr):
                continue
            if any(reference[: len(path)] == path for reference in ctx.loaded.references):
                continue  # an environment variable gave it, or a part of it: it may be another value elsewhere
            default = parameter.default  # `limit: int = None` is common: values of the default's type are right too
            is_like_default = isinstance(default, ast.Constant) and type(default.value) is type(value)
            if excludes(parameter.annotation, value, scope) and not (
                is_like_default and excludes(parameter.annotation, default.value, scope)
            ):
                wanted = ast.unparse(parameter.annotation).strip("'\"")
                yield Finding(
                    f"`{call.use}` takes `{key}: {short(wanted)}`; it is {_shown(value)}",
                    (*call.path_with, key),
                    _fix(wanted, value),
                )


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
    """`respond` returns a `UserTurn`, `reset` a `Reset`, a scorer a `list[RewardEvent]`, …, where it is annotated."""
    functions = {"scorer": _METHODS["environment"]["score"], "tool": _METHODS["tool"]["__call__"]}
    named: list[tuple[str, DataPath, tuple[Wanted, str] | None]]
    named = [(item.entry.use, (*item.path, "use"), functions.get(item.role)) for item in ctx.spec_code]
    named += [(call.use, call.path, _METHODS["environment"]["step"]) for call in actions(ctx)]
    tasks = ctx.spec.tasks
    if tasks.source == "python" and tasks.use:
        named.append((tasks.use, ("tasks", "use"), (TASK_ROWS, "the rows")))
    for use, path, returned in named:
        text = ctx.code_text(use)
        if returned is not None and text is not None and text.kind == "function":
            yield from _wrong(ctx, text.definition, use, *returned, path)
    for item in ctx.spec_code:
        text = ctx.code_text(item.entry.use)
        if text is None or text.kind != "class":
            continue
        for name, (wanted, words) in _METHODS.get(item.role, {}).items():
            method = text.method(name)
            if isinstance(method, Method) and method.definition is not None:
                yield from _wrong(
                    ctx, method.definition, f"{item.entry.use}.{name}", wanted, words, (*item.path, "use")
                )


def _wrong(
    ctx: CheckContext, function: Definition, name: str, wanted: Wanted, words: str, path: DataPath
) -> Iterator[Finding]:
    annotation = returns_wrong(function, wanted, ctx.sources)
    if annotation is not None:
        place = f"{function.module.file.name}:{function.node.lineno}"
        yield Finding(
            f"`{name}` is annotated `-> {short(annotation)}` ({place}), and must return {words}",
            path,
            "correct the function, or its annotation",
        )


MAX_WORDS = 400
"""Characters of what a constructor raised that are shown."""
CLOSE_SECONDS = 5.0
"""Deadline of one `close`."""


@rule("code.construct", "error", "a constructor raises, or builds something else than the engine calls")
def constructs(ctx: CheckContext) -> Iterator[Finding]:
    """Environment, tools and users, each built once with its `with`. With `effects: external`, nothing is built."""
    for item in ctx.spec_code:
        environment = ctx.spec.environment if item.role == "environment" else None
        packages = environment.facts.packages if environment is not None and environment.facts is not None else ()
        effects, seconds = "pure", ctx.spec.limits.tool_seconds
        if environment is not None:
            effects, seconds = environment.effects, environment.timeout
        elif item.role == "tool":
            tool = ctx.spec.tools[int(item.path[1])]
            effects, seconds = tool.effects, tool.timeout or seconds
        elif user := next((user for path, user in ctx.users if item.path[: len(path)] == path), None):
            effects, seconds = user.effects, user.seconds
        if item.role not in ("environment", "user", "tool") or effects == "external":
            continue
        if any(find_spec(package) is None for package in packages):
            continue  # `code.no-package` reports it
        code = ctx.code(item.entry.use)
        if code is None or code.kind == "value" or (item.role == "tool" and code.kind != "class"):
            continue
        if isinstance(code, ReadCode) or not ctx.calls:
            if isinstance(code, ReadCode):
                ctx.skip()
            continue
        if any(True for _ in call_problems(ctx, code, call_of(item))):
            continue  # `code.protocol` reports it
        if code.method(METHODS.get(item.role, ("__call__", ()))[0]) == "missing" and code.kind == "class":
            continue  # the same
        with_ = item.entry.with_
        if environment is not None:
            with_ = environment.entry_in(ctx.loaded.base).with_
        yield from _built(item, ctx.described(item.entry.use), with_, seconds)


def _built(item: NamedEntry, target: Any, with_: Mapping[str, Any], seconds: float) -> Iterator[Finding]:
    import asyncio

    use, path = item.entry.use, (*item.path, "with" if item.entry.with_ else "use")

    async def build() -> Any:
        return target(**with_)

    try:
        with deadline(seconds):
            thing = asyncio.run(build()) if waits(target) else target(**with_)
    except (Exception, SystemExit) as error:  # noqa: BLE001  (whatever code of a spec raises)
        where = raised_at(error).removeprefix(" at ")
        yield Finding(
            f"`{use}` cannot be built: {words_of(error)[:MAX_WORDS]}",
            path,
            f"raised in {where}" if where else None,
            key=True,
        )
        return
    try:
        name, arguments = METHODS.get(item.role, ("__call__", ()))
        if not callable(getattr(thing, name, None)):
            kind = type(thing).__name__
            yield Finding(
                f"`{use}` builds a `{kind}`, which has no method `{name}`",
                (*item.path, "use"),
                f"give it a method `{name}({', '.join(arguments)})`",
            )
    finally:
        if callable(getattr(thing, "close", None)):
            with contextlib.suppress(Exception), deadline(CLOSE_SECONDS):  # what it raises is not this rule's
                asyncio.run(_closed(thing))


async def _closed(thing: Any) -> None:
    closing = thing.close()
    if inspect.isawaitable(closing):
        await closing
