"""Pictures show every state and every transition, and what they are written with cannot break them."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.machine.presets import PRESETS
from engine.plugins.pictures.draw import svg
from engine.plugins.pictures.graph import ANY_STATE, DrawnEdge, EdgeLine, mermaid, picture
from engine.schemas.machine import MachineSpec, StateSpec, TransitionSpec

SVG = "{http://www.w3.org/2000/svg}"
ALWAYS = {"limit", "failed"}
EVENTS = {
    "PENDING": frozenset({"ready"} | ALWAYS),
    "GENERATING": frozenset({"tool_calls", "answered", "truncated", "malformed", "aborted"} | ALWAYS),
    "AWAITING_TOOL": frozenset({"results"} | ALWAYS),
    "AWAITING_USER_FEEDBACK": frozenset({"feedback", "satisfied"} | ALWAYS),
}
DEFAULT = MachineSpec(preset="tools_and_user")


def test_the_default_machine_in_mermaid() -> None:
    assert (
        mermaid(DEFAULT, events=EVENTS)
        == """\
stateDiagram-v2
    state "PENDING<br/>reset" as PENDING
    state "GENERATING<br/>generate" as GENERATING
    state "AWAITING_TOOL<br/>call_tools" as AWAITING_TOOL
    state "AWAITING_USER_FEEDBACK<br/>ask_user" as AWAITING_USER_FEEDBACK
    state "DONE<br/>score" as DONE
    state "any state" as any_state
    [*] --> PENDING
    PENDING --> GENERATING : ready
    GENERATING --> AWAITING_TOOL : tool_calls
    GENERATING --> AWAITING_USER_FEEDBACK : malformed<br/>answered [turns.user #60; limits.user_turns]
    GENERATING --> DONE : answered<br/>truncated<br/>aborted
    AWAITING_TOOL --> GENERATING : results
    AWAITING_USER_FEEDBACK --> DONE : satisfied
    AWAITING_USER_FEEDBACK --> GENERATING : feedback
    any_state --> DONE : limit<br/>failed
    DONE --> [*]
"""
    )


def test_names_that_mermaid_would_read_as_its_own_are_written_otherwise() -> None:
    machine = MachineSpec(
        initial="a b",
        states={
            "a b": StateSpec(action="pkg.mod:act"),
            "end": StateSpec(action="generate"),
            "a_b": StateSpec(final=True),
        },
        transitions=[
            TransitionSpec(trigger="go;now", source="a b", dest="end", conditions="{'k': 1}.k == 2\n && '%%' != \"q\""),
            TransitionSpec(trigger="x", source="end", dest="a_b"),
        ],
    )
    assert (
        mermaid(machine)
        == """\
stateDiagram-v2
    state "a b<br/>pkg.mod#58;act" as a_b
    state "end<br/>generate" as end_
    state "a_b" as a_b_2
    state "any state" as any_state
    [*] --> a_b
    a_b --> end_ : go#59;now [#123;'k'#58; 1#125;.k == 2 #38;#38; '#37;#37;' != #34;q#34;]
    end_ --> a_b_2 : x
    any_state --> a_b_2 : limit<br/>failed
    a_b_2 --> [*]
"""
    )


COUNTS = {
    ("PENDING", "ready", "GENERATING"): 8,
    ("GENERATING", "answered", "AWAITING_USER_FEEDBACK"): 5,
    ("GENERATING", "answered", "DONE"): 2,
    ("PENDING", "failed", "DONE"): 1,
    ("GENERATING", "failed", "DONE"): 3,
}


def test_counts_stand_beside_their_events() -> None:
    edges = {(edge.source, edge.dest): edge for edge in picture(DEFAULT, COUNTS, EVENTS).edges}
    assert edges["PENDING", "GENERATING"].lines == (EdgeLine(event="ready", guard=None, count=8),)
    assert edges["GENERATING", "AWAITING_USER_FEEDBACK"].lines == (
        EdgeLine(event="malformed", guard=None, count=0),
        EdgeLine(event="answered", guard="turns.user < limits.user_turns", count=5),
    )
    assert edges[ANY_STATE, "DONE"].lines == (
        EdgeLine(event="limit", guard=None, count=0),
        EdgeLine(event="failed", guard=None, count=4),
    )
    assert edges["AWAITING_TOOL", "GENERATING"].count == 0
    assert edges["GENERATING", "DONE"].count == 2
    assert "    any_state --> DONE : limit ×0<br/>failed ×4\n" in mermaid(DEFAULT, COUNTS, EVENTS)


def test_without_counts_there_are_none() -> None:
    assert {edge.count for edge in picture(DEFAULT).edges} == {None}


def test_an_event_from_any_state_is_drawn_where_it_can_come() -> None:
    assert picture(DEFAULT).edges[-1] == DrawnEdge(
        source=ANY_STATE,
        dest="DONE",
        lines=tuple(
            EdgeLine(event=event, guard=None, count=None) for event in ("limit", "failed", "truncated", "aborted")
        ),
    )
    known = picture(DEFAULT, events=EVENTS).edges
    assert [edge for edge in known if edge.dest == "DONE"] == [
        DrawnEdge(
            source="GENERATING",
            dest="DONE",
            lines=tuple(
                EdgeLine(event=event, guard=None, count=None) for event in ("answered", "truncated", "aborted")
            ),
        ),
        DrawnEdge(
            source="AWAITING_USER_FEEDBACK", dest="DONE", lines=(EdgeLine(event="satisfied", guard=None, count=None),)
        ),
        DrawnEdge(
            source=ANY_STATE,
            dest="DONE",
            lines=(EdgeLine(event="limit", guard=None, count=None), EdgeLine(event="failed", guard=None, count=None)),
        ),
    ]


def words(root: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("name", PRESETS)
def test_svg_shows_every_state_event_and_guard(name: str) -> None:
    machine = MachineSpec(preset=name)
    root = ElementTree.fromstring(svg(machine, events=EVENTS))
    said = words(root)
    for edge in picture(machine, events=EVENTS).edges:
        for line in edge.lines:
            assert any(line.event in re.split(r"[ ,]+", text) for text in said)
            assert line.guard is None or any(f"[{line.guard}]" in text for text in said)
    states = {"PENDING", "GENERATING", "AWAITING_TOOL", "AWAITING_USER_FEEDBACK", "DONE", ANY_STATE}
    expected = states & {*picture(machine).machine.states, ANY_STATE}
    assert sorted(text for text in said if text in states) == sorted(expected)


def test_svg_marks_the_first_state_and_the_final_one() -> None:
    root = ElementTree.fromstring(svg(DEFAULT, events=EVENTS))
    (dot,) = root.iter(f"{SVG}circle")
    rounded = [rect for rect in root.iter(f"{SVG}rect") if rect.get("rx") in ("9", "6")]
    outlines = [rect for rect in rounded if rect.get("stroke")]
    assert len(outlines) == 7  # five states, the box for any state, and the second line round DONE
    (inner,) = [rect for rect in outlines if rect.get("rx") == "6"]
    (outer,) = [rect for rect in outlines if float(rect.get("x", 0)) + 4 == float(inner.get("x", 0))]
    assert float(outer.get("width", 0)) - float(inner.get("width", 0)) == pytest.approx(8, abs=0.11)
    first = min((float(rect.get("y", 0)), rect) for rect in outlines)[1]
    middle = float(first.get("x", 0)) + float(first.get("width", 0)) / 2
    assert float(dot.get("cx", 0)) == pytest.approx(middle, abs=0.11)
    assert float(dot.get("cy", 0)) == pytest.approx(float(first.get("y", 0)) - 24, abs=0.11)


def test_svg_draws_as_many_lines_as_there_are_edges() -> None:
    machine = MachineSpec(
        preset="tools",
        transitions=[TransitionSpec(trigger="malformed", source="GENERATING", dest="GENERATING")],
    )
    root = ElementTree.fromstring(svg(machine, events=EVENTS))
    lines = [path for path in root.iter(f"{SVG}path") if path.get("fill") == "none"]
    assert len(lines) == len(picture(machine, events=EVENTS).edges) == 6


def test_svg_wraps_a_long_guard_at_its_operators() -> None:
    guard = "tokens.context > limits.episode_tokens / 2 && !has(facts.condensed) && last.text.contains('<a&b>')"
    machine = MachineSpec(
        preset="tools",
        transitions=[TransitionSpec(trigger="results", source="AWAITING_TOOL", dest="DONE", conditions=guard)],
    )
    said = words(ElementTree.fromstring(svg(machine)))
    at = said.index("[tokens.context >")
    assert said[at - 1 : at + 4] == [
        "results",
        "[tokens.context >",
        "limits.episode_tokens / 2 &&",
        "!has(facts.condensed) &&",
        "last.text.contains('<a&b>')]",
    ]


NAMES = ["A", "B<C>", 'quo"te', "und & und", "é:ñ;#", "end"]
machines = st.builds(
    lambda initial, states, transitions: MachineSpec(
        initial=initial,
        states={
            name: StateSpec(action=None if final else "pkg.mod:run", final=final)
            for name, final in {**states, initial: False}.items()
        },
        transitions=transitions,
    ),
    st.sampled_from(NAMES),
    st.dictionaries(st.sampled_from(NAMES), st.booleans()),
    st.lists(
        st.builds(
            TransitionSpec,
            trigger=st.sampled_from(["go", "stop", "<&>"]),
            source=st.sampled_from([*NAMES, "*"]),
            dest=st.sampled_from([*NAMES, "nowhere"]),
            conditions=st.none() | st.text(alphabet="ab <>&|\"'[]{}#;:%\n", max_size=60),
        ),
        max_size=10,
    ),
)


@given(machines, st.booleans())
@settings(max_examples=examples(60))
def test_any_machine_can_be_drawn_even_a_wrong_one(machine: MachineSpec, counted: bool) -> None:
    counts = {("A", "go", "end"): 3} if counted else None
    said = words(ElementTree.fromstring(svg(machine, counts)))
    for name in picture(machine).machine.states:
        assert name in said
    for line in mermaid(machine, counts).splitlines()[1:]:
        assert re.fullmatch(
            r'    (state "[^"]*" as \w+|\[\*\] --> \w+|\w+ --> \[\*\]|\w+ --> \w+ : ([^;:"{}\n<>]|#\d+;|<br/>)+)', line
        ), line
