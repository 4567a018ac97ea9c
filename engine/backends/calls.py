"""Writes tool calls as a model with a given chat format would.

The possible forms are tried in order. A form is used if the format's parser reads its tokens back as these calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from engine.errors import BackendError, RenderError
from engine.schemas.base import Struct
from engine.schemas.message import Message, ToolCall
from engine.storable import words_of
from engine.tokens.bridge.kinds import View, mark
from engine.tokens.choosing import ASKED, TOOL, written
from engine.tokens.conversation import TAIL
from engine.tokens.toolcalls import FORMATS, Call, ToolCallFormat

if TYPE_CHECKING:
    from engine.tokens.template import ChatTemplate

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def write_calls(format: ChatTemplate, text: str, calls: Sequence[Call]) -> list[int]:
    """Ids of an assistant turn with `text` and `calls`, without its stop token. Special tokens in the text are tokens.

    Raises:
        BackendError: Kind `script_error`: the parser reads no form back as this text and these calls, or the format's `write` failed.
    """
    tools = [_schema(name, arguments) for name, arguments in calls]
    try:
        prompt = format.render([Message(role="user", content="?")], tools)[-TAIL:]
    except RenderError:
        prompt = []
    said = _parsed(format, format.encode(text), prompt, tools)
    if not _has_markers(format, text):  # where the prompt opens reasoning, the text does not belong to it
        said = replace(said, content=text.strip(), reasoning="")
    for ids in _candidates(format, text, said, calls):
        if _parsed(format, ids, prompt, tools) == replace(said, calls=[*said.calls, *calls]):
            return ids
    raise BackendError(
        f"the calls {[name for name, _ in calls]} cannot be written in the format {format.name!r}: "
        "write the reply's `text` as the model would",
        kind="script_error",
    )


class _Parsed(Struct, frozen=True, kw_only=True):
    """What the format's parser reads."""

    content: str
    reasoning: str
    calls: list[Call | None]
    """None for one that is malformed."""


def _parsed(format: ChatTemplate, ids: list[int], prompt: list[int], tools: list[dict[str, Any]]) -> _Parsed:
    whole = np.asarray([*ids, format.stop_token_ids[0]], dtype=np.int32)
    reply = format.replies.parse(whole, before=np.asarray(prompt, dtype=np.int32), turn=0, tools=tools)
    calls = [(call.name, call.arguments) if isinstance(call, ToolCall) else None for call in reply.attempts]
    return _Parsed(content=reply.content.strip(), reasoning=(reply.reasoning or "").strip(), calls=calls)


def _has_markers(format: ChatTemplate, text: str) -> bool:
    return bool(format.fast.quoting.spans(text)) or "<think>" in text or "</think>" in text


def _schema(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Tool definition with parameters for these arguments."""
    properties = {key: {"type": _TYPES.get(type(value), "string")} for key, value in arguments.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


def _candidates(format: ChatTemplate, text: str, said: _Parsed, calls: Sequence[Call]) -> Iterator[list[int]]:
    """Yield the calls as the chat template writes them, then as the call format or all built-in formats do.

    A text with markers is kept as it is. Another one is the content of a reply that the template writes.
    """
    ways = (_after_text, _by_template) if _has_markers(format, text) else (_by_template, _after_text)
    for way in ways if format.calls_shown else ():
        if (reply := way(format, text, said, calls)) is not None:
            yield format.encode(reply)
    readers = [format.call_format] if format.call_format is not None else [kind() for kind in FORMATS.values()]
    for reader in readers:
        yield format.encode(_written(reader, text, calls))


def _written(format: ToolCallFormat, text: str, calls: Sequence[Call]) -> str:
    name = type(format).__name__
    try:
        written = format.write(text, calls)
    except Exception as error:
        raise BackendError(f"{name}.write raised {words_of(error)}", kind="script_error") from error
    if not isinstance(written, str):
        raise BackendError(f"{name}.write returned {type(written).__name__}, not str", kind="script_error")
    return written


def _by_template(format: ChatTemplate, text: str, said: _Parsed, calls: Sequence[Call]) -> str | None:
    """The whole reply as the chat template writes it after the generation prompt; None where it shows no such reply."""
    shown = _shown(
        format, {"content": said.content if said.reasoning else text, "reasoning_content": said.reasoning}, calls
    )
    if shown is None:
        return None
    before, reply = shown
    opened = format.text([ASKED], [TOOL]).removeprefix(before)
    if reply.startswith(opened):
        return reply.removeprefix(opened)
    opened, reply = opened.strip(), reply.lstrip()  # white space after the marker of reasoning may differ in a prompt
    return reply.removeprefix(opened) if reply.startswith(opened) else None


def _after_text(format: ChatTemplate, text: str, said: _Parsed, calls: Sequence[Call]) -> str | None:
    """The text as it is, and the calls as the chat template writes them after such a text."""
    content = mark(0) + text[len(text.rstrip()) :] if said.content else ""
    shown = _shown(format, {"content": content, "reasoning_content": mark(1) if said.reasoning else ""}, calls)
    if shown is None:
        return None
    after = shown[1]
    for part in (mark(0), mark(1), "</think>"):
        after = after.rpartition(part)[2]
    spans = format.fast.quoting.spans(after)
    if spans and spans[0][0] == 0 and text.rstrip().endswith(after[: spans[0][1]]):
        after = after[spans[0][1] :]
    return text.rstrip() + (after if text.strip() else after.lstrip())


def _shown(format: ChatTemplate, parts: View, calls: Sequence[Call]) -> tuple[str, str] | None:
    """What the template writes before a reply of these parts, and for it."""
    made = [ToolCall(id=f"call_0_{place}", name=name, arguments=given) for place, (name, given) in enumerate(calls)]
    try:
        view = format.views.of(Message(role="assistant", content="", tool_calls=made))
    except RenderError:
        return None
    return written(format, {**view, **{key: part for key, part in parts.items() if part or key == "content"}})
