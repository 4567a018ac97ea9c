"""Every episode that a small machine can have, walked one step at a time, as the executor drives them.

Knows nothing of the verifier: counts are exact, places are whole episodes' standings, and what is unbounded is found by
taking away whatever ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any, NamedTuple

import networkx as nx
from hypothesis import strategies as st

from engine.machine.guards import Guard
from engine.validate.context import CheckContext

EVENTS = {
    "reset": ["ready"],
    "generate": ["answered", "tool_calls", "malformed"],
    "call_tools": ["results"],
    "ask_user": ["feedback", "satisfied"],
    "condense": ["condensed", "unchanged"],
}
NAMES = ("assistant_turns", "condensations", "user_turns", "tool_calls")
"""The counters, in the order of `gain` and `most_count`."""
Gain = tuple[int, int, int, int]
TOKENS = 2
"""Of one turn: it makes at most so many calls."""
CAP = 4
"""Counts from here on behave alike: no limit and no guard of `machines` names a larger one."""
FREE = "facts.x == 1"
"""What nobody can know beforehand."""
SECONDS = {"reset": 0.0, "generate": 0.5, "call_tools": 2.0, "ask_user": 3.0, "condense": 0.0}
"""What each action may take: no environment, a scripted model, tools and a user with deadlines."""
SPEC_CODE = """\
backend: {kind: scripted, replies: [], latency: 0.5}
user: {use: "json:x", timeout: 3s}
tools: [{use: "textwrap:indent"}]
"""
GUARDS = [None, None, "turns.assistant < 2", "turns.user >= 1", "turns.user < limits.user_turns", FREE, "true", "false"]


@st.composite
def machines(draw: st.DrawFn) -> str:
    """Three working states and one or two final ones, with random transitions and limits."""
    names = ["A", "B", "C"]
    ends = ["Y", "Z"][: draw(st.integers(1, 2))]
    actions = {name: draw(st.sampled_from(sorted(EVENTS))) for name in names}
    lines = ["machine:", "  initial: A", "  states:"]
    lines += [f"    {name}: {{action: {action}}}" for name, action in actions.items()]
    lines += [f"    {name}: {{final: true}}" for name in ends]
    lines.append("  transitions:")
    every = st.sampled_from([*names, *ends])
    for name, action in actions.items():
        overflow = ["overflow"] if action == "generate" and draw(st.booleans()) else []
        for event in [*EVENTS[action], *overflow, "limit", "failed"]:
            if draw(st.booleans()):
                guard = draw(st.sampled_from(GUARDS))
                when = f", conditions: '{guard}'" if guard else ""
                lines.append(f"    - {{trigger: {event}, source: {name}, dest: {draw(every)}{when}}}")
            lines.append(f"    - {{trigger: {event}, source: {name}, dest: {draw(every)}}}")
    if draw(st.booleans()):
        lines.append("    - {trigger: [truncated, aborted], source: '*', dest: Y}")
    limit = st.none() | st.integers(1, 3)
    values = [draw(limit) for _ in range(4)]
    seconds = draw(st.sampled_from(["null", "600", "5"]))
    shown = ["null" if value is None else str(value) for value in values]
    lines.append(
        f"limits: {{assistant_turns: {shown[0]}, user_turns: {shown[1]}, tool_calls: {shown[2]}, "
        f"condensations: {shown[3]}, "
        f"episode_seconds: {seconds}, turn_tokens: {TOKENS}, tool_seconds: {SECONDS['call_tools']}}}"
    )
    return "\n".join(lines) + "\n"


class Stand(NamedTuple):
    """An episode, exactly."""

    state: str
    turns: int
    user: int
    calls: int
    condensed: int
    newest: int
    """Calls of the newest reply that can be read."""
    late: bool


class Simulator:
    """Every episode, step by step, as the executor drives them; knows nothing of what it is held against.

    Args:
        ctx: The spec.
        cap: Counts are kept up to this number; `gains` has what each step really adds.
    """

    def __init__(self, ctx: CheckContext, cap: int = CAP) -> None:
        self.ctx = ctx
        self.limits = ctx.spec.limits
        self.cap = cap
        self.gains: dict[tuple[Stand, Stand], Gain] = {}
        """Step -> the most that it adds to each counter."""

    def moves(self, at: Stand) -> Iterator[tuple[str, Stand]]:
        """(event, how the episode then stands) of whatever may happen; its state is still the old one."""
        action = self.ctx.states[at.state].action
        limits = self.limits
        limit = {
            "generate": (at.turns, limits.assistant_turns),
            "ask_user": (at.user, limits.user_turns),
            "call_tools": (at.calls, limits.tool_calls),
            "condense": (at.condensed, limits.value_of("condensations")),
        }.get(str(action), (0, None))
        if at.late or (limit[1] is not None and limit[0] >= limit[1]):
            yield "limit", at
            return
        if limits.episode_seconds is not None:
            yield "limit", at._replace(late=True)
        yield "failed", at
        if action == "generate":
            yield "limit", at  # the context is full
            if self.ctx.machine.leaving(at.state, "overflow"):
                yield "overflow", at  # it is full, and the machine makes room
            turns = min(at.turns + 1, self.cap)
            done = [("answered", 0)]
            done += [("tool_calls", calls) for calls in range(1, TOKENS + 1)]
            done += [(event, calls) for event in ("malformed", "truncated", "aborted") for calls in range(TOKENS + 1)]
            for event, calls in done:
                yield event, at._replace(turns=turns, newest=calls)
        elif action == "ask_user":
            for event in ("feedback", "satisfied"):
                yield event, at._replace(user=min(at.user + 1, self.cap))
        elif action == "condense":
            for event in ("condensed", "unchanged"):
                yield event, at._replace(condensed=min(at.condensed + 1, self.cap))
        elif action == "call_tools":
            most = self.cap if limits.tool_calls is None else limits.tool_calls
            yield "results", at._replace(calls=min(at.calls + at.newest, most))
        else:
            yield "ready", at

    def seconds(self, at: Stand) -> float:
        """What the action may take here: nothing where it is not begun, and none where no tool is called."""
        state = self.ctx.states[at.state]
        if state.final or all(event == "limit" for event, _ in self.moves(at)):
            return 0.0
        return 0.0 if state.action == "call_tools" and not at.newest else SECONDS[str(state.action)]

    def lead(self, event: str, at: Stand) -> Iterator[str]:
        """Where the event may lead."""
        for edge in self.ctx.machine.leaving(at.state, event):
            if edge.conditions == FREE:
                yield edge.dest
                if event != "failed":
                    yield from self.lead("failed", at)  # the fact was never told
                continue
            if edge.conditions is None or Guard(edge.conditions).evaluate(self.context(at)):
                yield edge.dest
                return
        if event != "failed":
            yield from self.lead("failed", at)

    def context(self, at: Stand) -> dict[str, Any]:
        limits = {name: 2**53 - 1 if value is None else value for name, value in self.limits}
        return {"turns": {"assistant": at.turns, "user": at.user}, "tools": {"calls": at.calls}, "limits": limits}

    def steps(self, at: Stand) -> set[Stand]:
        state = self.ctx.states[at.state]
        if state.final:
            return set()
        found = set()
        for event, after in self.moves(at):
            gain = self.gain(event, at)
            for outcome in (event, *(["failed"] if any(gain) else [])):  # a rule that fails after the action has worked
                for dest in self.lead(outcome, after):
                    step = after._replace(state=dest)
                    known = self.gains.get((at, step), gain)
                    most = [max(one, other) for one, other in zip(known, gain, strict=True)]
                    self.gains[at, step] = (most[0], most[1], most[2], most[3])
                    found.add(step)
        return found

    def gain(self, event: str, at: Stand) -> Gain:
        """What a state's event adds to the counters."""
        if event in ("limit", "failed", "overflow"):
            return 0, 0, 0, 0
        action, limit = self.ctx.states[at.state].action, self.limits.tool_calls
        calls = at.newest if limit is None else min(at.newest, limit - at.calls)
        return (
            int(action == "generate"),
            int(action == "condense"),
            int(action == "ask_user"),
            calls if action == "call_tools" else 0,
        )

    def everything(self) -> dict[Stand, set[Stand]]:
        start = Stand("A", 0, 0, 0, 0, 0, False)
        found: dict[Stand, set[Stand]] = {}
        waiting = [start]
        while waiting:
            at = waiting.pop()
            if at not in found:
                found[at] = self.steps(at)
                waiting += found[at]
        return found


def on_cycle(found: dict[Stand, set[Stand]]) -> bool:
    """Whether an episode can come back to where it stood, by taking away what cannot, over and over."""
    left = {at: set(steps) for at, steps in found.items()}
    while True:
        ends = {at for at, steps in left.items() if not steps & left.keys()}
        if not ends:
            return bool(left)
        for at in ends:
            del left[at]


def endless(found: dict[Stand, set[Stand]]) -> set[Stand]:
    """How an episode may stand and come back to: tried from each."""
    left = {at: set(steps) for at, steps in found.items()}
    while ends := {at for at, steps in left.items() if not steps & left.keys()}:
        for at in ends:
            del left[at]
    back = set()
    for start in left:
        seen: set[Stand] = set()
        waiting = [start]
        while waiting:
            new = {step for step in found[waiting.pop()] if step in left} - seen
            seen |= new
            waiting += new
        if start in seen:
            back.add(start)
    return back


def most_count(simulator: Simulator, found: dict[Stand, set[Stand]], which: int) -> float:
    """The most of a counter (its place in `NAMES`) in an episode; infinite where it can add to it for ever."""
    graph = nx.DiGraph((at, step) for at, steps in found.items() for step in steps)
    graph.add_nodes_from(found)
    groups = nx.condensation(graph)
    group = groups.graph["mapping"]
    for (at, step), gain in simulator.gains.items():
        if gain[which] and group[at] == group[step]:
            return inf
    best = dict.fromkeys(groups, 0)
    between: dict[tuple[int, int], int] = {}
    for (at, step), gain in simulator.gains.items():
        edge = group[at], group[step]
        between[edge] = max(between.get(edge, 0), gain[which])
    for number in nx.topological_sort(groups):
        for after in groups.successors(number):
            best[after] = max(best[after], best[number] + between[number, after])
    return max(best.values())


def most_seconds(simulator: Simulator, found: dict[Stand, set[Stand]]) -> float:
    """The longest that an episode's actions may take together; infinite where it can go on for ever."""
    cost = {at: simulator.seconds(at) for at in found}
    if any(cost[at] > 0 for at in endless(found)):
        return inf
    value = dict.fromkeys(found, 0.0)
    changed = True
    while changed:  # what goes round costs nothing, so this ends
        changed = False
        for at in reversed(found):
            new = cost[at] + max((value[step] for step in found[at]), default=0.0)
            changed, value[at] = changed or new != value[at], new
    return value[next(iter(found))]
