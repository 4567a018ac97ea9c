"""Rules over the machine: every event is handled, every state is reached, an end is always in reach, each cycle is
bounded, and no transition stands behind one that is always taken first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine import plugin
from engine.actions.facts import ACTIONS
from engine.machine.machine import ResolvedTransition
from engine.machine.presets import PRESETS
from engine.schemas.limits import ALWAYS as ALWAYS_EVENTS
from engine.schemas.limits import FAILED, LIMIT
from engine.schemas.machine import ANY, SAME, TransitionSpec
from engine.spec.text.diagnostic import DataPath
from engine.spec.text.near import listed
from engine.validate.context import MAX_TRANSITIONS, CheckContext, nearest
from engine.validate.explore import Cycle
from engine.validate.guards import STATE_KEY, expressions
from engine.validate.logic import ALWAYS, MAX_CASES, Formula, implies, overlap
from engine.validate.registry import Finding, rule
from engine.validate.work import WorkLimitError


def _written(ctx: CheckContext) -> list[tuple[DataPath, TransitionSpec]]:
    """The transitions that the spec itself writes."""
    return [(_path(index), item) for index, item in enumerate(ctx.spec.machine.transitions)]


def _path(index: int) -> DataPath:
    return ("machine", "transitions", index)


def _member(path: DataPath, key: str, value: str | list[str], index: int) -> DataPath:
    """Where one of several triggers or sources is written."""
    return (*path, key) if isinstance(value, str) else (*path, key, index)


@rule("machine.too-many", "error", "the machine has too many transitions to check")
def too_many(ctx: CheckContext) -> Iterator[Finding]:
    """With every list of triggers and sources, and every `"*"`, written out."""
    if ctx.written_out > MAX_TRANSITIONS:
        yield Finding(
            f"{ctx.written_out:,} transitions, with every list and `*` expanded; at most "
            f"{MAX_TRANSITIONS:,} are allowed",
            ("machine", "transitions"),
            "remove transitions that can never happen",
            key=True,
        )


@rule("machine.too-large", "warning", "the machine is too large to check all its paths")
def too_large(ctx: CheckContext) -> Iterator[Finding]:
    """Whether each cycle is bounded, and what an episode may cost, is then not known."""
    if not ctx.graph.walked:
        yield Finding(
            f"{len(ctx.states):,} states are too many to check all paths: whether limits bound every cycle is "
            "not known",
            ("machine",),
            "split it into several specs",
            key=True,
        )


@rule("machine.unknown-state", "error", "a transition or `initial` names a state that does not exist")
def unknown_state(ctx: CheckContext) -> Iterator[Finding]:
    """`initial`, and the `source` and `dest` of every transition."""
    initial = ctx.spec.machine.initial
    if initial is not None and initial not in ctx.states:
        yield Finding(f"there is no state `{initial}`", ("machine", "initial"), nearest(initial, ctx.states))
    for path, item in _written(ctx):
        for index, source in enumerate(item.sources):
            if source != ANY and source not in ctx.states:
                yield Finding(
                    f"there is no state `{source}`",
                    _member(path, "source", item.source, index),
                    nearest(source, ctx.states),
                )
        if item.dest not in (SAME, *ctx.states):
            yield Finding(f"there is no state `{item.dest}`", (*path, "dest"), nearest(item.dest, ctx.states))


@rule("machine.unknown-action", "error", "a state names an action that does not exist")
def unknown_action(ctx: CheckContext) -> Iterator[Finding]:
    """A name without a colon that is none of the built-in actions."""
    for name, state in ctx.spec.machine.states.items():
        if state.action is not None and ":" not in state.action and state.action not in ACTIONS:
            near = f"{nearest(state.action, ACTIONS)} (one of your own is `package.module:name`)"
            yield Finding(
                f"there is no action `{state.action}`",
                ("machine", "states", name, "action"),
                plugin.missing("actions", state.action) or near,
            )


@rule("machine.no-action", "error", "a state that is not final has no action")
def no_action(ctx: CheckContext) -> Iterator[Finding]:
    """Without an action no event comes, and the episode would stand still."""
    for name in ctx.working:
        if ctx.states[name].action is None:
            yield Finding(
                f"`{name}` has no action, so no event can lead out of it",
                ctx.state_path(name),
                "give it an `action`, or make it `final: true`",
                key=True,
            )


@rule("machine.unknown-event", "error", "a transition waits for an event that its states' actions never emit")
def unknown_event(ctx: CheckContext) -> Iterator[Finding]:
    """An event must be emitted by at least one of the transition's sources."""
    anywhere = _emitted(ctx, ctx.working)
    for path, item in _written(ctx):
        wild = ANY in item.sources
        named = [name for name in item.sources if name in ctx.may_happen]
        emitted = anywhere if wild else _emitted(ctx, named)
        if emitted is None or any(_silent(ctx, name) for name in named):
            continue
        for index, trigger in enumerate(item.triggers):
            if trigger not in emitted:
                verb = "emits" if len(named) == 1 else "emit"
                who = "no state emits" if wild else f"`{'`, `'.join(named)}` never {verb}"
                yield Finding(
                    f"{who} the event `{trigger}`",
                    _member(path, "trigger", item.trigger, index),
                    nearest(trigger, emitted),
                )


def _emitted(ctx: CheckContext, names: list[str]) -> frozenset[str] | None:
    """The events that at least one of some states may meet; None where that is not known of each."""
    events = [known for name in names if (known := ctx.may_happen[name]) is not None]
    return frozenset().union(*events) if events and len(events) == len(names) else None


def _silent(ctx: CheckContext, name: str) -> bool:
    """Whether the action of a state emits no event, so that it belongs into a final state."""
    return ctx.states[name].action is not None and ctx.events_of(ctx.states[name]) == ()


@rule("machine.final-action", "error", "an action that ends an episode stands in a state that is not final")
def final_action(ctx: CheckContext) -> Iterator[Finding]:
    """`score` emits no event, so no transition could leave its state."""
    for name in ctx.working:
        if _silent(ctx, name):
            action = ctx.states[name].action
            message = f"`{action}` emits no event, so the episode would stay in `{name}`: it is done in a final state"
            leaving = any(name in item.sources for item in ctx.spec.machine.transitions)
            fix = f"write `{name}: {{action: {action}, final: true}}`"
            fix += ", and remove the transitions that leave it" if leaving else ""
            yield Finding(message, ctx.state_path(name), fix, key=True)


@rule("machine.unhandled-event", "error", "an event can happen in a state and leads nowhere")
def unhandled_event(ctx: CheckContext) -> Iterator[Finding]:
    """Every event of a state's action needs a transition, and where there are several final states, `limit` and
    `failed` too. One finding for each state; events that several states lack are one finding."""
    ends = [name for name in ctx.states if ctx.states[name].final or _silent(ctx, name)]
    handled = {(edge.source, edge.trigger) for edge in ctx.machine.transitions}
    always = ALWAYS_EVENTS if len(ends) != 1 or ctx.states[ends[0]].final else ()  # they lead there once it is final
    missing = {
        name: tuple(
            event for event in (*(ctx.events_of(ctx.states[name]) or ()), *always) if (name, event) not in handled
        )
        for name in ctx.working
        if ctx.states[name].action is not None and not _silent(ctx, name)
    }
    cut_short = [event for event in _CUT_SHORT if any(event in events for events in missing.values())]
    if cut_short:
        states = [name for name, events in missing.items() if any(event in cut_short for event in events)]
        verb = "leads" if len(cut_short) == 1 else "lead"
        dest = ends[0] if len(ends) == 1 else "…"
        yield Finding(
            f"{_quoted(cut_short)} may happen in {listed(states)}, and {verb} nowhere",
            ("machine", "transitions"),
            f'add `{{trigger: {_listed(cut_short)}, source: "*", dest: {dest}}}` as the last transition',
            key=True,
        )
    alike: dict[tuple[str | None, tuple[str, ...]], list[str]] = {}
    for name, events in missing.items():
        rest = tuple(event for event in events if event not in cut_short)
        if rest:
            alike.setdefault((ctx.states[name].action, rest), []).append(name)
    for (action, rest), names in alike.items():
        verb = "leads" if len(rest) == 1 else "lead"
        yield Finding(
            f"{_quoted(names)} ({action}) may end with {_quoted(rest)}, which {verb} nowhere",
            ctx.state_path(names[0]),
            f"add `{{trigger: {_listed(rest)}, source: {_listed(names)}, dest: …}}`",
            key=True,
        )


_CUT_SHORT = (*ALWAYS_EVENTS, "aborted", "truncated", "malformed")
"""Events that end most episodes, wherever they happen."""


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]"


@rule("machine.no-default", "error", "every transition of a (state, event) has a condition")
def no_default(ctx: CheckContext) -> Iterator[Finding]:
    """The last transition that is tried must always hold."""
    last = {(edge.source, edge.trigger): edge for edge in ctx.live}  # none of them stands behind one that always holds
    for (source, event), edge in last.items():
        if edge.conditions is not None:
            yield Finding(
                f"`{event}` in `{source}` leads nowhere when no condition holds",
                ("machine",) if edge.index is None else (*_path(edge.index), "conditions"),
                f"add `{{trigger: {event}, source: {source}, dest: …}}` without conditions, behind them",
            )


@rule("machine.unreachable", "error", "no episode can reach a state")
def unreachable(ctx: CheckContext) -> Iterator[Finding]:
    """No chain of transitions leads there, or none that the limits and conditions allow."""
    come_to = ctx.graph.by_state if ctx.graph.exact and ctx.machine.initial in ctx.states else ctx.reachable
    for name in ctx.states:
        if name not in ctx.reachable:
            yield Finding(
                f"nothing leads to `{name}`", ctx.state_path(name), "lead a transition to it, or remove it", key=True
            )
        elif name not in come_to:
            yield Finding(
                f"no episode can reach `{name}`, within the spec's limits and conditions",
                ctx.state_path(name),
                "widen the limits or conditions before it, or remove it",
                key=True,
            )


@rule("machine.done-unreachable", "error", "from some state no final state can be reached")
def done_unreachable(ctx: CheckContext) -> Iterator[Finding]:
    """An episode that comes there could never end."""
    final = [name for name, state in ctx.states.items() if state.final]
    if not final:
        if not any(_silent(ctx, name) for name in ctx.working):  # otherwise `machine.final-action` says which
            yield Finding("the machine has no final state", ("machine",), "mark one with `final: true`", key=True)
        return
    for name in ctx.working:
        if name in ctx.reachable and name not in ctx.ending:
            ends = " or ".join(f"`{state}`" for state in final) if len(final) < 5 else listed(final)
            yield Finding(
                f"no end can be reached from `{name}`",
                ctx.state_path(name),
                f"lead a transition from it to {ends}",
                key=True,
            )


@rule("rules.unknown-state", "error", "a reward rule names a state that does not exist")
def rule_at_unknown_state(ctx: CheckContext) -> Iterator[Finding]:
    """`rewards.reassign[*].at`."""
    for index, item in enumerate(ctx.spec.rewards.reassign):
        if item.at not in ctx.states:
            having = [f"`{name}`" for name, preset in PRESETS.items() if item.at in preset.machine.states]
            elsewhere = f"{item.at} is a state of {' and '.join(having)}; this machine has {', '.join(ctx.states)}"
            yield Finding(
                f"there is no state `{item.at}`",
                ("rewards", "reassign", index, "at"),
                elsewhere if having else nearest(item.at, ctx.states),
            )


def _cycles(ctx: CheckContext) -> list[Cycle]:
    """Cycles from which a final state can be reached; `machine.done-unreachable` reports the others."""
    return [cycle for cycle in ctx.cycles[0] if any(state in ctx.ending for state, _ in cycle.steps)]


def _where(ctx: CheckContext, cycle: Cycle) -> DataPath:
    """The position to report: the spec's transition in the cycle, else the limit that is not set, else the machine."""
    for index, item in enumerate(ctx.spec.machine.transitions):
        ctx.work.spend(len(cycle.steps))
        for position, (state, event) in enumerate(cycle.steps):
            dest = cycle.steps[(position + 1) % len(cycle.steps)][0]
            leads = item.dest in (dest, SAME if state == dest else dest)
            if leads and event in item.triggers and (state in item.sources or ANY in item.sources):
                return _path(index)
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
    if not ctx.cycles[1]:
        raise WorkLimitError


@rule("machine.cycle-by-time", "warning", "a cycle that only `episode_seconds` bounds")
def cycle_by_time(ctx: CheckContext) -> Iterator[Finding]:
    """The cost of an episode then depends on the speed of the computer."""
    if ctx.graph.chart.timed:
        for cycle in _cycles(ctx):
            if not cycle.late:
                yield Finding(
                    f"{cycle} can loop until `limits.episode_seconds`: no count limit bounds it",
                    _where(ctx, cycle),
                    _fix(cycle),
                )


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
    reported: set[str] = set()
    while waiting:
        state, said = waiting.pop()
        action = ctx.states[state].action if state in ctx.states and not ctx.states[state].final else None
        facts = ACTIONS.get(str(action))
        role = facts.speaks if facts is not None else None
        silent = facts.silent_events if facts is not None else ()
        if role == "user" and said and state not in reported:
            reported.add(state)
            yield Finding(
                f"in `{state}` the user may speak right after a user's message, with no reply in between",
                ctx.state_path(state),
                "lead through a state that generates before the user is asked again",
                key=True,
            )
        own_events = (ctx.events_of(ctx.states[state]) or ()) if action is not None else ()
        for event, dests in steps.get(state, {}).items():
            ctx.work.spend(len(dests))
            spoke = (
                said
                if event not in own_events or event in silent
                else role in shown_as_user or (said and role != "assistant")
            )
            new = {(dest, spoke) for dest in dests} - seen
            seen |= new
            waiting += sorted(new)


_Pair = tuple[ResolvedTransition, ResolvedTransition | None]
"""A transition of the spec for one (source, trigger), and the earlier one that is always taken instead."""


def _same(edge: ResolvedTransition, before: ResolvedTransition | None) -> bool:
    return before is not None and (before.conditions, before.dest) == (edge.conditions, edge.dest)


def _guard(ctx: CheckContext, edge: ResolvedTransition) -> Formula:
    return ALWAYS if edge.conditions is None else ctx.formula(edge.conditions)


def _pairs(ctx: CheckContext) -> dict[int, list[_Pair]]:
    """Every transition of the spec, by its index.

    Raises:
        WorkLimitError: there are too many to compare.
    """
    groups: dict[tuple[str, str], list[ResolvedTransition]] = {}
    pairs: dict[int, list[_Pair]] = {}
    for edge in ctx.machine.transitions:
        group = groups.setdefault((edge.source, edge.trigger), [])
        if edge.index is not None:
            settling = None
            for before in group:
                ctx.work.spend(3)
                always = before.conditions is None or _implies(ctx, _guard(ctx, edge), _guard(ctx, before))
                if always or _same(edge, before):
                    settling = before
                    break
            pairs.setdefault(edge.index, []).append((edge, settling))
        group.append(edge)
    return pairs


def _implies(ctx: CheckContext, first: Formula, second: Formula) -> bool:
    ctx.work.spend(_weight(first, second))
    return implies(first, second, {})


def _weight(first: Formula, second: Formula) -> int:
    """About how many comparisons it takes to look at two guards together."""
    return min(first.weight * second.weight, MAX_CASES) if first.known and second.known else 1


def _place(ctx: CheckContext, edge: ResolvedTransition) -> str:
    """Where a transition is written: `the one in line 12`."""
    if edge.index is None:
        return "the preset's"
    origin = ctx.loaded.origin(_path(edge.index))
    return f"the one in line {origin.line}" if origin.via == "" else f"the one of {origin.via}"


@rule("machine.duplicate-transition", "warning", "a transition is written twice")
def duplicate_transition(ctx: CheckContext) -> Iterator[Finding]:
    """An earlier one has the same source, trigger, condition and destination."""
    for index, pairs in _pairs(ctx).items():
        first = pairs[0][1]
        if first is not None and all(_same(edge, before) for edge, before in pairs):
            yield Finding(f"this transition says the same as {_place(ctx, first)}", _path(index), "remove it")


@rule("machine.shadowed", "error", "a transition can never be taken: an earlier one always is")
def shadowed(ctx: CheckContext) -> Iterator[Finding]:
    """An earlier one has no condition, or one that holds whenever this one's does."""
    for index, pairs in _pairs(ctx).items():
        if all(_same(edge, before) for edge, before in pairs):
            continue
        all_before = all(before is not None for _, before in pairs)
        for edge, before in pairs:
            if before is None or (not all_before and (edge.wildcard or _same(edge, before))):
                continue  # a wildcard stands for the events that earlier transitions do not handle
            what = f"`{edge.trigger}` in `{edge.source}`"
            yield Finding(
                f"never taken for {what}: {_place(ctx, before)} is tried first",
                _path(index),
                "put it before that one" if edge.conditions else "remove it, or give the one before it a condition",
            )
            if all_before:
                break


@rule("machine.overlap", "warning", "two conditions may both hold, and the order of the transitions decides")
def overlapping(ctx: CheckContext) -> Iterator[Finding]:
    """Two transitions with conditions for one (state, event) lead to different states."""
    groups: dict[tuple[str, str], list[ResolvedTransition]] = {}
    for edge in ctx.live:
        if edge.conditions is not None and edge.index is not None:
            groups.setdefault((edge.source, edge.trigger), []).append(edge)
    reported: set[tuple[int | None, int | None]] = set()
    for group in groups.values():
        for position, later in enumerate(group):
            for earlier in group[:position]:
                ctx.work.spend()
                pair = (earlier.index, later.index)
                if earlier.dest == later.dest or pair in reported:
                    continue
                first, second = _guard(ctx, earlier), _guard(ctx, later)
                ctx.work.spend(_weight(first, second))
                if overlap(first, second, ctx.hull) and not _implies(ctx, second, first):
                    reported.add(pair)
                    yield Finding(
                        f"`{later.trigger}` in `{later.source}`: this condition and that of {_place(ctx, earlier)} may "
                        f"both hold; the first leads to `{earlier.dest}`, this one to `{later.dest}`",
                        (*_path(later.index or 0), "conditions"),
                        f"if the order is intended, make it explicit: add `&& !({earlier.conditions})`",
                    )


@rule("machine.final-exits", "error", "a transition leaves a final state")
def final_exits(ctx: CheckContext) -> Iterator[Finding]:
    """The episode ends in that state, so the transition is never taken."""
    for path, item in _written(ctx):
        for position, source in enumerate(item.sources):
            if source in ctx.states and ctx.states[source].final:
                yield Finding(
                    f"`{source}` is final: the episode ends there, and no transition leaves it",
                    _member(path, "source", item.source, position),
                    "remove the transition, or `final: true` from the state",
                )


_CORRECTED = {
    "conditions": "remove the transition, or correct the condition",
    "unless": "remove the transition, or correct its `unless`",
    "when": "remove the rule, or correct its `when`",
}
"""What to do about a guard by which a transition or rule is never taken."""


@rule("guard.constant", "warning", "a condition always has the same result")
def constant_guard(ctx: CheckContext) -> Iterator[Finding]:
    """Within the spec's limits, and after what must have happened before the guard is evaluated."""
    asked: dict[DataPath, list[tuple[str, str | None]]] = {}
    for edge in ctx.live:
        if edge.index is not None:
            asked.setdefault(_path(edge.index), []).append((edge.source, edge.trigger))
    for index, reassign in enumerate(ctx.spec.rewards.reassign):
        asked["rewards", "reassign", index] = [(reassign.at, None)]
    for path, expression in expressions(ctx):
        if path == STATE_KEY:
            continue
        truth = _truth(ctx, expression, asked.get(path[:3], []))
        if truth is not None:
            key = str(path[3])
            shown, how = " ".join(expression.split()), "always" if truth else "never"
            yield Finding(
                f"`{shown}` {how} holds here, within the spec's limits",
                path,
                f"leave `{key}` out" if truth != (key == "unless") else _CORRECTED[key],
            )


def _truth(ctx: CheckContext, expression: str, asked: list[tuple[str, str | None]]) -> bool | None:
    """The result of a guard wherever it is evaluated; None if that varies, or it never is."""
    guard = ctx.formula(expression)
    ctx.work.spend(len(expression))
    ctx.work.spend(guard.weight)
    hull = guard.truth(ctx.hull)
    truths: set[bool | None] = set()
    for state, event in asked:
        for place in ctx.graph.moments(state, event):
            ctx.work.spend()
            truths.add(hull if place.late else ctx.graph.truth(guard, place, ctx.work))
            if None in truths or len(truths) > 1:
                return None
    return truths.pop() if truths else None
