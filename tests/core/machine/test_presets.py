"""Presets handle everything, and resolving adds nothing of its own."""

from __future__ import annotations

import pytest

from engine.actions.facts import ACTIONS
from engine.machine.guards import guard_problems
from engine.machine.machine import ResolvedTransition, resolve_machine
from engine.machine.presets import PRESETS
from engine.schemas.limits import ALWAYS
from engine.schemas.machine import CORE_PRESETS, MachineSpec, StateSpec, TransitionSpec


@pytest.mark.parametrize("name", PRESETS)
def test_every_event_of_a_presets_states_has_an_unguarded_last_transition(name: str) -> None:
    machine = resolve_machine(MachineSpec(preset=name))
    for state, spec in machine.states.items():
        if spec.final:
            assert machine.leaving(state) == []
            continue
        assert spec.action is not None
        for event in (*(ACTIONS[spec.action].events or ()), *ALWAYS):
            found = machine.leaving(state, event)
            assert [t.conditions is None for t in found] == [False] * (len(found) - 1) + [True], (state, event)


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_states_are_reachable_and_its_guards_right(name: str) -> None:
    machine = resolve_machine(MachineSpec(preset=name))
    reached = [machine.initial]
    for state in reached:
        reached += [t.dest for t in machine.leaving(state) if t.dest not in reached]
    assert set(reached) == set(machine.states)
    assert machine.final == {"DONE"}
    assert [p for t in machine.transitions if t.conditions for p in guard_problems(t.conditions)] == []


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("event", ["aborted", "limit", "failed"])
def test_a_turn_without_a_whole_reply_ends_the_episode(name: str, event: str) -> None:
    machine = resolve_machine(MachineSpec(preset=name))
    assert [(t.dest, t.conditions) for t in machine.leaving("GENERATING", event)] == [("DONE", None)]


@pytest.mark.parametrize("name", PRESETS)
def test_a_reply_that_was_cut_off_is_judged_where_something_outside_judges_replies(name: str) -> None:
    machine = resolve_machine(MachineSpec(preset=name))
    judging = ("STEPPING", "AGENT_RUNNING")
    dest = next((state for state in judging if state in machine.states), "DONE")
    assert [(t.dest, t.conditions) for t in machine.leaving("GENERATING", "truncated")] == [(dest, None)]


def test_the_presets_of_the_core_are_those_that_a_spec_may_name() -> None:
    assert tuple(PRESETS)[: len(CORE_PRESETS)] == CORE_PRESETS


def test_the_default_preset_is_the_documented_machine() -> None:
    machine = resolve_machine(MachineSpec(preset="tools_and_user"))
    assert {name: (state.action, state.final) for name, state in machine.states.items()} == {
        "PENDING": ("reset", False),
        "GENERATING": ("generate", False),
        "AWAITING_TOOL": ("call_tools", False),
        "AWAITING_USER_FEEDBACK": ("ask_user", False),
        "DONE": ("score", True),
    }
    written = [(t.source, t.trigger, t.dest, t.conditions) for t in machine.transitions if not t.wildcard]
    assert written == [
        ("PENDING", "ready", "GENERATING", None),
        ("GENERATING", "tool_calls", "AWAITING_TOOL", None),
        ("GENERATING", "malformed", "AWAITING_USER_FEEDBACK", None),
        ("GENERATING", "answered", "AWAITING_USER_FEEDBACK", "turns.user < limits.user_turns"),
        ("GENERATING", "answered", "DONE", None),
        ("AWAITING_TOOL", "results", "GENERATING", None),
        ("AWAITING_USER_FEEDBACK", "satisfied", "DONE", None),
        ("AWAITING_USER_FEEDBACK", "feedback", "GENERATING", None),
    ]
    standing = ["PENDING", "GENERATING", "AWAITING_TOOL", "AWAITING_USER_FEEDBACK"]
    assert [(t.source, t.trigger, t.dest) for t in machine.transitions if t.wildcard] == [
        (state, event, "DONE") for state in standing for event in ("limit", "failed", "truncated", "aborted")
    ]
    assert {t.index for t in machine.transitions} == {None}


def test_a_spec_adds_states_and_its_transitions_come_first() -> None:
    machine = resolve_machine(
        MachineSpec(
            preset="tools",
            states={"CONDENSING": StateSpec(action="my.actions:condense")},
            transitions=[
                TransitionSpec(
                    trigger="results", source="AWAITING_TOOL", dest="CONDENSING", conditions="tokens.context > 9"
                ),
                TransitionSpec(trigger="condensed", source="CONDENSING", dest="GENERATING"),
            ],
        )
    )
    assert machine.initial == "PENDING"
    assert list(machine.states) == ["PENDING", "GENERATING", "AWAITING_TOOL", "DONE", "CONDENSING"]
    assert machine.leaving("AWAITING_TOOL", "results") == [
        ResolvedTransition(
            trigger="results", source="AWAITING_TOOL", dest="CONDENSING", conditions="tokens.context > 9", index=0
        ),
        ResolvedTransition(trigger="results", source="AWAITING_TOOL", dest="GENERATING"),
    ]
    assert [(t.trigger, t.dest, t.index) for t in machine.leaving("CONDENSING")] == [
        ("condensed", "GENERATING", 1),
        ("limit", "DONE", None),
        ("failed", "DONE", None),
        ("truncated", "DONE", None),
        ("aborted", "DONE", None),
    ]


def test_a_transition_of_the_preset_that_can_never_be_taken_is_left_out() -> None:
    machine = resolve_machine(
        MachineSpec(
            preset="tools",
            states={"AWAITING_TOOL": StateSpec(action="score", final=True)},
            transitions=[TransitionSpec(trigger="answered", source="GENERATING", dest="AWAITING_TOOL")],
        )
    )
    assert machine.leaving("GENERATING", "answered") == [
        ResolvedTransition(trigger="answered", source="GENERATING", dest="AWAITING_TOOL", index=0)
    ]
    assert machine.leaving("AWAITING_TOOL") == []
    assert machine.final == {"AWAITING_TOOL", "DONE"}


def test_what_a_spec_itself_writes_is_kept_even_where_it_is_wrong() -> None:
    spec = MachineSpec(
        initial="A",
        states={"A": StateSpec(action="generate"), "B": StateSpec(final=True)},
        transitions=[
            TransitionSpec(trigger=["x", "y", "x"], source=["A", "B", "A"], dest="NOWHERE"),
            TransitionSpec(trigger="x", source="*", dest="B"),
        ],
    )
    assert resolve_machine(spec).transitions == [
        ResolvedTransition(trigger="x", source="A", dest="NOWHERE", index=0),
        ResolvedTransition(trigger="y", source="A", dest="NOWHERE", index=0),
        ResolvedTransition(trigger="x", source="B", dest="NOWHERE", index=0),
        ResolvedTransition(trigger="y", source="B", dest="NOWHERE", index=0),
        ResolvedTransition(trigger="x", source="A", dest="B", index=1, wildcard=True),
        ResolvedTransition(trigger="limit", source="A", dest="B", wildcard=True),
        ResolvedTransition(trigger="failed", source="A", dest="B", wildcard=True),
    ]


def test_limits_and_failures_lead_to_the_final_state_unless_the_spec_says_otherwise() -> None:
    keys = {"A": StateSpec(action="generate"), "B": StateSpec(action="ask_user"), "END": StateSpec(final=True)}
    written = [
        TransitionSpec(trigger="failed", source="A", dest="B"),
        TransitionSpec(trigger="limit", source="A", dest="B", conditions="turns.user < 1"),
    ]
    machine = resolve_machine(MachineSpec(initial="A", states=keys, transitions=written))
    assert [(t.source, t.trigger, t.dest, t.conditions) for t in machine.transitions] == [
        ("A", "failed", "B", None),
        ("A", "limit", "B", "turns.user < 1"),
        ("A", "limit", "END", None),
        ("B", "limit", "END", None),
        ("B", "failed", "END", None),
    ]


def test_with_several_final_states_the_spec_says_where_limits_and_failures_lead() -> None:
    keys = {"A": StateSpec(action="generate"), "WON": StateSpec(final=True), "LOST": StateSpec(final=True)}
    assert resolve_machine(MachineSpec(initial="A", states=keys)).transitions == []


def test_a_spec_may_begin_elsewhere_than_its_preset() -> None:
    assert resolve_machine(MachineSpec(preset="tools", initial="GENERATING")).initial == "GENERATING"
