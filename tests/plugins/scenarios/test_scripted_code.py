"""A scripted answer takes the place of an answer of the spec's code, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scenario_code import ASKED

from engine.plugins.scenarios.suite import ScenarioResult

Play = Callable[..., ScenarioResult]


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"name": tool, "arguments": arguments}]}


BOARD: dict[str, Any] = {
    "environment": {"use": "scenario_code:Board"},
    "user": None,
    "tools": None,
    "prompt": None,
    "machine": {
        "preset": "tools",
        "states": {"MOVING": {"action": "step"}},
        "transitions": [
            {"trigger": "answered", "source": "GENERATING", "dest": "MOVING"},
            {"trigger": "moved", "source": "MOVING", "dest": "GENERATING"},
            {"trigger": "won", "source": "MOVING", "dest": "DONE"},
        ],
    },
}


def assert_passed(result: ScenarioResult) -> None:
    assert [str(problem) for problem in result.problems] == []
    assert [difference.text for difference in result.differences] == []


def test_a_users_answers_come_in_order_and_null_asks_the_real_one(play: Play) -> None:
    result = play(
        {
            "replies": ["one", "two", "three", "four"],
            "user": ["Again.", None, {"content": "Well.", "facts": {"seen": 3}}],
            "set": {"limits.assistant_turns": 4},
            "expect": {
                "messages": [
                    {"role": "assistant", "content": "one"},
                    {"role": "user", "content": "Again."},
                    {"role": "assistant"},
                    {"role": "user", "content": "Really: two?"},
                    {"role": "assistant"},
                    {"role": "user", "content": "Well."},
                    {"role": "assistant"},
                    {"role": "user", "content": "Really: four?"},
                ],
                "facts": {"seen": 3},
                "limits": ["assistant_turns"],
                "counts": {"user_turns": 4},
            },
        }
    )
    assert_passed(result)
    assert ASKED == {"user": 2, "user closed": 1}


@pytest.mark.parametrize(
    ("fault", "failure"),
    [
        ({"error": "lost"}, {"kind": "user_error", "contains": "RuntimeError: lost"}),
        ({"timeout": True}, {"kind": "user_timeout"}),
        ({"invalid": True}, {"kind": "user_bad_reply", "contains": "must return a UserTurn"}),
    ],
)
def test_a_user_fails_as_a_real_one_would(play: Play, fault: Any, failure: Any) -> None:
    failure = {"blame": "user", "state": "AWAITING_USER_FEEDBACK", "turn": 0, **failure}
    assert_passed(play({"replies": ["one"], "user": [fault], "expect": {"outcome": {"failure": failure}}}))
    assert ASKED == {"user closed": 1}


def test_a_call_is_served_by_the_first_answer_that_fits_it(play: Play) -> None:
    result = play(
        {
            "replies": [call("add", a=1, b=2), call("add", a=1, b=2), call("add", a=5, b=2), call("echo", word="hi")],
            "tools": [
                {"tool": "add", "arguments": {"a": 1}, "times": 1, "result": "first"},
                {"tool": "add", "arguments": {"a": 1}, "result": {"sum": 3}},
            ],
            "set": {"limits.assistant_turns": 4, "machine": "tools"},
            "expect": {
                "messages": [
                    "...",
                    {"role": "tool", "content": "first"},
                    "...",
                    {"role": "tool", "content": '{"sum":3}'},
                    "...",
                    {"role": "tool", "content": "7"},
                    "...",
                    {"role": "tool", "content": "hi at 3"},
                ],
                "counts": {"tool_calls": 4, "tool_errors": 0},
            },
        }
    )
    assert_passed(result)
    assert (ASKED["add"], ASKED["echo"]) == (1, 1)


def test_the_real_tools_schema_is_still_held_to(play: Play) -> None:
    result = play(
        {
            "replies": [call("add", a="x", b=2), call("add", a=1), "done"],
            "tools": [{"tool": "add", "result": "scripted"}],
            "user": [{"satisfied": True}],
            "expect": {
                "messages": [
                    "...",
                    {"role": "tool", "contains": "Wrong arguments for `add`: `a`"},
                    "...",
                    {"role": "tool", "contains": "`b` is missing"},
                    "...",
                ],
                "counts": {"tool_calls": 2, "tool_errors": 2},
            },
        }
    )
    assert_passed(result)


def test_a_tools_rewards_and_facts_are_written(play: Play) -> None:
    answer = {"tool": "add", "result": [1, 2], "rewards": [{"name": "tool", "value": 0.5}], "facts": {"n": 1}}
    result = play(
        {
            "replies": [call("add", a=1, b=2), "done"],
            "tools": [answer],
            "user": [{"satisfied": True}],
            "expect": {
                "rewards": [{"tool": 0.5}, 0],
                "facts": {"n": 1},
                "messages": ["...", {"role": "tool", "content": "[1,2]"}, "..."],
            },
        }
    )
    assert_passed(result)


@pytest.mark.parametrize(
    ("fault", "words"),
    [({"error": "boom"}, "`add` failed: boom"), ({"timeout": True}, "`add`")],
)
def test_a_tool_that_fails_is_a_result_that_the_model_sees(play: Play, fault: Any, words: str) -> None:
    result = play(
        {
            "replies": [call("add", a=1, b=2), "done"],
            "tools": [{"tool": "add", **fault}],
            "user": [{"satisfied": True}],
            "expect": {
                "messages": ["...", {"role": "tool", "contains": words}, "..."],
                "counts": {"tool_errors": 1},
            },
        }
    )
    assert_passed(result)


def test_a_tool_that_returns_an_invalid_value_ends_the_episode(play: Play) -> None:
    failure = {"kind": "tool_bad_result", "blame": "tool", "state": "AWAITING_TOOL"}
    scenario = {"replies": [call("add", a=1, b=2)], "tools": [{"tool": "add", "invalid": True}]}
    assert_passed(play({**scenario, "expect": {"outcome": {"failure": failure}}}))


def test_an_environment_answers_by_the_script_where_it_is_given(play: Play) -> None:
    result = play(
        {
            "replies": [call("peek", row=1), "go", "go", "go"],
            "environment": {
                "reset": {"messages": [{"role": "user", "content": "Scripted."}], "facts": {"x": 1}},
                "score": {"rewards": [{"name": "final", "value": 2}]},
            },
            "tools": [{"tool": "peek", "result": "scripted row"}],
            "steps": {"MOVING": [{"event": "moved", "rewards": [{"value": 1}]}, None, {"event": "won"}]},
            "expect": {
                "events": [
                    "ready",
                    "tool_calls",
                    "results",
                    "answered",
                    "moved",
                    "answered",
                    "moved",
                    "answered",
                    "won",
                ],
                "messages": [
                    {"role": "user", "content": "Scripted."},
                    {"role": "assistant", "calls": [{"name": "peek", "arguments": {"row": 1}}]},
                    {"role": "tool", "content": "scripted row"},
                    {"role": "assistant", "content": "go"},
                    {"role": "assistant", "content": "go"},
                    {"role": "user", "content": "Really moved."},
                    {"role": "assistant", "content": "go"},
                ],
                "rewards": [0, {"reward": 1}, {}, {"final": 2}],
                "facts": {"x": 1},
            },
        },
        **{**BOARD, "limits": {"assistant_turns": 6}},
    )
    assert result.problems == []
    assert ASKED == {"built": 1, "step": 1, "closed": 1}


@pytest.mark.parametrize("what", ["reset", "score"])
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"error": "gone"}, "environment_error"),
        ({"timeout": True}, "environment_timeout"),
        ({"invalid": True}, "environment_bad_reply"),
    ],
)
def test_an_environment_fails_as_a_real_one_would(play: Play, what: str, fault: Any, kind: str) -> None:
    scenario = {"replies": ["go"], "environment": {what: fault}, "steps": {"MOVING": [{"event": "won"}]}}
    assert_passed(play({**scenario, "expect": {"outcome": {"failure": {"kind": kind}}}}, **BOARD))


def test_a_scripted_steps_event_must_be_one_that_is_declared(play: Play) -> None:
    failure = {"kind": "environment_bad_reply", "contains": "returned the event `flew`; it declares moved, won"}
    scenario = {"replies": ["go"], "steps": {"MOVING": [{"event": "flew"}]}}
    assert_passed(play({**scenario, "expect": {"outcome": {"failure": failure}}}, **BOARD))


def test_an_action_of_the_specs_own_is_scripted_too(play: Play) -> None:
    machine = {
        "preset": "tools",
        "states": {"MEASURING": {"action": "scenario_code:measure"}},
        "transitions": [
            {"trigger": "answered", "source": "GENERATING", "dest": "MEASURING"},
            {"trigger": "short", "source": "MEASURING", "dest": "GENERATING"},
            {"trigger": "long", "source": "MEASURING", "dest": "DONE"},
        ],
    }
    scenario = {
        "replies": ["one", "two"],
        "steps": {"MEASURING": [{"event": "short", "messages": [{"role": "user", "content": "More."}]}]},
        "expect": {"events": ["ready", "answered", "short", "answered", "long"]},
    }
    assert_passed(play(scenario, machine=machine, user=None))
    assert ASKED == {"measured": 1}


def test_time_runs_out_at_the_visit_that_is_named(play: Play) -> None:
    scenario = {
        "replies": ["one", "two"],
        "user": ["Again.", "Again."],
        "out_of_time": {"state": "GENERATING", "visit": 3},
        "expect": {
            "states": ["PENDING", *["GENERATING", "AWAITING_USER_FEEDBACK"] * 2, "GENERATING", "DONE"],
            "outcome": {"limit": "episode_seconds", "event": "limit", "failure": None},
            "limits": ["episode_seconds"],
        },
    }
    assert_passed(play(scenario))


def test_an_environment_that_cannot_be_built_fails_as_in_a_run(play: Play) -> None:
    failure = {"kind": "environment_error", "blame": "environment", "state": "PENDING", "contains": "no board"}
    result = play(
        {"expect": {"states": ["PENDING", "DONE"], "outcome": {"failure": failure}}},
        environment={"use": "scenario_code:Unbuildable"},
    )
    assert_passed(result)


@pytest.mark.parametrize(
    ("task", "board"), [(None, "a"), ("b", "b"), ({"id": "c", "word": "three"}, "c")], ids=["first", "named", "row"]
)
def test_the_task_is_the_first_the_named_or_a_row(play: Play, task: Any, board: str) -> None:
    scenario = {"task": task} if task is not None else {}
    expect = {"messages": [{"role": "user", "content": f"Board {board}."}, "..."]}
    assert_passed(
        play({**scenario, "replies": ["go"], "steps": {"MOVING": [{"event": "won"}]}, "expect": expect}, **BOARD)
    )
