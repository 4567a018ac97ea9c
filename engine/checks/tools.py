"""Rules over tools: their names and schemas, as the model will see them."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any

from engine.checks.context import CheckContext
from engine.checks.registry import Finding, rule
from engine.spec.diagnostic import DataPath
from engine.spec.entry import EntryError
from engine.spec.source import NotImported

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


def _shapes(ctx: CheckContext) -> Iterator[tuple[DataPath, Any]]:
    """Every tool that can be read without building anything."""
    from pydantic import PydanticUserError
    from pydantic.errors import PydanticSchemaGenerationError

    from engine.spec.signature import shape_of

    for index, tool in enumerate(ctx.spec.tools):
        if tool.facts is not None:
            continue  # its tools are known when the server runs
        thing = ctx.entry(tool.use)
        if isinstance(thing, EntryError) or not callable(thing):
            continue
        target, name = thing, tool.name or str(getattr(thing, "__name__", type(thing).__name__))
        if inspect.isclass(thing):
            call = inspect.getattr_static(thing, "__call__", None)
            if not inspect.isfunction(call):
                continue
            target = call
        try:
            yield ("tools", index), shape_of(target, name)
        except (TypeError, NameError, AttributeError, ValueError, PydanticUserError, PydanticSchemaGenerationError):
            continue  # `code.protocol` says it


def tools_at(ctx: CheckContext) -> DataPath | None:
    """Where the spec says that the model has tools: `tools`, or an environment of which this is known. None: nowhere."""
    if ctx.spec.tools:
        return ("tools",)
    return ("environment", "use") if environment_tools(ctx) else None


def environment_tools(ctx: CheckContext) -> bool | None:
    """Whether the spec's environment brings tools: by the facts of its adapter, or by a method `tools`. None: not known."""
    environment = ctx.spec.environment
    if environment is None:
        return False
    if environment.facts is not None:
        return {"none": False, "some": None, "all": True}[environment.facts.tools]
    thing = ctx.described(environment.entry.use)
    if inspect.isclass(thing):
        return callable(getattr(thing, "tools", None))
    node = thing.node if isinstance(thing, NotImported) else None
    if not isinstance(node, ast.ClassDef):
        return None
    methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
    return True if "tools" in methods else None if node.bases else False


@rule("tools.name", "error", "two tools share a name, or a tool's name is not allowed")
def tool_name(ctx: CheckContext) -> Iterator[Finding]:
    """Letters, digits, `_` and `-`, at most 64 of them, not a digit first."""
    seen: dict[str, DataPath] = {}
    for path, shape in _shapes(ctx):
        where = (*path, "name") if ctx.written(*path, "name") else (*path, "use")
        if not _NAME.fullmatch(shape.name):
            message = f"a tool cannot be called `{shape.name}`: letters, digits, `_` and `-`, at most 64"
            yield Finding(message, where, "give it another `name`")
        if shape.name in seen:
            line = ctx.loaded.origin(seen[shape.name]).line
            message = f"two tools are called `{shape.name}`: this one, and the one in line {line}"
            yield Finding(message, where, "give one of them another `name`")
        seen.setdefault(shape.name, path)


@rule("tools.schema", "info", "a tool's schema tells the model too little")
def tool_schema(ctx: CheckContext) -> Iterator[Finding]:
    """No description of the tool, or a parameter of any type at all."""
    for path, shape in _shapes(ctx):
        function = shape.schema["function"]
        if not function["description"]:
            message = f"the tool `{shape.name}` has no docstring: the model sees only its name"
            yield Finding(message, (*path, "use"), "describe it in its docstring")
        for name, schema in function["parameters"].get("properties", {}).items():
            if not set(schema) - {"description", "default"}:
                message = f"the parameter `{name}` of the tool `{shape.name}` has no type"
                yield Finding(message, (*path, "use"), "annotate it with a type")
