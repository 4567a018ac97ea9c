"""The conversations with which templates are checked: what each turn says, and whether there is a system message."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.schemas.message import Message, ToolCall
from engine.tokens.choosing import ARGUMENTS, TOOL

TOOLS = [TOOL]


@dataclass
class Said:
    """A reply of a scenario: what the model means, or the very text."""

    content: str = ""
    thoughts: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    end: str = "close"
    """`close`, `none` (cut), `other` (another token that ends replies)."""
    raw: str | None = None
    cut: int | None = None
    """So many characters of it were sampled, and no end token."""


Step = Said | list[Message]


def _user(text: str = "And then?") -> list[Message]:
    return [Message(role="user", content=text)]


def _results(calls: int, turn: int) -> list[Message]:
    return [
        Message(role="tool", content=f"{number} °C", name="probe_tool", tool_call_id=f"call_{turn}_{number}")
        for number in range(calls)
    ]


def _asked(system: bool = False) -> list[Message]:
    return [*([Message(role="system", content="Be brief.")] if system else []), *_user("How warm is it?")]


_CALL = [{"text": "Paris"}]


SCENARIOS: dict[str, tuple[bool, list[list[Step]]]] = {
    "plain turns": (
        False,
        [
            [_asked(system), Said("It is 42."), _user(), Said("Yes."), _user("Sure?"), Said("Yes: 42."), _user()]
            for system in (False, True)
        ],
    ),
    "content edges": (
        False,
        [
            [_asked(), Said(text), _user(" \n now \n\n"), Said("Yes."), _user()]
            for text in ("\n\nIt is.", " It is.", "It is.\n", "It is. ", "It is:\n\n", "a < b, [x] {y}", "", " \n", "<b>é🙂</b>")
        ],
    ),
    "empty thoughts": (
        False,
        [
            [_asked(), Said(raw="<think>\n\n</think>\n\nYes."), _user(), Said("Yes."), _user()],
            [_asked(), Said(raw="<think></think>Yes."), _user()],
            [_asked(), Said("Yes.", thoughts=""), _user()],
        ],
    ),
    "empty thoughts, tools": (
        True,
        [[_asked(), Said(calls=_CALL, thoughts=""), _results(1, 0), Said("Yes."), _user()]],
    ),
    "thoughts": (
        False,
        [
            [_asked(), Said("Yes.", thoughts="Hm."), _user(), Said("No.", thoughts="Hm, no.\n\nSo."), _user(), Said("A."), _user()],
            [_asked(), Said(raw="<think>\nHm.\n</think>\n\nYes."), _user(), Said("Yes."), _user()],
            [_asked(), Said(raw="<think> Hm.\n\n</think> Yes."), _user()],
        ],
    ),
    "thoughts and tools": (
        True,
        [
            [
                _asked(system), Said("I look.", thoughts="Hm.", calls=_CALL), _results(1, 0), Said(thoughts="So.", calls=_CALL),
                _results(1, 1), Said("It is warm.", thoughts="Done."), _user(), Said("Yes."), _user(),
            ]
            for system in (False, True)
        ],
    ),
    "thoughts cut": (
        False,
        [[_asked(), Said("Yes.", thoughts="Hm. So", cut=size), _user(), Said("Yes."), _user()] for size in (-9, -16)]
        + [[_asked(), Said(raw=raw, end="none"), _user()] for raw in ("<think>\nHm", "<think>\nHm.\n", "<think>")],
    ),
    "thoughts ended": (
        False,
        [[_asked(), Said(raw="<think>\nHm."), _user(), Said("Yes."), _user()]],
    ),
    "cut replies": (
        False,
        [[_asked(), Said(raw, end="none"), _user(), Said("Yes."), _user()] for raw in ("It is", "It is\n", "It is.\n\n")],
    ),
    "stop strings": (
        False,
        [[_asked(), Said(raw, end="none"), _user(), Said("Yes."), _user()] for raw in ("<answer>42</answer>", "42\nUser:")],
    ),
    "stop strings in a call": (
        True,
        [[_asked(), Said("I look.", calls=_CALL, end="none"), _results(1, 0), Said("Yes."), _user()]],
    ),
    "other end tokens": (
        False,
        [
            [_asked(), Said("It is 42.", end="other"), _user(), Said("Yes."), _user()],
            [_asked(), Said("Yes.", thoughts="Hm.", end="other"), _user()],
        ],
    ),
    "other end tokens, tools": (True, [[_asked(), Said(calls=_CALL, end="other"), _results(1, 0), Said("Yes."), _user()]]),
    "tool calls": (
        True,
        [
            [_asked(system), Said(content, calls=arguments), _results(len(arguments), 0), Said("It is warm."), _user()]
            for arguments in ARGUMENTS.values()
            if len(arguments) == 1
            for content in ("", "I look:\n\n", "I look.")
            for system in (False, True)
        ],
    ),
    "parallel calls": (
        True,
        [
            [
                _asked(), Said(content, calls=arguments), _results(len(arguments), 0),
                Said(calls=arguments), _results(len(arguments), 1), Said("It is warm."), _user(), Said("Yes."), _user(),
            ]
            for arguments in ARGUMENTS.values()
            if len(arguments) > 1
            for content in ("", "I look.")
        ],
    ),
    "calls in the prompt": (
        True,
        [
            [
                [
                    *_asked(),
                    Message(
                        role="assistant", content="",
                        tool_calls=[ToolCall(id="call_9_0", name="probe_tool", arguments={"text": "Rome"})],
                    ),
                    Message(role="tool", content="9 °C", name="probe_tool", tool_call_id="call_9_0"),
                    Message(role="assistant", content="It is cold."),
                    *_user(),
                ],
                Said("Yes."), _user(),
            ]
        ],
    ),
    "markers inside": (
        False,
        [
            [_asked(), Said(raw=raw), _user(), Said("Yes."), _user()]
            for raw in ("a</think>b</think>c", "<think>a</think>b</think>c", "It is <think>", "a</think>", "x<tool_call>y", "[THINK]a[/THINK]b")
        ],
    ),
    "no answer": (False, [[_asked(), Said("Yes."), [], Said("No."), _user()]]),
}  # fmt: skip
"""Name -> whether tools are in view, and scripts of steps."""
