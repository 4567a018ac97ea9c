"""The worst case, boundedness and reachability agree with walking through every episode that there can be."""

from __future__ import annotations

import random
from math import inf
from pathlib import Path

import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machine_simulator import (
    NAMES,
    SPEC_CODE,
    TOKENS,
    Simulator,
    Stand,
    endless,
    machines,
    most_count,
    most_seconds,
    on_cycle,
)

from engine.machine.machine import Machine
from engine.schemas.limits import LimitsSpec
from engine.spec.load import load_spec
from engine.validate import check_spec
from engine.validate.context import CheckContext
from engine.validate.explore import cycles_of
from engine.validate.worst_case import Bound, most_counts, worst_case

pytestmark = pytest.mark.usefixtures("in_folder")

HEAD = """\
spec: episode/v1
name: demo
model: {path: org/m}
tasks: {source: inline, rows: [{q: a}, {q: b}]}
prompt: [{role: user, content: "{{q}}"}]
"""


def load(lines: str) -> CheckContext:
    Path("s.yaml").write_text(HEAD + lines)
    return CheckContext(load_spec("s.yaml"))


@settings(max_examples=examples(75), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(machines())
def test_it_agrees_with_every_episode_that_there_can_be(machine: str) -> None:
    ctx = load(machine)
    simulator = Simulator(ctx)
    found = simulator.everything()
    graph = ctx.graph
    assert graph.exact
    assert set(graph.by_state) == {at.state for at in found}
    said = {item.path[-1] for item in check_spec(ctx.loaded) if item.rule == "machine.unreachable"}
    assert said == set(ctx.states) - set(graph.by_state)
    assert bool(cycles_of(graph)[0]) == on_cycle(found)
    assert list(most_counts(graph)) == [most_count(simulator, found, which) for which in range(len(NAMES))]


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(machines(), st.integers(1, 3))
def test_every_number_of_the_worst_case_is_met_and_never_exceeded(machine: str, samples: int) -> None:
    ctx = load(machine + SPEC_CODE + f"rollout: {{samples_per_task: {samples}, live_episodes: 2}}\n")
    simulator = Simulator(ctx)
    found = simulator.everything()
    worst = worst_case(ctx)
    assert (worst.exact, worst.tasks, worst.episodes) == (True, 2, 2 * samples)

    met = {name: most_count(simulator, found, which) for which, name in enumerate(NAMES)}
    met["sampled_tokens"] = TOKENS * met["assistant_turns"]
    for name, count in met.items():
        assert worst.episode[name].most == (None if count == inf else count), name
        assert worst.run[name].most == (None if count == inf else count * 2 * samples)
    assert worst.episode["branches"] == worst.episode["assistant_turns"]

    way, limit = most_seconds(simulator, found), ctx.spec.limits.episode_seconds
    most_time = min(way, inf if limit is None else limit)
    assert (worst.episode["seconds"].most or 0.0) == (0.0 if most_time == inf else most_time)
    assert (worst.episode["seconds"].most is None) == (most_time == inf)
    assert worst.run["seconds"].most == (None if most_time == inf else most_time * samples)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(machines())
def test_dead_ends_and_endless_ways_are_those_that_there_are(machine: str) -> None:
    ctx = load(machine + SPEC_CODE)
    found = Simulator(ctx).everything()
    told = check_spec(ctx.loaded)
    back = endless(found)
    late = any(at.late for at in back)
    timed = ctx.spec.limits.episode_seconds is not None
    ending = {name for name, state in ctx.states.items() if state.final} | ctx.ending
    if any(at.state in ending for at in back):
        rules = {item.rule for item in told}
        assert ("machine.unbounded-cycle" in rules) or (timed and not late and "machine.cycle-by-time" in rules)
    if not back:
        assert not {item.rule for item in told} & {"machine.unbounded-cycle", "machine.cycle-by-time"}
    stuck = {item.path[-1] for item in told if item.rule == "machine.done-unreachable"}
    for at in found:  # where no end is said to be in reach, no episode ever ends
        if at.state in stuck:
            seen, waiting = {at}, [at]
            while waiting:
                new = found[waiting.pop()] - seen
                seen |= new
                waiting += new
            assert not any(ctx.states[each.state].final for each in seen)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(machines(), st.randoms(use_true_random=False))
def test_no_episode_of_the_real_machine_goes_beyond_it(machine: str, chance: random.Random) -> None:
    ctx = load(machine)
    most = most_counts(ctx.graph)
    walked = Machine(ctx.machine)
    simulator = Simulator(ctx, cap=1000)
    at = Stand(walked.initial, 0, 0, 0, 0, 0, False)
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
        assert at.state in ctx.graph.by_state
        assert at.turns <= most[0]
        assert at.condensed <= most[1]
        assert at.user <= most[2]
        assert at.calls <= most[3]


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


@pytest.mark.slow
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
    from engine.validate.explore import explore

    for name in ("assistant_turns", "user_turns", "tool_calls"):
        wider: LimitsSpec = ctx.spec.limits.model_copy(update={name: 6})
        assert all(a <= b for a, b in zip(base, most_counts(explore(ctx.chart(wider))), strict=True))
