"""A tool-call format of a user's own is scripted like a built-in one: its class reads and writes calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from arrow_calls import ArrowCalls

from engine.scenarios.suite import ScenarioResult
from engine.tokens.toolcalls import FORMATS

Play = Callable[..., ScenarioResult]

CALLS = [{"name": "add", "arguments": {"a": 2, "b": 3}}, {"name": "echo", "arguments": {"word": 'a "b"\n\\ é'}}]


def model(tiny_tokenizer_dir: Any, tool_calls: str) -> dict[str, Any]:
    return {"path": str(tiny_tokenizer_dir), "tool_calls": tool_calls}


@pytest.mark.parametrize("tool_calls", ["hermes", "plain", "pythonic", "arrow_calls:ArrowCalls"])
def test_scripted_calls_are_made_in_every_format(play: Play, tiny_tokenizer_dir: Any, tool_calls: str) -> None:
    result = play(
        {
            "replies": [{"text": "I add.", "tool_calls": CALLS}, "5."],
            "expect": {
                "messages": [
                    {"role": "assistant", "content": "I add.", "calls": CALLS},
                    {"role": "tool", "content": "5"},
                    {"role": "tool", "content": 'a "b"\n\\ é at 0'},
                    {"role": "assistant", "content": "5."},
                    "...",
                ],
                "counts": {"tool_calls": 2, "tool_errors": 0},
            },
            "user": [{"satisfied": True}],
        },
        model=model(tiny_tokenizer_dir, tool_calls),
    )
    assert [difference.text for difference in result.differences] == []
    assert [str(problem) for problem in result.problems] == []


def test_a_built_in_format_is_one_class_and_one_entry(
    play: Play, tiny_tokenizer_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FORMATS, "arrow", ArrowCalls)
    result = play(
        {
            "replies": [{"tool_calls": CALLS[:1]}, "5."],
            "user": [{"satisfied": True}],
            "expect": {"messages": [{"role": "assistant", "calls": CALLS[:1]}, "..."], "counts": {"tool_calls": 1}},
        },
        model=model(tiny_tokenizer_dir, "arrow"),
    )
    assert [difference.text for difference in result.differences] == []


def test_a_malformed_call_of_an_own_format_is_malformed(play: Play, tiny_tokenizer_dir: Any) -> None:
    result = play(
        {
            "replies": ["-> add 2 3", "5."],
            "user": [{"satisfied": True}],
            "expect": {
                "events": ["ready", "malformed", "feedback", "answered", "..."],
                "messages": ["...", {"role": "assistant", "content": "-> add 2 3"}, "..."],
            },
        },
        model=model(tiny_tokenizer_dir, "arrow_calls:ArrowCalls"),
    )
    assert [difference.text for difference in result.differences] == []


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("MumbledCalls", "the calls ['add'] cannot be written in the format 'template'"),
        ("BrokenCalls", "BrokenCalls.write raised KeyError: 'arrow'"),
        ("SilentCalls", "SilentCalls.write returned NoneType, not str"),
    ],
)
def test_a_format_that_cannot_write_a_scripted_call_is_named(
    play: Play, tiny_tokenizer_dir: Any, kind: str, problem: str
) -> None:
    result = play(
        {"replies": [{"tool_calls": CALLS[:1]}], "expect": {"events": ["..."]}},
        model=model(tiny_tokenizer_dir, f"arrow_calls:{kind}"),
    )
    assert problem in " ".join([*map(str, result.problems), *(difference.text for difference in result.differences)])
