"""Rules over tools, as the model will see them, and about an environment's `step`, which may get their calls."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from engine.spec.added import added_tools
from engine.spec.text.diagnostic import DataPath
from engine.validate.code.code_facts import ReadCode, ToolFacts
from engine.validate.context import CheckContext, nearest
from engine.validate.registry import Finding, rule

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


def _tools(ctx: CheckContext) -> Iterator[tuple[DataPath, ToolFacts]]:
    """Every tool that can be read without building anything."""
    for index, tool in enumerate(ctx.spec.tools):
        if tool.facts is not None:
            continue  # its tools are known when the server runs
        thing = ctx.code(tool.use)
        facts = None if thing is None else thing.tool(tool.name)
        if facts is not None:
            yield ("tools", index), facts
        elif isinstance(thing, ReadCode) and thing.tool_problem(tool.name) is None:
            ctx.skip()


def tools_at(ctx: CheckContext) -> DataPath | None:
    """Where the spec gives the model tools: `tools`, or an environment of which this is known. None: nowhere."""
    if ctx.spec.tools:
        return ("tools",)
    if added := added_tools(ctx.spec):
        return added[0].path
    return ("environment", "use") if environment_tools(ctx) else None


def environment_tools(ctx: CheckContext) -> bool | None:
    """Whether the environment brings tools: by the facts of its adapter, or by a method `tools`. None: not known."""
    environment = ctx.spec.environment
    if environment is None:
        return False
    if environment.facts is not None:
        return {"none": False, "some": None, "all": True}[environment.facts.tools]
    code = ctx.code(environment.entry.use)
    method = "unknown" if code is None or code.kind != "class" else code.method("tools")
    return {"missing": False, "unknown": None}.get(method, True) if isinstance(method, str) else True


@rule("tools.name", "error", "two tools share a name, or a tool's name is not allowed")
def tool_name(ctx: CheckContext) -> Iterator[Finding]:
    """Letters, digits, `_` and `-`, at most 64 of them, not a digit first."""
    seen: dict[str, DataPath] = {}
    for path, tool in _tools(ctx):
        where = (*path, "name") if ctx.written(*path, "name") else (*path, "use")
        if not _NAME.fullmatch(tool.name):
            yield Finding(
                f"a tool cannot be called `{tool.name}`: letters, digits, `_` and `-`, at most 64",
                where,
                "give it another `name`",
            )
        if tool.name in seen:
            line = ctx.loaded.origin(seen[tool.name]).line
            yield Finding(
                f"two tools are called `{tool.name}`: this one, and the one in line {line}",
                where,
                "give one of them another `name`",
            )
        seen.setdefault(tool.name, path)


@rule("tools.schema", "warning", "a tool's schema tells the model too little")
def tool_schema(ctx: CheckContext) -> Iterator[Finding]:
    """No description of the tool, or a parameter of any type at all."""
    for path, tool in _tools(ctx):
        if not tool.description:
            yield Finding(
                f"the tool `{tool.name}` has no docstring: the model sees only its name",
                (*path, "use"),
                "describe it in its docstring",
            )
        for name in tool.untyped:
            yield Finding(
                f"the parameter `{name}` of the tool `{tool.name}` has no type",
                (*path, "use"),
                "annotate it with a type",
            )


@rule("tools.docs", "warning", "a tool's docstring describes a parameter that it does not have")
def tool_docs(ctx: CheckContext) -> Iterator[Finding]:
    """An entry under `Args:` with another name: the model does not see it."""
    for path, tool in _tools(ctx):
        for name in tool.documented:
            if name not in tool.parameters:
                yield Finding(
                    f"the docstring of the tool `{tool.name}` describes `{name}`, which is no parameter: the model "
                    "does not see it",
                    (*path, "use"),
                    nearest(name, [item for item in tool.parameters if item]),
                )


@rule("environment.effects", "error", "an environment keeps state, and `effects` says that it keeps none")
def environment_effects(ctx: CheckContext) -> Iterator[Finding]:
    """A generator with `@environment` and `effects: pure`: a resume would have no generator to continue."""
    environment = ctx.spec.environment
    if environment is None or environment.facts is not None or environment.effects != "pure":
        return
    code = ctx.code(environment.use)
    if code is not None and code.attribute("keeps_state") is True:
        yield Finding(
            f"`{environment.use}` is a generator, which keeps its state between turns; `pure` would lose it "
            "at a resume",
            ("environment", "effects"),
            "write `replayable` (the default), or `external`",
        )


@rule("tools.not-called", "warning", "no state calls the tools, and the environment gets tool calls as replies")
def tools_not_called(ctx: CheckContext) -> Iterator[Finding]:
    """`tool_calls` leads to a state with the action `step`, and no state runs them. An environment whose code reads
    `view.calls` may answer calls itself."""
    environment = ctx.spec.environment
    if environment is None or environment.facts is not None or ctx.calling:
        return
    steps = [
        edge.dest
        for edge in ctx.live
        if edge.trigger == "tool_calls" and edge.dest in ctx.states and ctx.states[edge.dest].action == "step"
    ]
    path = tools_at(ctx) if steps else None
    text = ctx.code_text(environment.use) if path is not None else None
    if path is None or text is None:
        return
    ctx.work.spend(100)
    node = text.definition.node
    inherits = isinstance(node, ast.ClassDef) and bool(node.bases)
    if inherits or any(isinstance(item, ast.Attribute) and item.attr == "calls" for item in ast.walk(node)):
        return
    yield Finding(
        f"no state calls the tools: a reply with a tool call goes to `{steps[0]}` like any other, and "
        "the model gets no result",
        path,
        "write `machine: tools_and_step`, or add a state with the action `call_tools`",
        key=True,
    )
