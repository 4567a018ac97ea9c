"""Rules over the machine's graph: every event is handled, every state is reached, an end is always in reach."""

from __future__ import annotations

from collections.abc import Iterator

from engine import plugin
from engine.actions.facts import ACTIONS
from engine.limit import ALWAYS
from engine.schemas.machine import TransitionSpec
from engine.spec.text.diagnostic import DataPath
from engine.spec.text.near import listed
from engine.validate.context import CheckContext, nearest
from engine.validate.machine_context import MAX_TRANSITIONS
from engine.validate.registry import Finding, rule

ANY = "*"


def _own(ctx: CheckContext) -> Iterator[tuple[DataPath, TransitionSpec]]:
    """The transitions that the spec itself writes."""
    for index, item in enumerate(ctx.spec.machine.transitions):
        yield ("machine", "transitions", index), item


def _member(path: DataPath, key: str, value: str | list[str], index: int) -> DataPath:
    """Where one of several triggers or sources is written."""
    return (*path, key) if isinstance(value, str) else (*path, key, index)


@rule("machine.too-many", "error", "the machine has too many transitions to check")
def too_many(ctx: CheckContext) -> Iterator[Finding]:
    """With every list of triggers and sources, and every `"*"`, written out."""
    if ctx.written_out > MAX_TRANSITIONS:
        message = f"{ctx.written_out:,} transitions, with every list and `*` expanded; at most {MAX_TRANSITIONS:,} are allowed"
        yield Finding(message, ("machine", "transitions"), "remove transitions that can never happen", key=True)


@rule("machine.too-large", "warning", "the machine is too large to check all its paths")
def too_large(ctx: CheckContext) -> Iterator[Finding]:
    """Whether each cycle is bounded, and what an episode may cost, is then not known."""
    if not ctx.graph.walked:
        message = (
            f"{len(ctx.states):,} states are too many to check all paths: whether limits bound every cycle is not known"
        )
        yield Finding(message, ("machine",), "split it into several specs", key=True)


@rule("machine.unknown-state", "error", "a transition or `initial` names a state that does not exist")
def unknown_state(ctx: CheckContext) -> Iterator[Finding]:
    """`initial`, and the `source` and `dest` of every transition."""
    initial = ctx.spec.machine.initial
    if initial is not None and initial not in ctx.states:
        yield Finding(f"there is no state `{initial}`", ("machine", "initial"), nearest(initial, ctx.states))
    for path, item in _own(ctx):
        for index, source in enumerate(item.sources):
            if source != ANY and source not in ctx.states:
                where = _member(path, "source", item.source, index)
                yield Finding(f"there is no state `{source}`", where, nearest(source, ctx.states))
        if item.dest not in ctx.states:
            yield Finding(f"there is no state `{item.dest}`", (*path, "dest"), nearest(item.dest, ctx.states))


@rule("machine.unknown-action", "error", "a state names an action that does not exist")
def unknown_action(ctx: CheckContext) -> Iterator[Finding]:
    """A name without a colon that is none of the built-in actions."""
    for name, state in ctx.spec.machine.states.items():
        if state.action is not None and ":" not in state.action and state.action not in ACTIONS:
            near = f"{nearest(state.action, ACTIONS)} (one of your own is `package.module:name`)"
            fix = plugin.missing("actions", state.action) or near
            yield Finding(f"there is no action `{state.action}`", ("machine", "states", name, "action"), fix)


@rule("machine.no-action", "error", "a state that is not final has no action")
def no_action(ctx: CheckContext) -> Iterator[Finding]:
    """Without an action no event comes, and the episode would stand still."""
    for name in ctx.working:
        if ctx.states[name].action is None:
            fix = "give it an `action`, or make it `final: true`"
            yield Finding(
                f"`{name}` has no action, so no event can lead out of it", ctx.state_path(name), fix, key=True
            )


@rule("machine.unknown-event", "error", "a transition waits for an event that its states' actions never emit")
def unknown_event(ctx: CheckContext) -> Iterator[Finding]:
    """An event must be emitted by at least one of the transition's sources."""
    anywhere = _emitted(ctx, ctx.working)
    for path, item in _own(ctx):
        wild = ANY in item.sources
        named = [name for name in item.sources if name in ctx.may_happen]
        emitted = anywhere if wild else _emitted(ctx, named)
        if emitted is None:
            continue
        for index, trigger in enumerate(item.triggers):
            if trigger not in emitted:
                where = _member(path, "trigger", item.trigger, index)
                who = "no state emits" if wild else f"`{'`, `'.join(named)}` never {_verb(named)}"
                yield Finding(f"{who} the event `{trigger}`", where, nearest(trigger, emitted))


def _verb(names: list[str]) -> str:
    return "emits" if len(names) == 1 else "emit"


def _emitted(ctx: CheckContext, names: list[str]) -> frozenset[str] | None:
    """The events that at least one of some states may meet; None where that is not known of each."""
    events = [ctx.may_happen[name] for name in names]
    if not events or any(known is None for known in events):
        return None
    return frozenset().union(*(known for known in events if known is not None))


@rule("machine.unhandled-event", "error", "an event can happen in a state and leads nowhere")
def unhandled_event(ctx: CheckContext) -> Iterator[Finding]:
    """Every event of a state's action, and `limit` and `failed`, needs a transition."""
    handled = {(edge.source, edge.trigger) for edge in ctx.machine.transitions}
    for name in ctx.working:
        state = ctx.states[name]
        if state.action is None:
            continue
        for event in (*(ctx.events_of(state) or ()), *ALWAYS):
            if (name, event) not in handled:
                fix = f"add `{{trigger: {event}, source: {name}, dest: …}}`"
                message = f"`{name}` ({state.action}) may end with `{event}`, which leads nowhere"
                yield Finding(message, ctx.state_path(name), fix, key=True)


@rule("machine.no-default", "error", "every transition of a (state, event) has a condition")
def no_default(ctx: CheckContext) -> Iterator[Finding]:
    """The last transition that is tried must always hold."""
    last: dict[tuple[str, str], DataPath | None] = {}
    for edge in ctx.live:
        group = (edge.source, edge.trigger)
        if edge.conditions is None:
            last[group] = None
        elif last.get(group, ()) is not None:
            own = edge.index is not None
            last[group] = ("machine", "transitions", edge.index or 0, "conditions") if own else ("machine",)
    for (source, event), path in last.items():
        if path is not None:
            fix = f"add `{{trigger: {event}, source: {source}, dest: …}}` without conditions, behind them"
            yield Finding(f"`{event}` in `{source}` leads nowhere when no condition holds", path, fix)


@rule("machine.unreachable", "error", "no episode can reach a state")
def unreachable(ctx: CheckContext) -> Iterator[Finding]:
    """No chain of transitions leads there, or none that the limits and conditions allow."""
    graph = ctx.graph
    begun = ctx.machine.initial in ctx.states
    come_to = graph.states if graph.exact and begun else ctx.reachable
    for name in ctx.states:
        if name not in ctx.reachable:
            fix = "lead a transition to it, or remove it"
            yield Finding(f"nothing leads to `{name}`", ctx.state_path(name), fix, key=True)
        elif name not in come_to:
            message = f"no episode can reach `{name}`, within the spec's limits and conditions"
            fix = "widen the limits or conditions before it, or remove it"
            yield Finding(message, ctx.state_path(name), fix, key=True)


@rule("machine.done-unreachable", "error", "from some state no final state can be reached")
def done_unreachable(ctx: CheckContext) -> Iterator[Finding]:
    """An episode that comes there could never end."""
    final = [name for name, state in ctx.states.items() if state.final]
    if not final:
        yield Finding("the machine has no final state", ("machine",), "mark one with `final: true`", key=True)
        return
    for name in ctx.working:
        if name in ctx.reachable and name not in ctx.ending:
            fix = f"lead a transition from it to {_either(final)}"
            yield Finding(f"no end can be reached from `{name}`", ctx.state_path(name), fix, key=True)


def _either(states: list[str]) -> str:
    return " or ".join(f"`{state}`" for state in states) if len(states) < 5 else listed(states)


@rule("rules.unknown-state", "error", "a reward rule names a state that does not exist")
def rule_at_unknown_state(ctx: CheckContext) -> Iterator[Finding]:
    """`rewards.reassign[*].at`."""
    for index, item in enumerate(ctx.spec.rewards.reassign):
        if item.at not in ctx.states:
            yield Finding(
                f"there is no state `{item.at}`", ("rewards", "reassign", index, "at"), nearest(item.at, ctx.states)
            )
