"""Rules about cycles that nothing bounds, and about two user messages in a row."""

from __future__ import annotations

from collections.abc import Iterator

from engine.actions.facts import ACTIONS
from engine.limit import FAILED, LIMIT
from engine.spec.text.diagnostic import DataPath
from engine.validate.context import CheckContext
from engine.validate.loops import Cycle
from engine.validate.registry import Finding, rule
from engine.validate.work import WorkLimitError


def _cycles(ctx: CheckContext) -> list[Cycle]:
    """Cycles from which a final state can be reached; `machine.done-unreachable` reports the others."""
    return [cycle for cycle in ctx.cycles.found if any(state in ctx.ending for state, _ in cycle.steps)]


def _where(ctx: CheckContext, cycle: Cycle) -> DataPath:
    """The position to report: the spec's own transition in the cycle, else the limit that is not set, else the machine."""
    for index, item in enumerate(ctx.spec.machine.transitions):
        ctx.work.spend(len(cycle.steps))
        for position, (state, event) in enumerate(cycle.steps):
            dest = cycle.steps[(position + 1) % len(cycle.steps)][0]
            if item.dest == dest and event in item.triggers and (state in item.sources or "*" in item.sources):
                return ("machine", "transitions", index)
    for name in cycle.bounds:
        if ctx.written("limits", name):
            return ("limits", name)
    return ("machine",)


def _fix(cycle: Cycle) -> str:
    if cycle.bounds:
        return "set " + " or ".join(f"`limits.{name}`" for name in cycle.bounds)
    if any(event == LIMIT for _, event in cycle.steps):
        return f"add a transition for `{LIMIT}` to a final state"
    if any(event == FAILED for _, event in cycle.steps):
        return f"add a transition for `{FAILED}` to a final state: no limit counts failures"
    return "add a state that generates, asks the user or calls tools to the cycle: only those are counted"


@rule("machine.unbounded-cycle", "error", "a cycle that no limit bounds")
def unbounded_cycle(ctx: CheckContext) -> Iterator[Finding]:
    """No limit of turns or calls and no time limit ends it.

    Raises:
        WorkLimitError: there are too many cycles to look at each.
    """
    for cycle in _cycles(ctx):
        if cycle.late or not ctx.graph.chart.timed:
            when = " even after the time limit" if cycle.late else ""
            yield Finding(f"{cycle} can loop for ever{when}: no limit bounds it", _where(ctx, cycle), _fix(cycle))
    if not ctx.cycles.complete:
        raise WorkLimitError


@rule("machine.cycle-by-time", "warning", "a cycle that only `episode_seconds` bounds")
def cycle_by_time(ctx: CheckContext) -> Iterator[Finding]:
    """The cost of an episode then depends on the speed of the computer."""
    if ctx.graph.chart.timed:
        for cycle in _cycles(ctx):
            if not cycle.late:
                message = f"{cycle} can loop until `limits.episode_seconds`: no count limit bounds it"
                yield Finding(message, _where(ctx, cycle), _fix(cycle))


@rule("machine.user-after-user", "warning", "a user's message can follow a user's message")
def user_after_user(ctx: CheckContext) -> Iterator[Finding]:
    """Without a turn of the model between them: many chat templates refuse this, others merge the two messages."""
    shown_as_user = {"user", *(["tool"] if ctx.spec.model.tool_role == "user" else [])}
    prompt = ctx.spec.messages
    in_rows = ctx.spec.conversation is not None  # a row's conversation ends with a user's or a tool's message
    opened = (in_rows or (bool(prompt) and prompt[-1].role == "user")) and ctx.spec.environment is None
    steps: dict[str, dict[str, set[str]]] = {}
    for edge in ctx.live:
        steps.setdefault(edge.source, {}).setdefault(edge.trigger, set()).add(edge.dest)
    start = (ctx.machine.initial, opened)
    seen = {start}
    waiting = [start]
    told: set[str] = set()
    while waiting:
        state, said = waiting.pop()
        action = ctx.states[state].action if state in ctx.states and not ctx.states[state].final else None
        facts = ACTIONS.get(str(action))
        role = facts.speaks if facts is not None else None
        silent = facts.silent_events if facts is not None else ()
        if role == "user" and said and state not in told:
            told.add(state)
            fix = "lead through a state that generates before the user is asked again"
            message = f"in `{state}` the user may speak right after a user's message, with no reply in between"
            yield Finding(message, ctx.state_path(state), fix, key=True)
        own = (ctx.events_of(ctx.states[state]) or ()) if action is not None else ()
        for event, dests in steps.get(state, {}).items():
            ctx.work.spend(len(dests))
            spoke = (
                said if event not in own or event in silent else role in shown_as_user or (said and role != "assistant")
            )
            new = {(dest, spoke) for dest in dests} - seen
            seen |= new
            waiting += sorted(new)
