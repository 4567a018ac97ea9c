"""The rule that builds the objects of a spec once, in the child process of `engine validate --import`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from engine.spec.code.entry import raised_at
from engine.spec.code.signature import waits
from engine.storable import words_of
from engine.validate.alarm import deadline
from engine.validate.code.code_context import NamedEntry
from engine.validate.code.code_facts import ReadCode
from engine.validate.code.spec_code import METHODS, call_of, call_problems
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule

MAX_WORDS = 400
"""Characters of what a constructor raised that are shown."""
CLOSE_SECONDS = 5.0
"""Deadline of one `close`."""


@rule("code.construct", "error", "a constructor raises, or builds something else than the engine calls")
def constructs(ctx: CheckContext) -> Iterator[Finding]:
    """Environment, tools and users, each built once with its `with`. With `effects: external`, nothing is built."""
    for item in ctx.spec_code:
        effects, seconds = _settings(ctx, item)
        if item.role not in ("environment", "user", "tool") or effects == "external" or _lacks_package(ctx, item):
            continue
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
        if item.role == "environment" and ctx.spec.environment is not None:
            with_ = ctx.spec.environment.entry_in(ctx.loaded.base).with_
        yield from _built(item, ctx.described(item.entry.use), with_, seconds)


def _settings(ctx: CheckContext, item: NamedEntry) -> tuple[str, float]:
    """The `effects` of an entry point, and the deadline of its constructor in seconds."""
    spec = ctx.spec
    if item.role == "environment" and spec.environment is not None:
        return spec.environment.effects, spec.environment.timeout
    if item.role == "tool":
        tool = spec.tools[int(item.path[1])]
        return tool.effects, tool.timeout or spec.limits.tool_seconds
    user = next((user for path, user in ctx.users if item.path[: len(path)] == path), None)
    return ("pure", spec.limits.tool_seconds) if user is None else (user.effects, user.seconds)


def _lacks_package(ctx: CheckContext, item: NamedEntry) -> bool:
    """Whether an adapter's library is missing: `code.no-package` reports it."""
    facts = ctx.spec.environment.facts if item.role == "environment" and ctx.spec.environment else None
    return facts is not None and any(find_spec(package) is None for package in facts.packages)


def _built(item: NamedEntry, target: Any, with_: Mapping[str, Any], seconds: float) -> Iterator[Finding]:
    import asyncio

    use, path = item.entry.use, (*item.path, "with" if item.entry.with_ else "use")
    try:
        with deadline(seconds):
            thing = asyncio.run(_on_loop(lambda: target(**with_))) if waits(target) else target(**with_)
    except (Exception, SystemExit) as error:  # noqa: BLE001  (whatever code of a spec raises)
        where = raised_at(error).removeprefix(" at ")
        fix = f"raised in {where}" if where else None
        yield Finding(f"`{use}` cannot be built: {words_of(error)[:MAX_WORDS]}", path, fix, key=True)
        return
    try:
        name, arguments = METHODS.get(item.role, ("__call__", ()))
        if not callable(getattr(thing, name, None)):
            kind = type(thing).__name__
            fix = f"give it a method `{name}({', '.join(arguments)})`"
            yield Finding(f"`{use}` builds a `{kind}`, which has no method `{name}`", (*item.path, "use"), fix)
    finally:
        _close(thing)


async def _on_loop(build: Callable[[], Any]) -> Any:
    return build()


def _close(thing: Any) -> None:
    """Call `close`, if there is one; what it raises is not this rule's."""
    import asyncio

    close = getattr(thing, "close", None)
    if not callable(close):
        return

    async def closed() -> None:
        found = close()
        if inspect.isawaitable(found):
            await found

    with contextlib.suppress(Exception), deadline(CLOSE_SECONDS):
        asyncio.run(closed())
