"""What differs is told as the shortest diff; what is not stated is not compared, but for failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.plugins.scenarios.suite import ScenarioResult, align

Play = Callable[..., ScenarioResult]
REPLIES: dict[str, Any] = {
    "replies": [{"tool_calls": [{"name": "add", "arguments": {"a": 1, "b": 2}}]}, "It is 3."],
    "tools": [{"tool": "add", "result": "3\nexactly", "rewards": [{"name": "tool", "value": 0.5}], "facts": {"n": 1}}],
    "user": [{"satisfied": True, "solved": True, "rewards": [{"name": "right", "value": 1}]}],
}


def told(result: ScenarioResult) -> dict[str, list[str]]:
    assert result.problems == []
    return {difference.what: difference.text.splitlines() for difference in result.differences}


@pytest.mark.parametrize(
    ("expect", "differences"),
    [
        (
            {"states": ["PENDING", "GENERATING", "DONE"]},
            {
                "states": [
                    " PENDING",
                    " GENERATING",
                    "+AWAITING_TOOL",
                    "+GENERATING",
                    "+AWAITING_USER_FEEDBACK",
                    " DONE",
                ]
            },
        ),
        (
            {"events": ["ready", "tool_calls", "malformed", "answered", "satisfied"]},
            {"events": [" ready", " tool_calls", "-malformed", "+results", " answered", " satisfied"]},
        ),
        (
            {"outcome": {"state": "DONE", "limit": "tool_calls", "solved": False, "reward": 2}},
            {
                "outcome": [
                    " state: DONE",
                    "-limit: tool_calls",
                    "+limit: none",
                    "-solved: false",
                    "+solved: true",
                    "-reward: 2",
                    "+reward: 1.5",
                ]
            },
        ),
        (
            {"outcome": {"failure": {"kind": "user_error"}}},
            {"outcome": ["-failure: kind user_error", "+failure: none"]},
        ),
        ({"rewards": [0.5, {"right": 1.0}]}, {}),
        ({"rewards": [{"tool": 0.5 + 9e-10}, None]}, {}),
        (
            {"rewards": [{"tool": 0.5 + 2e-9}, 0.75]},
            {"rewards": ["-turn 0: tool 0.500000002", "+turn 0: tool 0.5", "-turn 1: 0.75", "+turn 1: 1 (right 1)"]},
        ),
        (
            {"rewards": [{"tool": 0.5, "format": 0.1}]},
            {"rewards": ["-turn 0: format 0.1, tool 0.5", "+turn 0: tool 0.5", "+turn 1: right 1"]},
        ),
        ({"rewards": [None, None, 0]}, {"rewards": [" turn 0: tool 0.5", " turn 1: right 1", "-turn 2: 0"]}),
        ({"limits": ["user_turns"]}, {"limits": ["-user_turns"]}),
        (
            {"facts": {"n": 2, "m": [1]}},
            {"facts": ["-n: 2", "+n: 1", "-m: [1]", "+m: not there"]},
        ),
        (
            {"counts": {"tool_calls": 1, "user_turns": 0}},
            {"counts": [" tool_calls: 1", "-user_turns: 0", "+user_turns: 1"]},
        ),
        ({"messages": ["..."]}, {}),
        (
            {
                "messages": [
                    {"role": "assistant", "calls": [{"name": "add"}]},
                    "...",
                    {"role": "assistant", "contains": "is"},
                ]
            },
            {},
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "calls": [{"name": "add", "arguments": {"a": 1}}]},
                    {"role": "tool", "contains": "4"},
                    {"role": "assistant", "content": "It is 3."},
                ]
            },
            {
                "messages": [
                    "-assistant: …",
                    "-  → add(a=1)",
                    "-tool: … 4 …",
                    "+assistant: ",
                    "+  → add(a=1, b=2)",
                    "+tool: 3",
                    "+  exactly",
                    " assistant: It is 3.",
                ]
            },
        ),
    ],
    ids=lambda value: next(iter(value), "agrees"),
)
def test_what_differs_is_shown(play: Play, expect: Any, differences: Any) -> None:
    assert told(play({**REPLIES, "expect": expect})) == differences


def test_a_failure_that_is_not_stated_is_a_difference(play: Play) -> None:
    lines = told(
        play(
            {"replies": ["one"], "user": ["Again."], "expect": {"events": ["ready", "answered", "feedback", "failed"]}}
        )
    )
    assert lines == {
        "outcome": [
            "-failure: none",
            "+failure: script_exhausted (blame backend) in GENERATING, turn 0",
            "+  the script has 1 replies for episode 'a/0', and none for its turn 1: write one more, or set "
            "`exhausted: cycle` or `exhausted: last`",
        ]
    }


def test_a_failure_that_is_stated_is_held_to_what_is_stated(play: Play) -> None:
    scenario = {"replies": [{"error": "the server is gone"}]}
    failure = {"blame": "backend", "state": "GENERATING", "turn": -1, "contains": "is gone"}
    assert told(play({**scenario, "expect": {"outcome": {"failure": failure}}})) == {}
    failure = {"blame": "policy", "turn": -1, "contains": "nothing"}
    assert told(play({**scenario, "expect": {"outcome": {"failure": failure}}})) == {
        "outcome": [
            "-failure.blame: policy",
            "+failure.blame: backend",
            " failure.turn: -1",
            "-failure.message contains nothing",
            "+failure.message: the server is gone",
        ]
    }


ITEMS = st.lists(st.sampled_from("abc"), max_size=7)


def diff(expected: list[str], actual: list[str]) -> list[tuple[str, str]]:
    return align(expected, actual, lambda a, b: a == b, lambda a: [a], lambda b: [b])  # type: ignore[return-value]


@given(expected=ITEMS, actual=ITEMS)
def test_a_diff_leads_from_the_one_to_the_other(expected: list[str], actual: list[str]) -> None:
    lines = diff(expected, actual)
    assert [text for mark, text in lines if mark != "+"] == expected
    assert [text for mark, text in lines if mark != "-"] == actual
    assert all(mark == " " for mark, _ in lines) is (expected == actual)


@given(before=ITEMS, hidden=ITEMS, after=ITEMS)
def test_dots_stand_for_any_number(before: list[str], hidden: list[str], after: list[str]) -> None:
    actual = [*before, *hidden, *after]
    assert diff([*before, "...", *after], actual) == [(" ", text) for text in actual]
