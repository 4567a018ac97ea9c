"""Writes tool calls as a model with a given chat format would.

The possible forms are tried in order. A form is used if the format's parser reads its tokens back as these calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import BackendError, RenderError
from engine.schemas.message import Message, ToolCall
from engine.storable import words_of
from engine.tokens.toolcalls import FORMATS, Call, ToolCallFormat

if TYPE_CHECKING:
    from engine.tokens.format import ChatFormat

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def write_calls(format: ChatFormat, text: str, calls: Sequence[Call]) -> list[int]:
    """Ids of an assistant turn with `text` and `calls`, without its stop token.

    Raises:
        BackendError: Kind `script_error`: the parser reads no form back as these calls, or the format's `write` failed.
    """
    tools = [_schema(name, arguments) for name, arguments in calls]
    for ids in _candidates(format, text, calls, tools):
        if _read(format, ids, tools) == (text.strip(), list(calls)):
            return ids
    raise BackendError(
        f"the calls {[name for name, _ in calls]} cannot be written in the format {format.name!r}: "
        "write the reply's `text` as the model would",
        kind="script_error",
    )


def _schema(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Tool definition with parameters for these arguments."""
    properties = {key: {"type": _TYPES.get(type(value), "string")} for key, value in arguments.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


def _candidates(
    format: ChatFormat, text: str, calls: Sequence[Call], tools: list[dict[str, Any]]
) -> Iterator[list[int]]:
    """Yield the chat template's own form, then that of the call format, or of all built-in formats if a family's parser is used."""
    if format.knows_tools and (own := _by_template(format, text, calls, tools)) is not None:
        yield own
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


def _by_template(format: ChatFormat, text: str, calls: Sequence[Call], tools: list[dict[str, Any]]) -> list[int] | None:
    """Ids that the chat template writes between the generation prompt and the next stop token."""
    made = [ToolCall(id=f"call_0_{place}", name=name, arguments=given) for place, (name, given) in enumerate(calls)]
    opening = [Message(role="user", content="?")]
    answer = Message(role="assistant", content=text, tool_calls=made)
    results = [Message(role="tool", content="!", tool_call_id=call.id, name=call.name) for call in made]
    try:
        prompt = format.render(opening, tools)
        whole = format.render([*opening, answer, *results], tools)
    except RenderError:
        return None
    if whole[: len(prompt)] != prompt:
        return None
    said = whole[len(prompt) :]
    ends = [at for at, token in enumerate(said) if token in format.stop_token_ids]
    return said[: ends[0]] if ends else None


def _read(format: ChatFormat, ids: list[int], tools: list[dict[str, Any]]) -> tuple[str, list[Call]] | None:
    """Text and calls that the format's parser finds; None if a call is invalid."""
    whole = np.asarray([*ids, format.stop_token_ids[0]], dtype=np.int32)
    parsed = format.replies.parse(whole, before=np.zeros(0, dtype=np.int32), turn=0, tools=tools)
    read = [(attempt.name, attempt.arguments) for attempt in parsed.attempts if isinstance(attempt, ToolCall)]
    return (parsed.content.strip(), read) if len(read) == len(parsed.attempts) else None
