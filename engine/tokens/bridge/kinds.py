"""A message -> its kind, a number for all that a template may test of it, and a probe that stands for messages of this
kind.

Invariant: `MessageKinds` has all of a conversation that a verdict on its bridges depends on (check.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date
from typing import Any

import msgspec

from engine.tokens.tokenizer import MARK, unquote

View = dict[str, Any]
"""A message as chat templates read it."""

SYSTEM, USER, TOOL, ASSISTANT = range(4)
_ROLES = {"system": SYSTEM, "user": USER, "tool": TOOL}
REASONS, MARKED, ODD, CALLS, BLANK = 1, 2, 3, 4, 12
"""Added to ASSISTANT: reasoning (1), or reasoning inside the content between its markers (2), or markers
elsewhere (3); one call (4) or several (8); blank content (12)."""
WRAPPED, WRAPPED_LOOSELY, BLANK_SYSTEM = 27, 28, 29
"""A user message that is a tool's response by its tags, alone or amid white space: templates of Qwen's look for them. A
blank message that is not the model's: this and its role."""
PICTURED = 32
"""A message with images that is not the model's: this, its role, and 3 where an image comes first, or 6 where there is
no text at all. Some templates look at the first part."""
LOOKED = 41
"""A message that is not the model's, with a text that the template looks for: this and its role. All kinds are below
44."""
_KINDS = 44

MARKERS = ("<think>", "</think>", "<|channel", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>")
"""Texts that templates look for inside a reply's content to find its reasoning."""
WRAP = ("<tool_response>", "</tool_response>")
_USERS = frozenset(
    (USER, WRAPPED, WRAPPED_LOOSELY, BLANK_SYSTEM + USER, *range(PICTURED + USER, LOOKED, 3), LOOKED + USER)
)

TOOL_NAME = "probe_tool"


def mark(index: int) -> str:
    """Text that occurs in no template and in no other message: the content of probe `index`."""
    return f"Qz{index}vKxProbe"


def _why(index: int) -> str:
    return f"Why {mark(index)}w"


class Looked(msgspec.Struct, frozen=True):
    """What a template tests of a message, as far as kinds tell it."""

    markers: tuple[str, ...] = ()
    """Those of MARKERS that it looks for."""
    texts: re.Pattern[str] | None = None
    """What it looks for in contents; None where it looks for nothing."""
    in_replies: re.Pattern[str] | None = None
    """`texts` without the markers."""
    wrap: bool = True
    """It looks for the tags of a tool's response."""
    blank: bool = False
    """It tests whether a text is empty."""
    in_calls: bool = False
    """It looks for `texts` in tool calls and names of tools too."""


def kind_of(view: View, looked: Looked) -> int:
    """The kind of a message, in [0, 44): what a template may test of it.

    Args:
        view: The message.
        looked: What the template tests.
    """
    role, content = view["role"], view["content"]
    if looked.in_calls and looked.texts is not None and any(map(looked.texts.search, _texts_of_calls(view))):
        return ASSISTANT + ODD if role == "assistant" else LOOKED + _ROLES[role]
    if isinstance(content, str):
        text = content
    else:
        number = _ROLES.get(role, ASSISTANT)
        joined = "".join([part.get("text", "") for part in content])
        if looked.texts is not None and looked.texts.search(unquote(joined)):
            return LOOKED + number if number < ASSISTANT else ASSISTANT + ODD
        if number < ASSISTANT and any(part["type"] == "image" for part in content):
            if all(part["type"] == "image" for part in content):
                return PICTURED + 6 + number
            return PICTURED + (3 if content[0]["type"] == "image" else 0) + number
        text = "x"
    bare = text.strip()
    spaced = looked.blank and not bare and bool(text)
    if role != "assistant":
        wrapped = looked.wrap and role == "user" and bare.startswith(WRAP[0]) and bare.endswith(WRAP[1])
        inner = bare[len(WRAP[0]) : -len(WRAP[1])] if wrapped else text
        inner = unquote(inner) if MARK in inner else inner
        if spaced or (looked.texts is not None and looked.texts.search(inner)):
            return LOOKED + _ROLES[role]
        if wrapped:
            return WRAPPED if bare == text else WRAPPED_LOOSELY
        return _ROLES[role] if bare else BLANK_SYSTEM + _ROLES[role]
    kind = ASSISTANT + CALLS * min(len(view.get("tool_calls", ())), 2)
    reasons = bool(view.get("reasoning_content"))
    if spaced or (
        looked.in_replies is not None and looked.in_replies.search(f"{text}\0{view.get('reasoning_content', '')}")
    ):
        return kind + ODD
    for marker in looked.markers:
        if marker in text:
            kind += ODD if reasons or not _is_marked(bare) else MARKED
            break
    else:
        kind += REASONS * reasons
    return kind if bare else kind + BLANK


def _texts_of_calls(view: View) -> list[str]:
    """The texts in a message's tool calls, and the name of the tool that it is of."""
    calls = [call["function"] for call in view.get("tool_calls", ())]
    return [view.get("name", ""), *(str(call[key]) for call in calls for key in ("name", "arguments"))]


ODD_KINDS = frozenset((*range(ASSISTANT + ODD, WRAPPED, CALLS), *range(LOOKED, _KINDS)))
"""Kinds that do not tell what the template does with such a message: its conversation is rendered whole."""


def _is_marked(text: str) -> bool:
    """Whether a reply is reasoning between its markers and then something else, in the one form that is not odd."""
    reasoning, _, rest = text.removeprefix(MARKERS[0]).partition(MARKERS[1])
    odd = any(marker in part for part in (reasoning, rest) for marker in MARKERS)
    return text.startswith(MARKERS[0]) and bool(reasoning.strip()) and bool(rest.strip()) and not odd


class MessageKinds(msgspec.Struct, frozen=True):
    """What the verdict on a bridge depends on, of the messages before it: a value, made from its predecessor in
    O(1)."""

    day: date = msgspec.field(default_factory=lambda: date.today())
    """The day on which the conversation began."""
    opening: bytes = b""
    """The kinds before the first reply."""
    replied: bool = False
    last: bytes = b""
    """The last three kinds."""
    pairs: int = 0
    """A bit for each kind that ever followed another."""
    since: int = 0
    """`pairs` since the newest plain message of a user."""
    since_any: int = 0
    """`pairs` since the newest message of role `user`."""
    odd: bool = False
    """A message is of an odd kind."""

    def add(self, kind: int) -> MessageKinds:
        """With one more message."""
        replied = self.replied or kind >= ASSISTANT
        pair = 1 << (self.last[-1] * _KINDS + kind) if self.last else 0
        return MessageKinds(
            self.day,
            self.opening if replied else self.opening + bytes((kind,)),
            replied,
            self.last[-2:] + bytes((kind,)),
            self.pairs | pair,
            0 if kind == USER else self.since | pair,
            0 if kind in _USERS else self.since_any | pair,
            self.odd or (kind >= ASSISTANT and kind in ODD_KINDS),
        )

    def signature(self, new: bytes) -> tuple[bytes, bool, int, int, int, bytes, bytes]:
        """The key of the verdict on the kinds `new` after these messages."""
        return self.opening, self.replied, self.pairs, self.since, self.since_any, self.last, new


def probe(kind: int, index: int, style: Callable[[str], str]) -> View:
    """A message of one kind; each of its parts contains the mark of `index`."""
    content = style(mark(index))
    kind = kind - LOOKED if kind >= LOOKED else kind
    if kind >= PICTURED:
        form, role = divmod(kind - PICTURED, 3)
        parts = [{"type": "text", "text": content}, {"type": "image"}]
        return {**probe(role, index, style), "content": (parts, parts[::-1], parts[1:])[form]}
    if kind in (WRAPPED, WRAPPED_LOOSELY):
        wrapped = f"{WRAP[0]}\n{content}\n{WRAP[1]}"
        return {"role": "user", "content": wrapped if kind == WRAPPED else f"\n{wrapped} "}
    if kind >= BLANK_SYSTEM:
        kind, content = kind - BLANK_SYSTEM, ""
    if kind in (SYSTEM, USER):
        return {"role": "system" if kind == SYSTEM else "user", "content": content}
    if kind == TOOL:
        return {"role": "tool", "content": content, "name": TOOL_NAME, "tool_call_id": f"call_0_{index}"}
    blank, flags = divmod(kind - ASSISTANT, BLANK)
    calls, reasons = divmod(flags, CALLS)
    view: View = {"role": "assistant", "content": "" if blank else content}
    if reasons == REASONS:
        view["reasoning_content"] = _why(index)
    elif reasons == MARKED:
        view["content"] = f"<think>\n{_why(index)}\n</think>\n\n{content}"
    if calls:
        view["tool_calls"] = [probe_call(index, number) for number in range(calls)]
    return view


def has_mark(view: View) -> bool:
    """Whether a probe's content contains its mark."""
    content = view["content"]
    return bool(content) and (isinstance(content, str) or any(part["type"] == "text" for part in content))


def probe_call(index: int, number: int, name: str = TOOL_NAME, id_: str | None = None) -> View:
    """A tool call whose argument contains the mark of `index`."""
    return {
        "type": "function",
        "id": id_ or f"call_{index}_{number}",
        "function": {"name": name, "arguments": {"x": f"{mark(index)}n{number}"}},
    }
