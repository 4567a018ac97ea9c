"""Rules about the environment's `step`: what a resume does with its state, and who answers tool calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule
from engine.validate.tools import tools_at


@rule("environment.effects", "error", "an environment keeps state, and `effects` says that it keeps none")
def environment_effects(ctx: CheckContext) -> Iterator[Finding]:
    """A generator with `@environment` and `effects: pure`: a resume would have no generator to continue."""
    environment = ctx.spec.environment
    if environment is None or environment.facts is not None or environment.effects != "pure":
        return
    code = ctx.code(environment.use)
    if code is not None and code.attribute("keeps_state") is True:
        yield Finding(
            f"`{environment.use}` is a generator, which keeps its state between turns; `pure` would lose it at a resume",
            ("environment", "effects"),
            "write `replayable` (the default), or `external`",
        )


@rule("tools.not-called", "warning", "no state calls the tools, and the environment gets tool calls as replies")
def tools_not_called(ctx: CheckContext) -> Iterator[Finding]:
    """`tool_calls` leads to a state with the action `step`, and no state runs them. An environment whose code reads `view.calls` may answer calls itself."""
    environment = ctx.spec.environment
    if environment is None or environment.facts is not None or ctx.speaking("tool"):
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
    message = f"no state calls the tools: a reply with a tool call goes to `{steps[0]}` like any other, and the model gets no result"
    yield Finding(
        message, path, "write `machine: tools_and_step`, or add a state with the action `call_tools`", key=True
    )
