"""The worst case, boundedness and reachability agree with walking through every episode that there can be."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.checks import check_spec
from engine.checks.context import CheckContext
from engine.checks.loops import cycles_of
from engine.checks.worst_case import Bound, most_counts, worst_case
from engine.machine.compile import EpisodeMachine
from engine.machine.guards import Guard
from engine.spec.load import load_spec
from schemas.episode import LimitsSpec

HEAD = """\
spec: episode/v1
name: demo
model: {path: m}
tasks: {source: inline, rows: [{q: a}, {q: b}]}
prompt: [{role: user, content: "{{q}}"}]
"""
EVENTS = {
    "reset": ["ready"],
    "generate": ["answered", "tool_calls", "malformed"],
    "call_tools": ["results"],
    "ask_user": ["feedback", "satisfied"],
}
TOKENS = 2
"""Of one turn: it makes at most so many calls."""
CAP = 9
"""A count beyond it is called unbounded."""
FREE = "facts.x == 1"
"""What nobody can know beforehand."""
GUARDS = [None, None, "turns.assistant < 2", "turns.user >= 1", "turns.user < limits.user_turns", FREE, "true", "false"]


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(lines: str) -> CheckContext:
    Path("s.yaml").write_text(HEAD + lines)
    return CheckContext(load_spec("s.yaml"))


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
        for event in [*EVENTS[action], "limit", "failed"]:
            if draw(st.booleans()):
                guard = draw(st.sampled_from(GUARDS))
                when = f", conditions: '{guard}'" if guard else ""
                lines.append(f"    - {{trigger: {event}, source: {name}, dest: {draw(every)}{when}}}")
            lines.append(f"    - {{trigger: {event}, source: {name}, dest: {draw(every)}}}")
    if draw(st.booleans()):
        lines.append("    - {trigger: [truncated, aborted], source: '*', dest: Y}")
    limit = st.none() | st.integers(1, 3)
    values = [draw(limit) for _ in range(3)]
    seconds = draw(st.sampled_from(["null", "600"]))
    shown = ["null" if value is None else str(value) for value in values]
    lines.append(
        f"limits: {{assistant_turns: {shown[0]}, user_turns: {shown[1]}, tool_calls: {shown[2]}, "
        f"episode_seconds: {seconds}, turn_tokens: {TOKENS}}}"
    )
    return "\n".join(lines) + "\n"


class Stand(NamedTuple):
    """An episode, exactly."""

    state: str
    turns: int
    user: int
    calls: int
    newest: int
    """Calls of the newest reply that can be read."""
    late: bool


class Simulator:
    """Every episode, step by step, as the executor drives them; knows nothing of what it is held against."""

    def __init__(self, ctx: CheckContext) -> None:
        self.ctx = ctx
        self.limits = ctx.spec.limits

    def moves(self, at: Stand) -> Iterator[tuple[str, Stand]]:
        """(event, how the episode then stands) of whatever may happen; its state is still the old one."""
        action = self.ctx.states[at.state].action
        limits = self.limits
        limit = {
            "generate": (at.turns, limits.assistant_turns),
            "ask_user": (at.user, limits.user_turns),
            "call_tools": (at.calls, limits.tool_calls),
        }.get(str(action), (0, None))
        if at.late or (limit[1] is not None and limit[0] >= limit[1]):
            yield "limit", at
            return
        if limits.episode_seconds is not None:
            yield "limit", at._replace(late=True)
        yield "failed", at
        if action == "generate":
            yield "limit", at  # the context is full
            turns = min(at.turns + 1, CAP)
            done = [("answered", 0)]
            done += [("tool_calls", calls) for calls in range(1, TOKENS + 1)]
            done += [(event, calls) for event in ("malformed", "truncated", "aborted") for calls in range(TOKENS + 1)]
            for event, calls in done:
                yield event, at._replace(turns=turns, newest=calls)
        elif action == "ask_user":
            for event in ("feedback", "satisfied"):
                yield event, at._replace(user=min(at.user + 1, CAP))
        elif action == "call_tools":
            most = CAP if limits.tool_calls is None else limits.tool_calls
            yield "results", at._replace(calls=min(at.calls + at.newest, most))
        else:
            yield "ready", at

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
            for outcome in (event, *(["failed"] if after.turns + after.user + after.calls > 0 else [])):
                if outcome == event or (event != "limit" and self._worked(at, after)):
                    found |= {after._replace(state=dest) for dest in self.lead(outcome, after)}
        return found

    @staticmethod
    def _worked(at: Stand, after: Stand) -> bool:
        return (at.turns, at.user, at.calls, at.newest) != (after.turns, after.user, after.calls, after.newest)

    def everything(self) -> dict[Stand, set[Stand]]:
        start = Stand("A", 0, 0, 0, 0, False)
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


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(machines())
def test_it_agrees_with_every_episode_that_there_can_be(machine: str) -> None:
    ctx = load(machine)
    found = Simulator(ctx).everything()
    graph = ctx.graph
    assert graph.exact
    assert graph.states == {at.state for at in found}
    said = {item.path[-1] for item in check_spec(ctx.loaded) if item.rule == "machine.unreachable"}
    assert said == set(ctx.states) - graph.states
    assert bool(cycles_of(graph).found) == on_cycle(found)
    met = [max(getattr(at, name) for at in found) for name in ("turns", "user", "calls")]
    most = [CAP if count == inf else min(count, CAP) for count in most_counts(graph)]
    assert most == met


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(machines(), st.randoms(use_true_random=False))
def test_no_episode_of_the_real_machine_goes_beyond_it(machine: str, chance: random.Random) -> None:
    ctx = load(machine)
    most = most_counts(ctx.graph)
    walked = EpisodeMachine(ctx.machine)
    simulator = Simulator(ctx)
    at = Stand(walked.initial, 0, 0, 0, 0, False)
    for _ in range(40):
        if at.state in walked.final:
            break
        event, after = chance.choice(list(simulator.moves(at)))
        context = {**simulator.context(after), "facts": {"x": chance.randint(0, 1)}}
        try:
            state = walked.next(at.state, event, lambda names, told=context: {name: told[name] for name in names})
        except Exception:  # noqa: BLE001  (an event that nothing handles ends the episode here)
            break
        at = after._replace(state=state)
        assert at.state in ctx.graph.states
        assert at.turns <= most[0]
        assert at.user <= most[1]
        assert at.calls <= most[2]


# ---- by hand


def bounds(lines: str) -> dict[str, Bound]:
    found = worst_case(load(lines))
    assert found.exact
    return dict(found.episode)


def test_a_single_turn_is_bounded_by_its_machine() -> None:
    found = bounds("machine: single_turn\nlimits: {turn_tokens: 64, episode_tokens: 100}\n")
    assert found["assistant_turns"] == Bound(1, "machine")
    assert found["user_turns"] == Bound(0, "machine")
    assert found["tool_calls"] == Bound(0, "machine")
    assert found["sampled_tokens"] == Bound(64, "machine × limits.turn_tokens")
    assert found["context_tokens"] == Bound(100, "limits.episode_tokens")


def test_calls_that_cannot_be_read_use_up_turns_and_no_calls() -> None:
    found = bounds("machine: tools\nlimits: {assistant_turns: 30, tool_calls: 3}\n")
    assert found["assistant_turns"] == Bound(30, "limits.assistant_turns")
    assert found["tool_calls"] == Bound(3, "limits.tool_calls")


def test_what_bounds_a_count_may_be_another_limit() -> None:
    found = bounds("machine: retry_with_feedback\nlimits: {assistant_turns: 50, user_turns: 2}\n")
    assert found["assistant_turns"] == Bound(3, "limits.user_turns")
    assert found["user_turns"] == Bound(2, "limits.user_turns")


def test_a_guard_may_bound_a_count() -> None:
    lines = (
        "machine:\n  preset: retry_with_feedback\n  transitions:\n"
        "    - {trigger: feedback, source: AWAITING_USER_FEEDBACK, dest: DONE, conditions: turns.user >= 4}\n"
    )
    found = bounds(lines + "limits: {assistant_turns: null, user_turns: null}\n")
    assert found["assistant_turns"] == Bound(4, "machine")
    assert found["user_turns"] == Bound(4, "machine")


def test_what_nothing_bounds_says_why() -> None:
    found = bounds("machine: tools\nlimits: {assistant_turns: null, tool_calls: 4, episode_seconds: null}\n")
    assert found["assistant_turns"] == Bound(None, "`limits.assistant_turns` is not set")
    assert found["tool_calls"] == Bound(4, "limits.tool_calls")
    assert found["seconds"].most is None


def test_seconds_are_the_deadlines_where_those_are_shorter() -> None:
    lines = "machine: retry_with_feedback\nuser: {use: 'json:x', timeout: 2s}\nbackend: {kind: scripted, replies: [], latency: 0.5}\n"
    found = bounds(lines + "limits: {user_turns: 3, episode_seconds: 600}\n")
    # Three answers of the user, and four replies.
    assert found["seconds"] == Bound(8.0, "the deadlines of what the episode does")
    found = bounds(lines + "limits: {user_turns: 3, episode_seconds: 5}\n")
    assert found["seconds"] == Bound(5.0, "limits.episode_seconds")


def test_the_run_is_tasks_times_samples_in_waves() -> None:
    lines = (
        "machine: single_turn\nlimits: {turn_tokens: 10, episode_seconds: 60}\n"
        "rollout: {samples_per_task: 8, live_episodes: 5}\n"
    )
    found = worst_case(load(lines))
    assert (found.tasks, found.episodes) == (2, 16)
    assert found.run["sampled_tokens"] == Bound(160, "machine × limits.turn_tokens")
    assert found.run["seconds"] == Bound(60.0 * 4, "limits.episode_seconds")


def test_a_machine_too_large_to_walk_through_has_its_limits() -> None:
    ctx = load("machine: tools_and_user\nlimits: {assistant_turns: 400, user_turns: 300, tool_calls: 200}\n")
    found = worst_case(ctx)
    assert not found.exact
    assert found.episode["assistant_turns"] == Bound(400, "limits.assistant_turns")
    assert found.episode["user_turns"] == Bound(300, "limits.user_turns")
    assert found.episode["tool_calls"] == Bound(200, "limits.tool_calls")


def test_wider_limits_never_cost_less() -> None:
    ctx = load("machine: tools_and_user\nlimits: {assistant_turns: 3, user_turns: 2, tool_calls: 2}\n")
    base = most_counts(ctx.graph)
    from engine.checks.explore import explore

    for name in ("assistant_turns", "user_turns", "tool_calls"):
        wider: LimitsSpec = ctx.spec.limits.model_copy(update={name: 6})
        assert all(a <= b for a, b in zip(base, most_counts(explore(ctx.chart(wider))), strict=True))
