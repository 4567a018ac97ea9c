"""Rules about `condense` and `limits.on_overflow`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from engine.checks.context import CheckContext
from engine.checks.registry import Finding, rule
from engine.checks.worst_case import context_bound
from engine.schemas.condense import ByTokens, CondenseSpec, KeywordsSpec, PolicySummarySpec


def _states_of(ctx: CheckContext, action: str) -> list[str]:
    return [name for name, state in ctx.states.items() if state.action == action]


@rule("condense.no-effect", "warning", "a setting of condensing has no effect")
def no_effect(ctx: CheckContext) -> Iterator[Finding]:
    """`condense` without a state that condenses; `on_overflow: condense` without a limit on the prompt; a target above that limit."""
    spec = ctx.spec
    overflows = spec.limits.on_overflow == "condense"
    if spec.condense is not None and not _states_of(ctx, "condense"):
        fix = "write `limits: {on_overflow: condense}`, or a state with `action: condense`"
        yield Finding("`condense` has no effect: no state condenses", ("condense",), fix, key=True)
        return
    bound = context_bound(ctx)
    if overflows and bound.most is None:
        message = f"`on_overflow: condense` has no effect that is known here: {bound.by}"
        yield Finding(message, ("limits", "on_overflow"), "set `limits.episode_tokens`")
    condense = spec.condense or CondenseSpec()
    if bound.most is None:
        return
    for key, value in (("target_tokens", condense.target_tokens), ("reserve_tokens", condense.reserve_tokens)):
        if value is not None and value >= bound.most:
            message = f"`{key}: {value}` is not below the limit on the prompt: {bound.by} is {bound.most:.0f}"
            yield Finding(message, ("condense", key), "set it below that")
    if condense.reserve_tokens is not None and not overflows and not _handles_overflow(ctx):
        message = "`reserve_tokens` has no effect: no state handles the event `overflow`"
        yield Finding(message, ("condense", "reserve_tokens"), "write `limits: {on_overflow: condense}`, or remove it")


def _handles_overflow(ctx: CheckContext) -> bool:
    return any(edge.trigger == "overflow" for edge in ctx.machine.transitions)


@rule("condense.action", "error", "the machine cannot condense in the way that `condense` says")
def action(ctx: CheckContext) -> Iterator[Finding]:
    """`ask_summary` belongs to `condenser: policy`, and the tool `expand` to a state that calls tools."""
    condense = ctx.spec.condense or CondenseSpec()
    by_policy = isinstance(condense.condenser, PolicySummarySpec)
    asking = _states_of(ctx, "ask_summary")
    if asking and not by_policy:
        message = "`ask_summary` asks the policy for a summary, and `condense.condenser` is not `policy`"
        fix = "write `condense: {chunks: history, condenser: policy}`, or remove the state"
        yield Finding(message, (*ctx.state_path(asking[0]), "action"), fix)
    if by_policy and not asking and (states := _states_of(ctx, "condense")):
        message = (
            "`condenser: policy` puts the newest reply in the place of the history, and no state asks for a summary"
        )
        fix = "add a state with `action: ask_summary` and one that generates before it"
        yield Finding(message, (*ctx.state_path(states[0]), "action"), fix)
    if condense.expand and not _states_of(ctx, "call_tools"):
        message = "the model gets the tool `expand`, and no state calls tools"
        yield Finding(message, ("condense", "expand"), "add a state with `action: call_tools`, or remove `expand`")


@rule("condense.no-package", "info", "a package that condensing needs is not installed")
def package(ctx: CheckContext) -> Iterator[Finding]:
    """`semantic_text_splitter` for chunks by tokens, `yake` and `budoux` for keywords."""
    condense = ctx.spec.condense
    if condense is None:
        return
    needed = [("chunks", "semantic_text_splitter")] if isinstance(condense.chunks, ByTokens) else []
    if isinstance(condense.condenser, KeywordsSpec):
        needed += [("condenser", "yake"), ("condenser", "budoux")]
    for key, name in needed:
        if find_spec(name) is None:
            message = f"`{name}` is not installed, and a run needs it"
            yield Finding(message, ("condense", key), "pip install 'episode-engine[condense]'")
