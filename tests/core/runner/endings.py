"""Specs that end in every way that an episode may end in, for the tests of resume and replay.

CASES: name -> (replies, changes to the spec of `make_spec`). `LOG` in them stands for a file that calls are logged to.
"""

from __future__ import annotations

import json
from typing import Any

from engine.plugin import entries

LOG = "LOG"

ADD = {"tool_calls": [{"name": "add", "arguments": {"a": 17, "b": 25}}]}
DRIVE = {"tool_calls": [{"name": "Odometer", "arguments": {"miles": 3}}]}
BROKEN = {"error": "out of memory"}
SPEC_CODE = {"use": "code_for_tests:Board"}
ONE = {"scorer": {"use": "code_for_tests:one"}}
JUDGE = {
    "backend": {"kind": "scripted", "replies": ["Score: 7", "Score: 7"]},
    "prompt": [{"role": "user", "content": "{{replies}}"}],
    "scale": [0, 10],
}
PLAYED = {
    "backend": {"kind": "scripted", "replies": ["Too low.", "[SOLVED]"]},
    "prompt": [{"role": "user", "content": "{{dialogue}}"}],
    "marks": [{"text": "[SOLVED]", "satisfied": True, "solved": True, "rewards": [{"value": 1.0}]}],
}
_CUT = ["limit", "failed", "truncated", "aborted"]


def machine(
    *transitions: tuple[str | list[str], str, str], done: dict[str, Any] | None = None, lost: bool = False
) -> dict[str, Any]:
    """A machine of (trigger, source, dest), with the states that they name; `lost`: with a second final state, so that
    failures do not lead to the only one."""
    actions = {"PENDING": "reset", "GENERATING": "generate", "MOVING": "step", "ASKING": "ask_user"}
    named = {source for _, source, _ in transitions}
    return {
        "initial": "PENDING",
        "states": {
            **{state: {"action": action} for state, action in actions.items() if state in named},
            "DONE": done or {"action": "score", "final": True},
            **({"LOST": {"final": True}} if lost else {}),
        },
        "transitions": [{"trigger": trigger, "source": source, "dest": dest} for trigger, source, dest in transitions],
    }


READY = ("ready", "PENDING", "GENERATING")
CUT = (_CUT, "*", "DONE")
ANSWERED = (["answered", "tool_calls", "malformed"], "GENERATING", "MOVING")
STEPPING = (READY, ANSWERED, ("moved", "MOVING", "GENERATING"), ("won", "MOVING", "DONE"))
TALKING = (READY, ("answered", "GENERATING", "ASKING"), ("feedback", "ASKING", "GENERATING"))
PLAIN: dict[str, Any] = {"user": None, "tools": None}


def board(**changes: Any) -> dict[str, Any]:
    """An environment that fails in a way, or has effects of a kind."""
    fail = changes.pop("fail", "")
    return {"environment": {**SPEC_CODE, "with": {"fail": fail, "log": LOG}, **changes}}


def critic(fail: str = "", **changes: Any) -> dict[str, Any]:
    """A user that fails in a way."""
    return {"user": {"use": "code_for_tests:Critic", "with": {"fail": fail, "log": LOG}, **changes}}


def odometer(effects: str) -> dict[str, Any]:
    """A tool with state."""
    return {"tools": [{"use": "code_for_tests:Odometer", "with": {"log": LOG}, "effects": effects}]}


DRIVES = [DRIVE, "I drove.", DRIVE, "It is 42."]
STEPS = {**PLAIN, "machine": machine(*STEPPING, CUT)}

PATIENT = {
    "tools": None,
    "rewards": ONE,
    "limits": {"user_turns": 3},
    "machine": machine(*TALKING, ("failed", "GENERATING", "ASKING"), ("satisfied", "ASKING", "DONE"), CUT),
}
ONCE = "a generation fails once, and the user goes on"
"""For replays alone: the script counts its attempts from the start of the process."""

CONDENSING = {
    "user": None,
    "machine": "tools",
    "limits": {"episode_tokens": 900, "turn_tokens": 60, "assistant_turns": 20, "on_overflow": "condense"},
}
EXPAND = {"tool_calls": [{"name": "expand", "arguments": {"block": 1}}]}
BY_POLICY = {
    "chunks": "history",
    "condenser": {"kind": "policy", "tokens": 40, "prompt": "Sum up."},
    "reserve_tokens": 250,
}
SUMMARISED = {"kind": "summary", "backend": {"kind": "scripted", "replies": ["two numbers"] * 9}, "tokens": 16}
LONG = {"tool_calls": [{"name": "repeat", "arguments": {"word": "number", "times": 215}}]}

CASES: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "score at the end": (["It is 42."], {**PLAIN, "machine": "single_turn", "rewards": ONE}),
    "a final state without an action": (
        ["no", "It is 42."],
        {"tools": None, "machine": machine(*TALKING, ("satisfied", "ASKING", "DONE"), CUT, done={"final": True})},
    ),
    "tools and a user, and an environment that scores": ([ADD, "It is 41.", "It is 42."], board()),
    "the environment is pure": ([ADD, "It is 41.", "It is 42."], board(effects="pure")),
    "the environment is external": ([ADD, "It is 41.", "It is 42."], board(effects="external")),
    "a replayable tool": (DRIVES, odometer("replayable")),
    "an external tool": (DRIVES, odometer("external")),
    "a replayable user": (["no", "It is 42."], critic(effects="replayable")),
    "an external user": (["no", "It is 42."], critic(effects="external")),
    "steps": (["left", "right"], {**STEPS, **board()}),
    "a judge": (["It is 42."], {"rewards": {"scorer": JUDGE}}),
    "a user that a model plays": (["It is 41.", "It is 42."], {"user": PLAYED, "rewards": {"scorer": JUDGE}}),
    "malformed calls": (["<tool_call>{", "It is 42."], board()),
    "truncated": (["seven words are more than four tokens"], {"limits": {"turn_tokens": 4}, "rewards": ONE}),
    "aborted": ([{"text": "I stop he", "finish": "abort"}], {"rewards": ONE}),
    "aborted later": (["no", {"text": "I stop he", "finish": "abort"}], {"rewards": ONE}),
    "the first generation fails": ([BROKEN], {"rewards": ONE}),
    "a later generation fails": (["no", BROKEN], {"rewards": ONE}),
    "a generation after tools fails": ([ADD, BROKEN], board()),
    "generations fail, and the user goes on": (["no", BROKEN], PATIENT),
    ONCE: (["no", {"text": "It is 42.", **BROKEN, "times": 1}], PATIENT),
    "nothing handles the failure": (
        ["no", BROKEN],
        {"tools": None, "rewards": ONE, "machine": machine(*TALKING, ("satisfied", "ASKING", "DONE"), lost=True)},
    ),
    "the environment was never built": (["It is 42."], board(fail="build")),
    "the environment was never built, and the episode goes on": (
        ["It is 42."],
        {
            **board(fail="build"),
            **PLAIN,
            "machine": machine(READY, ("failed", "PENDING", "GENERATING"), ("answered", "GENERATING", "DONE"), CUT),
        },
    ),
    "reset fails": (["It is 42."], board(fail="reset")),
    "reset fails in an external environment": (["It is 42."], board(fail="reset", effects="external")),
    "reset answers nonsense": (["It is 42."], board(fail="nonsense")),
    "score fails": (["It is 42."], board(fail="score")),
    "a step answers with an unknown event": (["left"], {**STEPS, **board(fail="event")}),
    "a step fails, and the episode goes on": (
        ["left", "right", "up"],
        {
            **PLAIN,
            **board(fail="first step"),
            "machine": machine(*STEPPING, ("failed", "MOVING", "GENERATING"), CUT),
        },
    ),
    "a tool raises": ([{"tool_calls": [{"name": "explode", "arguments": {"word": "boom"}}]}, "It is 42."], {}),
    "a tool answers with no JSON": (
        [{"tool_calls": [{"name": "odd", "arguments": {"word": "x"}}]}, "It is 42."],
        {"tools": [{"use": "code_for_tests:odd", "effects": "replayable"}], "rewards": ONE},
    ),
    "the user raises": (["no"], critic("raise")),
    "the user says nothing": (["no"], critic("empty")),
    "the user's facts are no JSON": (["no"], critic("facts")),
    "the user pays a turn that is none": (["no"], critic("address")),
    "a rule has nobody to pay": (
        ["It is 42."],
        {
            "rewards": {
                "reassign": [
                    {"at": "AWAITING_USER_FEEDBACK", "op": "transfer", "turn": "last", "to": "previous", "share": 0.5}
                ]
            }
        },
    ),
    "a guard fails": (
        ["It is 42."],
        {
            "tools": None,
            "machine": {
                **machine(*TALKING, CUT),
                "transitions": [
                    {"trigger": "ready", "source": "PENDING", "dest": "GENERATING"},
                    {
                        "trigger": "answered",
                        "source": "GENERATING",
                        "dest": "ASKING",
                        "conditions": "facts.mood == 'good'",
                    },
                    {"trigger": _CUT, "source": "*", "dest": "DONE"},
                ],
            },
        },
    ),
    "episode_seconds in a generation": (
        ["no"],
        {"backend": {"latency": 9}, "limits": {"episode_seconds": 0.05}, "rewards": ONE},
    ),
    "episode_seconds in a tool": (
        [{"tool_calls": [{"name": "wait", "arguments": {"seconds": 9}}]}],
        {"limits": {"episode_seconds": 0.3}, **board()},
    ),
    "assistant_turns": (["no"] * 3, {"limits": {"assistant_turns": 2}, "rewards": ONE}),
    "tool_calls": ([ADD] * 3, {"limits": {"tool_calls": 1}, "rewards": ONE}),
    "user_turns": (["<tool_call>{</tool_call>"] * 3, {"limits": {"user_turns": 2}, "rewards": ONE}),
    "episode_tokens": (["no " * 90, *[ADD] * 20], {"limits": {"episode_tokens": 1100}, "rewards": ONE}),
    "context": (["no"] * 40, {"model": {"context": 200}, "tools": None, "limits": {"assistant_turns": 40}}),
}


ENDS: dict[str, tuple[str, str | None, str | None]] = {
    "condensed, and a block is expanded": ("answered", None, None),
    "condensed by the policy": ("answered", None, None),
    "condensed by a model": ("answered", None, None),
    "nothing shorter": ("limit", "episode_tokens", None),
    "score at the end": ("answered", None, None),
    "steps": ("won", None, None),
    "truncated": ("truncated", None, None),
    "aborted": ("aborted", None, None),
    "aborted later": ("aborted", None, None),
    "the first generation fails": ("failed", None, "scripted_error"),
    "a later generation fails": ("failed", None, "scripted_error"),
    "a generation after tools fails": ("failed", None, "scripted_error"),
    "generations fail, and the user goes on": ("limit", "user_turns", "scripted_error"),
    "a generation fails once, and the user goes on": ("satisfied", None, "scripted_error"),
    "nothing handles the failure": ("feedback", None, "scripted_error"),
    "the environment was never built": ("failed", None, "environment_error"),
    "the environment was never built, and the episode goes on": ("failed", None, "environment_error"),
    "reset fails": ("failed", None, "environment_error"),
    "reset fails in an external environment": ("failed", None, "environment_error"),
    "reset answers nonsense": ("failed", None, "environment_bad_reply"),
    "score fails": ("satisfied", None, "environment_error"),
    "a step answers with an unknown event": ("failed", None, "environment_bad_reply"),
    "a step fails, and the episode goes on": ("won", None, "environment_error"),
    "a tool answers with no JSON": ("failed", None, "tool_bad_result"),
    "the user raises": ("failed", None, "user_error"),
    "the user says nothing": ("failed", None, "user_bad_reply"),
    "the user's facts are no JSON": ("failed", None, "not_json"),
    "the user pays a turn that is none": ("failed", None, "ledger_error"),
    "a rule has nobody to pay": ("failed", None, "ledger_error"),
    "a guard fails": ("answered", None, "guard_error"),
    "episode_seconds in a generation": ("limit", "episode_seconds", None),
    "episode_seconds in a tool": ("limit", "episode_seconds", None),
    "assistant_turns": ("limit", "assistant_turns", None),
    "tool_calls": ("limit", "tool_calls", None),
    "user_turns": ("limit", "user_turns", None),
    "episode_tokens": ("limit", "episode_tokens", None),
    "context": ("limit", "context", None),
}
"""(event, limit, failure) of those that are not satisfied."""


def filled(case: str, log: str) -> tuple[list[Any], dict[str, Any]]:
    """A case with the log's path."""
    replies, changes = json.loads(json.dumps(CASES[case]).replace(f'"{LOG}"', json.dumps(log)))
    return replies, changes


if "condense" in entries("actions"):
    CASES |= {
        "condensed, and a block is expanded": (
            [LONG, LONG, LONG, EXPAND, "It is 42."],
            {**CONDENSING, "condense": {"expand": True}, "tools": [{"use": "code_for_tests:repeat"}]},
        ),
        "condensed by the policy": (
            [LONG, LONG, "I saw numbers.", LONG, "I saw more.", "It is 42."],
            {**CONDENSING, "condense": BY_POLICY, "tools": [{"use": "code_for_tests:repeat"}]},
        ),
        "condensed by a model": (
            [LONG, LONG, LONG, LONG, "It is 42."],
            {**CONDENSING, "condense": {"condenser": SUMMARISED}, "tools": [{"use": "code_for_tests:repeat"}]},
        ),
        "nothing shorter": (
            [LONG, LONG, LONG, LONG, "It is 42."],
            {**CONDENSING, "condense": {"keep_last": 50}, "tools": [{"use": "code_for_tests:repeat"}]},
        ),
    }
