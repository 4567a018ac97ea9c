"""One machine for all episodes: a pure function of state, event and context."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineError, GuardError, SpecError
from engine.machine.guards import Guard
from engine.machine.machine import Machine, resolve_machine
from engine.machine.presets import PRESETS
from engine.schemas.machine import MachineSpec, StateSpec, TransitionSpec


def user_turns(taken: int, most: int = 3) -> Any:
    return lambda names: {"turns": {"user": taken}, "limits": {"user_turns": most}}


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine(resolve_machine(MachineSpec(preset="tools_and_user")))


def test_the_first_transition_whose_condition_holds_is_taken(machine: Machine) -> None:
    assert machine.next("GENERATING", "answered", user_turns(2)) == "AWAITING_USER_FEEDBACK"
    assert machine.next("GENERATING", "answered", user_turns(3)) == "DONE"


def test_what_hangs_on_no_condition_reads_no_context(machine: Machine) -> None:
    def context(names: frozenset[str]) -> Mapping[str, Any]:
        raise AssertionError(f"{names} were asked for")

    assert machine.next("GENERATING", "tool_calls", context) == "AWAITING_TOOL"
    assert machine.next("AWAITING_TOOL", "results", context) == "GENERATING"


def test_only_the_variables_that_a_guard_reads_are_asked_for(machine: Machine) -> None:
    asked: list[frozenset[str]] = []

    def context(names: frozenset[str]) -> Mapping[str, Any]:
        asked.append(names)
        return {"turns": {"user": 0}, "limits": {"user_turns": 1}}

    machine.next("GENERATING", "tool_calls", context)
    assert asked == []
    machine.next("GENERATING", "answered", context)
    assert asked == [frozenset({"turns", "limits"})]


def test_an_unhandled_event_names_what_the_state_does_handle(machine: Machine) -> None:
    with pytest.raises(EngineError) as caught:
        machine.next("AWAITING_TOOL", "answered", user_turns(0))
    assert str(caught.value) == (
        "AWAITING_TOOL does not handle `answered`; it handles `results`, `limit`, `failed`, `truncated`, `aborted`. "
        "Add a transition with trigger `answered` and source AWAITING_TOOL"
    )
    assert (caught.value.kind, caught.value.blame) == ("unhandled_event", "spec")
    with pytest.raises(EngineError, match="DONE does not handle `limit`; it handles no event"):
        machine.next("DONE", "limit", user_turns(0))


def one_guard(conditions: str) -> Machine:
    return Machine(
        resolve_machine(
            MachineSpec(
                initial="A",
                states={"A": StateSpec(action="generate"), "B": StateSpec(final=True)},
                transitions=[TransitionSpec(trigger="go", source="A", dest="B", conditions=conditions)],
            )
        )
    )


def test_all_conditions_hold_and_none_of_unless() -> None:
    written = TransitionSpec(
        trigger="go",
        source=["A", "B"],
        dest="=",
        conditions=["turns.user > 1 || turns.user < 0", "turns.user < 9 // before the ninth"],
        unless=["turns.user == 5", "turns.user == 6"],
    )
    assert written.guard == (
        "(turns.user > 1 || turns.user < 0) && (turns.user < 9 // before the ninth\n) && "
        "!(turns.user == 5) && !(turns.user == 6)"
    )
    machine = Machine(
        resolve_machine(
            MachineSpec(
                initial="A",
                states={
                    "A": StateSpec(action="generate"),
                    "B": StateSpec(action="generate"),
                    "Z": StateSpec(final=True),
                },
                transitions=[
                    written,
                    TransitionSpec(trigger="go", source="A", dest="Z", unless="turns.user > 7"),
                    TransitionSpec(trigger="go", source="*", dest="B", conditions=[], unless=[]),
                ],
            )
        )
    )
    leads = {state: "".join(machine.next(state, "go", user_turns(turn)) for turn in range(10)) for state in "AB"}
    assert leads == {"A": "ZZAAAZZAAB", "B": "BBBBBBBBBB"}
    assert machine.settled.get(("A", "go")) is None


def test_where_no_condition_holds_the_advice_is_an_unguarded_last_one() -> None:
    with pytest.raises(EngineError) as caught:
        one_guard("turns.user > 5").next("A", "go", user_turns(0))
    assert str(caught.value) == (
        "`go` in A: no condition of its transitions holds (`turns.user > 5`); add a last one for `go` without `conditions`"
    )


def test_a_guard_that_fails_names_its_transition() -> None:
    with pytest.raises(GuardError) as caught:
        one_guard("feedback.right").next("A", "go", lambda names: {"feedback": {}})
    assert str(caught.value) == (
        "A --go--> B: guard `feedback.right`: `feedback.right` does not exist; write `has(feedback.right) && feedback.right`"
    )
    assert caught.value.blame == "spec"


def test_states_that_are_not_there_are_all_told() -> None:
    with pytest.raises(SpecError) as caught:
        Machine(
            resolve_machine(
                MachineSpec(
                    preset="tools",
                    initial="PENDNG",
                    transitions=[TransitionSpec(trigger="x", source="GENERATIN", dest="NOWHERE")],
                )
            )
        )
    assert [(d.rule, d.message, d.fix, d.path) for d in caught.value.diagnostics] == [
        ("machine.unknown-state", "there is no state `PENDNG`", "did you mean `PENDING`?", ("machine", "initial")),
        (
            "machine.unknown-state",
            "there is no state `GENERATIN`",
            "did you mean `GENERATING`?",
            ("machine", "transitions", 0, "source"),
        ),
        (
            "machine.unknown-state",
            "there is no state `NOWHERE`",
            "known: PENDING, GENERATING, AWAITING_TOOL, DONE",
            ("machine", "transitions", 0, "dest"),
        ),
    ]


def test_a_condition_that_is_not_cel_is_refused() -> None:
    with pytest.raises(GuardError, match=r"guard `turns\.user <`"):
        one_guard("turns.user <")


def test_a_transition_may_lead_back_to_its_own_state() -> None:
    machine = Machine(
        resolve_machine(
            MachineSpec(
                initial="A",
                states={"A": StateSpec(action="generate"), "B": StateSpec(final=True)},
                transitions=[
                    TransitionSpec(trigger="go", source="A", dest="A", conditions="turns.user < 2"),
                    TransitionSpec(trigger="go", source="A", dest="B"),
                ],
            )
        )
    )
    assert [machine.next("A", "go", user_turns(n)) for n in range(3)] == ["A", "A", "B"]


def test_threads_and_tasks_get_the_answers_of_one_alone(machine: Machine) -> None:
    asked = [("GENERATING", "answered", n % 5) for n in range(4000)] + [("AWAITING_TOOL", "results", 0)] * 1000

    def answer(question: tuple[str, str, int]) -> str:
        state, event, taken = question
        return machine.next(state, event, user_turns(taken))

    alone = [answer(question) for question in asked]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(answer, asked)) == alone

    async def together() -> list[str]:
        return await asyncio.gather(*(asyncio.to_thread(answer, question) for question in asked[:200]))

    assert asyncio.run(together()) == alone[:200]


STATES = ["A", "B", "C"]
EVENTS = ["x", "y"]
GUARDS = [None, "turns.user < 2", "turns.user == 1", "turns.user > 3"]
transitions = st.lists(
    st.builds(
        TransitionSpec,
        trigger=st.sampled_from(EVENTS),
        source=st.sampled_from([*STATES, "*"]),
        dest=st.sampled_from([*STATES, "END"]),
        conditions=st.sampled_from(GUARDS),
    ),
    min_size=1,
    max_size=8,
)


@given(transitions, st.sampled_from(STATES), st.sampled_from(EVENTS), st.integers(0, 5))
def test_next_is_the_first_match_of_the_list(written: list[TransitionSpec], state: str, event: str, taken: int) -> None:
    states = {name: StateSpec(action="generate") for name in STATES} | {"END": StateSpec(final=True)}
    machine = Machine(resolve_machine(MachineSpec(initial="A", states=states, transitions=written)))
    context = user_turns(taken)
    expected = next(
        (
            t.dest
            for t in written
            if t.trigger == event
            and t.source in (state, "*")
            and (t.conditions is None or Guard(t.conditions).evaluate(context(frozenset())))
        ),
        None,
    )
    if expected is None:
        with pytest.raises(EngineError):
            machine.next(state, event, context)
    else:
        assert machine.next(state, event, context) == expected


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_compiles(name: str) -> None:
    machine = Machine(resolve_machine(MachineSpec(preset=name)))
    assert (machine.initial, machine.final) == ("PENDING", {"DONE"})
    first = "AGENT_RUNNING" if name == "agent" else "GENERATING"
    assert machine.next("PENDING", "ready", user_turns(0)) == first
