"""A tool-call format of a user's own is scripted like a built-in one: its class reads and writes calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from arrow_calls import ArrowCalls

from engine.errors import RenderError
from engine.plugins.scenarios.suite import ScenarioResult
from engine.schemas.model import ModelSpec
from engine.tokens.loading import load_format
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


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("RaisingCalls", "RaisingCalls.parse raised KeyError: 'arrow'"),
        ("ListedCalls", "ListedCalls.parse returned list, not ParsedCalls(content, attempts)"),
        ("DictCalls", "DictCalls.parse returned dict among its attempts, not ToolCall or MalformedCall"),
    ],
)
def test_a_format_that_fails_to_read_is_found_before_the_first_episode(
    tiny_tokenizer_dir: Any, kind: str, problem: str
) -> None:
    spec = ModelSpec(path=str(tiny_tokenizer_dir), tool_calls=f"arrow_calls:{kind}")
    with pytest.raises(RenderError, match=re.escape(problem)):
        load_format(spec, Path())


def test_a_format_that_fails_at_a_reply_fails_the_episode_with_blame_on_the_spec(
    play: Play, tiny_tokenizer_dir: Any
) -> None:
    result = play(
        {
            "replies": ["stop"],
            "expect": {
                "outcome": {"failure": {"blame": "spec", "kind": "render_error"}},
                "events": ["ready", "failed"],
            },
        },
        model=model(tiny_tokenizer_dir, "arrow_calls:StoppingCalls"),
    )
    assert [difference.text for difference in result.differences] == []


def test_a_call_with_fields_of_other_types_is_malformed(play: Play, tiny_tokenizer_dir: Any) -> None:
    result = play(
        {"replies": ["5."], "expect": {"events": ["ready", "malformed", "..."]}, "set": {"limits.assistant_turns": 1}},
        model=model(tiny_tokenizer_dir, "arrow_calls:NamelessCalls"),
    )
    assert [difference.text for difference in result.differences] == []
