"""The machine's graph is checked before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import SpecError
from engine.spec.load import LoadedSpec, load_spec
from engine.validate import check_spec
from engine.validate.context import CheckContext

pytestmark = pytest.mark.usefixtures("in_folder")

HEAD = """\
spec: episode/v1
name: demo
model: {path: org/m}
tasks: {source: inline, rows: [{q: a}]}
prompt: [{role: user, content: "{{q}}"}]
"""


def load(lines: str) -> LoadedSpec:
    Path("s.yaml").write_text(HEAD + lines)
    return load_spec("s.yaml")


def found(lines: str) -> list[str]:
    return [str(item).removeprefix("s.yaml:") for item in check_spec(load(lines)) if item.severity != "info"]


OWN = """\
machine:
  initial: A
  states:
    A: {action: generate}
    B: {action: call_tools}
    Z: {final: true}
  transitions:
    - {trigger: [answered, truncated, malformed, aborted], source: A, dest: Z}
    - {trigger: tool_calls, source: A, dest: B}
    - {trigger: results, source: B, dest: A}
    - {trigger: [limit, failed], source: "*", dest: Z}
tools: [{use: "textwrap:indent"}]
"""


def test_a_machine_of_ones_own_that_is_whole() -> None:
    assert [line for line in found(OWN) if "[machine." in line] == []


@pytest.mark.parametrize(
    ("old", "new", "problems"),
    [
        (
            "initial: A",
            "initial: C",
            ["7:12: error[machine.unknown-state] there is no state `C`; known: A, B, Z"],
        ),
        (
            "B: {action: call_tools}",
            "B: {}",
            [
                "10:5: error[machine.no-action] `B` has no action, so no event can lead out of it; "
                "give it an `action`, or make it `final: true`",
                "15:17: error[machine.unknown-event] `B` never emits the event `results`; known: failed, limit",
            ],
        ),
        (
            "trigger: results",
            "trigger: result",
            [
                "15:17: error[machine.unknown-event] `B` never emits the event `result`; did you mean `results`?",
                "10:5: error[machine.unhandled-event] `B` (call_tools) may end with `results`, which leads nowhere; "
                "add `{trigger: results, source: B, dest: …}`",
            ],
        ),
        (
            "[limit, failed], source",
            "[limit, faild], source",
            [
                "16:25: error[machine.unknown-event] no state emits the event `faild`; did you mean `failed`?",
            ],
        ),
        (
            "Z: {final: true}",
            "Z: {action: reset}",
            [
                "6:1: error[machine.done-unreachable] the machine has no final state; mark one with `final: true`",
                "11:5: error[machine.unhandled-event] `Z` (reset) may end with `ready`, which leads nowhere; "
                "add `{trigger: ready, source: Z, dest: …}`",
            ],
        ),
    ],
)
def test_what_is_wrong_with_a_machine(old: str, new: str, problems: list[str]) -> None:
    assert OWN.count(old) == 1
    assert [line for line in found(OWN.replace(old, new)) if "[machine." in line] == problems


def test_events_that_cut_an_episode_short_are_one_finding_with_the_line_to_write() -> None:
    lines = OWN.replace("Z: {final: true}", "Z: {final: true}\n    Y: {final: true}")
    lines = lines.replace("[answered, truncated, malformed, aborted]", "answered")
    lines = lines.replace('    - {trigger: [limit, failed], source: "*", dest: Z}\n', "")
    lines = lines.replace("trigger: tool_calls, source: A, dest: B", "trigger: tool_calls, source: A, dest: Y")
    assert [line for line in found(lines) if "[machine.unhandled-event]" in line] == [
        "13:3: error[machine.unhandled-event] `limit`, `failed`, `aborted`, `truncated`, `malformed` may happen in "
        'A, B, and lead nowhere; add `{trigger: [limit, failed, aborted, truncated, malformed], source: "*", '
        "dest: …}` as the last transition"
    ]


DRAFTS = """\
machine:
  initial: A
  states:
    A: {action: reset}
    DRAFT: {action: generate}
    ASK: {action: ask_user}
    REVISE: {action: generate}
    CHECK: {action: ask_user}
    END: {action: score, final: true}
  transitions:
    - {trigger: ready, source: A, dest: DRAFT}
    - {trigger: [answered, tool_calls], source: DRAFT, dest: ASK}
    - {trigger: feedback, source: ASK, dest: REVISE}
    - {trigger: [answered, tool_calls], source: REVISE, dest: CHECK}
    - {trigger: feedback, source: CHECK, dest: REVISE}
    - {trigger: [satisfied, truncated, malformed, aborted], source: "*", dest: END}
user: {use: "engine.environments.users.attempts:Attempts"}
rewards:
  reassign:
    - """
MISS = "error[rewards.no-such-turn] no turn of the model is sampled in a state"
LATER = "apply the rule in a state that comes after that turn alone, or add a `when` with a fact that says so"


@pytest.mark.parametrize(
    ("reassign", "findings"),
    [
        ("{at: CHECK, turn: last, to: {first: DRAFT}, share: 0.5}", []),
        ("{at: REVISE, op: add, turn: {last: REVISE}, value: 1}", []),
        ("{at: END, op: add, turn: {last: REVISE}, value: 1, when: turns.user > 1}", []),
        ("{at: CHECK, turn: {first: DRAFT}, to: {last: REVISE}, share: 0.5}", []),
        (
            "{at: ASK, turn: last, to: {last: REVISE}, share: 0.5}",
            [
                "25:33: error[rewards.no-such-turn] there is no turn `{last: REVISE}` when the rule applies: `ASK` comes before "
                "it; use a turn that exists, or apply the rule in a later state"
            ],
        ),
        (
            "{at: CHECK, turn: last, to: {last: REVISE}, share: 0.5}",
            [
                "25:7: error[rewards.unpayable] a transfer from `last` to `{last: REVISE}` is from a turn to itself; name two turns"
            ],
        ),
        (
            "{at: CHECK, turn: last, to: {first: REVISE}, share: 0.5}",
            [
                "25:7: warning[rewards.turn-may-miss] after turn 1, `last` and `{first: REVISE}` are the same: the episode would "
                "fail; add `when: turns.assistant > 2`"
            ],
        ),
        (
            "{at: END, op: add, turn: {last: REVISE}, value: 1}",
            [
                "25:7: warning[rewards.turn-may-miss] the rule may apply after one turn, when there is no turn `{last: REVISE}`: "
                "the episode would fail; add `when: turns.assistant > 1`"
            ],
        ),
        (
            "{at: CHECK, op: add, turn: {first: answered}, value: 1}",
            [
                "25:7: warning[rewards.turn-may-miss] the rule may apply after 2 turns, when there is no turn "
                f"`{{first: answered}}`: the episode would fail; {LATER}"
            ],
        ),
        (
            "{at: END, op: add, turn: {first: REVSE}, value: 1}",
            [f"25:40: {MISS} `REVSE` or ends with such an event; did you mean `REVISE`?"],
        ),
        (
            "{at: CHECK, turn: last, to: {first: ASK}, share: 1}",
            [
                f"25:43: {MISS} `ASK` or ends with such an event; known: DRAFT, REVISE, aborted, answered, malformed, "
                "tool_calls, truncated"
            ],
        ),
    ],
)
def test_turns_by_state_or_event_are_looked_for_on_every_path(reassign: str, findings: list[str]) -> None:
    assert [line for line in found(f"{DRAFTS}{reassign}\n") if "[rewards." in line] == findings


UNLESS = """\
machine:
  preset: retry_with_feedback
  transitions:
    - {trigger: answered, source: GENERATING, dest: "=", conditions: [turns.usr < 3, turns.user], unless: [last.txt == ""]}
    - {trigger: malformed, source: GENERATING, dest: DONE, unless: turns.user > 100}
    - {trigger: [malformed, answered], source: GENERATING, dest: "="}
user: {use: "textwrap:indent"}
limits: {assistant_turns: null}
"""


def test_each_of_several_conditions_is_marked_where_it_stands() -> None:
    assert [line for line in found(UNLESS) if "[code." not in line] == [
        "9:7: warning[machine.cycle-by-time] `GENERATING` -answered-> `GENERATING` can loop until "
        "`limits.episode_seconds`: no count limit bounds it; set `limits.assistant_turns`",
        "9:77: error[guard.unknown-name] `turns` has no field `usr`; did you mean `user`?",
        "9:86: error[guard.not-boolean] a guard must be true or false; this is an int; compare it",
        "9:113: error[guard.unknown-name] `last` has no field `txt`; did you mean `text`?",
        "10:68: warning[guard.constant] `turns.user > 100` never holds here, within the spec's limits; leave `unless` out",
    ]


def test_an_internal_transition_is_refused_with_the_fix() -> None:
    internal = "{trigger: answered, source: GENERATING, dest: null}"
    with pytest.raises(SpecError, match=r"6:92: error\[spec.bad-value\] .*internal transitions.*; write `dest: \"=\"`"):
        found(f"machine: {{preset: single_turn, transitions: [{internal}]}}\n")


TWO_FAULTS = """\
machine:
  initial: A
  states:
    A: {action: generate}
    B: {action: generate}
    Z: {action: score}
  transitions:
    - {trigger: answered, source: A, dest: B}
    - {trigger: answered, source: B, dest: Z}
    - {trigger: [truncated, malformed, aborted], source: "*", dest: Z}
"""


def test_what_follows_from_another_fault_is_not_a_finding() -> None:
    assert found(TWO_FAULTS) == [
        "9:5: error[machine.unhandled-event] `A`, `B` (generate) may end with `tool_calls`, which leads nowhere; add "
        "`{trigger: tool_calls, source: [A, B], dest: …}`",
        "11:5: error[machine.final-action] `score` emits no event, so the episode would stay in `Z`: it is done in a final "
        "state; write `Z: {action: score, final: true}`",
    ]


def test_a_score_in_a_state_that_is_not_final_is_one_finding() -> None:
    lines = OWN.replace("Z: {final: true}", "JUDGING: {action: score}\n    Z: {final: true}")
    lines = lines.replace("aborted], source: A, dest: Z}", "aborted], source: A, dest: JUDGING}")
    lines = lines.replace("tools: [", "    - {trigger: scored, source: JUDGING, dest: Z}\ntools: [")
    assert [line for line in found(lines) if "[machine." in line] == [
        "11:5: error[machine.final-action] `score` emits no event, so the episode would stay in `JUDGING`: it is done "
        "in a final state; write `JUDGING: {action: score, final: true}`, and remove the transitions that leave it"
    ]


def test_a_presets_defaults_stand_behind_ones_own_conditions() -> None:
    lines = (
        "machine:\n  preset: single_turn\n  transitions:\n"
        '    - {trigger: answered, source: GENERATING, dest: GENERATING, conditions: "turns.assistant < 2"}\n'
    )
    assert found(lines) == []


def test_a_state_that_is_added_to_a_preset_and_not_reached() -> None:
    lines = "machine:\n  preset: single_turn\n  states:\n    EXTRA: {action: call_tools}\n"
    assert found(lines) == [
        "9:5: error[machine.unhandled-event] `EXTRA` (call_tools) may end with `results`, which leads nowhere; "
        "add `{trigger: results, source: EXTRA, dest: …}`",
        "9:5: error[machine.unreachable] nothing leads to `EXTRA`; lead a transition to it, or remove it",
    ]


@pytest.mark.parametrize("preset", ["single_turn", "tools", "tools_and_user", "retry_with_feedback"])
def test_every_preset_is_whole(preset: str) -> None:
    problems = check_spec(load(f"machine: {preset}\n"))
    assert {item.rule for item in problems if item.severity != "info"} <= {"user.missing", "tools.missing"}


# ---- reachability, against a walk that tries every event

STATES = ["A", "B", "C", "D"]
ACTIONS = {"reset": ["ready"], "call_tools": ["results"], "ask_user": ["feedback", "satisfied"]}


@st.composite
def machines(draw: st.DrawFn) -> str:
    states = {name: draw(st.sampled_from([*ACTIONS, "final"])) for name in STATES}
    lines = ["machine:", "  initial: A", "  states:"]
    for name, action in states.items():
        lines.append(f"    {name}: " + ("{final: true}" if action == "final" else f"{{action: {action}}}"))
    lines.append("  transitions:")
    lines.append('    - {trigger: [limit, failed], source: "*", dest: ' + draw(st.sampled_from(STATES)) + "}")
    events = ["ready", "results", "feedback", "satisfied"]
    for _ in range(draw(st.integers(0, 6))):
        trigger, source, dest = (
            draw(st.sampled_from(events)),
            draw(st.sampled_from(STATES)),
            draw(st.sampled_from(STATES)),
        )
        lines.append(f"    - {{trigger: {trigger}, source: {source}, dest: {dest}}}")
    return "\n".join(lines) + "\n"


def walk(ctx: CheckContext, start: str) -> set[str]:
    """States that are met by trying every event that can happen, over and over."""
    met = {start}
    while True:
        new = {
            edge.dest
            for state in met
            if not ctx.states[state].final
            for event in [*ACTIONS[str(ctx.states[state].action)], "limit", "failed"]
            for edge in ctx.machine.leaving(state, event)[:1]
        }
        if new <= met:
            return met
        met |= new


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(machines())
def test_reachability_agrees_with_walking(machine: str) -> None:
    loaded = load(machine)
    ctx = CheckContext(loaded)
    problems = check_spec(loaded)
    met = walk(ctx, "A")
    unreachable = {item.path[-1] for item in problems if item.rule == "machine.unreachable"}
    assert unreachable == set(STATES) - met
    final = {name for name in STATES if ctx.states[name].final}
    stuck = {item.path[-1] for item in problems if item.rule == "machine.done-unreachable"}
    endless = {name for name in met - final if not walk(ctx, name) & final}
    assert stuck == (endless if final else {"machine"})
