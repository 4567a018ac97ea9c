"""Rules about `agent`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.plugins.agents.spec import AgentSpec
from engine.schemas.generation import SamplingParams
from engine.validate.context import CheckContext
from engine.validate.registry import Finding, rule


@rule("agent.missing", "error", "a state runs a program, and the spec names none")
def missing(ctx: CheckContext) -> Iterator[Finding]:
    """`run_agent` without `agent`."""
    running = [name for name, state in ctx.states.items() if state.action == "run_agent"]
    if running and AgentSpec.section_of(ctx.spec) is None:
        yield Finding(
            f"{running[0]} runs a program, and the spec has no `agent`", ("machine",), "add `agent: {run: …}`"
        )


@rule("agent.no-effect", "error", "`agent`, or a setting beside it, has no effect")
def no_effect(ctx: CheckContext) -> Iterator[Finding]:
    """`agent` without a state that runs it; tools and condensing of the spec, of which the program knows nothing."""
    spec = ctx.spec
    if AgentSpec.section_of(spec) is None:
        return
    if not any(state.action == "run_agent" for state in ctx.states.values()):
        yield Finding("`agent` has no effect: no state runs it", ("agent",), "write `machine: agent`", key=True)
        return
    why = "has no effect with `agent`: the program's requests are the conversation"
    if spec.tools:
        yield Finding(f"`tools` {why}", ("tools",), "remove it; the program has its own tools", key=True)
    document = ctx.loaded.data  # what other plugins add is read here, not by their classes
    if document.get("condense") is not None:
        yield Finding(f"`condense` {why}", ("condense",), "remove it", key=True)
    if (document.get("limits") or {}).get("on_overflow") == "condense":
        yield Finding(f"`on_overflow: condense` {why}", ("limits", "on_overflow"), "remove it", key=True)


_CHANGED: dict[str, Any] = {
    "frequency_penalty": 1.0,
    "presence_penalty": 1.0,
    "stop": ["x"],
    "temperature": 0.5,
    "top_k": 1,
    "top_p": 0.5,
}
"""By name in `agent.allow`: a value that is not the default."""


@rule("agent.allow", "error", "a parameter that programs may set cannot have its effect")
def allow(ctx: CheckContext) -> Iterator[Finding]:
    """`agent.allow` against `agent.ignore`, the backend's parameters, and the log-probs of a training."""
    agent = AgentSpec.section_of(ctx.spec)
    if agent is None:
        return
    backend, train = ctx.spec.backend, ctx.spec.train
    trained = train is not None and train.samples_episodes
    for index, name in enumerate(agent.allow):
        path = ("agent", "allow", index)
        if name in agent.ignore:
            yield Finding(f"`{name}` is in `allow` and in `ignore`", path, "remove it from one of them")
        elif name in _CHANGED and backend.unsupported(SamplingParams(**{name: _CHANGED[name]})):
            yield Finding(f"the `{backend.kind_name()}` backend does not have `{name}`", path, "remove it")
        elif trained and name not in ("max_tokens", "stop"):
            yield Finding(
                f"requests may set `{name}`, but the trainer computes log-probs with the spec's `sampling`",
                path,
                "remove it; the request then has no effect on sampling",
            )
