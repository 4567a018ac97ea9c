"""Whole conversations from a row: `prompt: {field: messages}`.

    conversation_of({"messages": [{"role": "user", "content": "What is 2 + 2?"}]}, PromptField(field="messages"))

Invariant: every message, part, call and image of the row is in the result, or a `RowError` says what is wrong and
where. Keys whose value is null are left out: Parquet gives every struct of a column the keys of all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from engine.schemas.message import ContentPart, ImagePart, Message, TextPart, ToolCall, image_part
from engine.schemas.model import PromptField
from engine.spec.rows.row import find, plain

IMAGE_MARK = "<image>"
"""Text that stands for the next image of the row's image field."""

_MARKS = re.compile(f"({re.escape(IMAGE_MARK)})")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_MESSAGE_KEYS = frozenset(
    ("role", "content", "reasoning", "reasoning_content", "tool_calls", "tool_call_id", "name", "refusal", "audio")
)


class RowError(ValueError):
    """Why a row holds no conversation; the message begins with the place in the row."""


def conversation_of(fields: Mapping[str, Any], source: PromptField) -> list[Message]:
    """The messages of a task. Raises: RowError: there are none, or one of them is not valid."""
    there, rows = find(source.field, fields)
    if not there:
        raise RowError(f"there is no field `{source.field}`")
    if isinstance(rows, str):
        rows = [{"role": "user", "content": rows}]
    if not isinstance(rows, Sequence) or not rows:
        raise RowError(f"`{source.field}` must be a list of messages, or a text; it is {_kind(rows)}")
    images = _Images(fields, source)
    messages = [_message(row, f"{source.field}[{at}]", at, images) for at, row in enumerate(rows)]
    if images.shown < len(images.given):
        raise RowError(
            f"`{source.images}` has {len(images.given)} images, and the messages show {images.shown}: "
            f"mark each place with `{IMAGE_MARK}`"
        )
    return messages


def tools_of(fields: Mapping[str, Any], source: PromptField) -> list[dict[str, Any]] | None:
    """The schemas of a task's tools, in OpenAI's form; None if the row says nothing about tools.

    A list in JSON is read, and a function without `{type: function}` around it is put into that form.

    Raises:
        RowError: the field is not a list of schemas.
    """
    if source.tools is None:
        return None
    there, tools = find(source.tools, fields)
    if not there or tools is None:
        if "tools" in source.model_fields_set and not there:
            raise RowError(f"there is no field `{source.tools}`")
        return None
    tools = _json(tools, source.tools)
    if not isinstance(tools, Sequence):
        raise RowError(f"`{source.tools}` must be a list of tool schemas; it is {_kind(tools)}")
    return [_schema(_without_nulls(tool, deep=True), f"{source.tools}[{at}]") for at, tool in enumerate(tools)]


def _schema(tool: Any, where: str) -> dict[str, Any]:
    tool = _json(tool, where)
    if not isinstance(tool, Mapping):
        raise RowError(f"`{where}` must be a tool's schema; it is {_kind(tool)}")
    function = tool.get("function", tool)
    if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise RowError(f"`{where}` must be `{{type: function, function: …}}`; its type is {tool.get('type')!r}")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RowError(f"`{where}` needs the function's `name`")
    parameters = _json(function.get("parameters", {}), f"{where}.parameters")
    if not isinstance(parameters, Mapping):
        raise RowError(f"`{where}.parameters` must be a JSON Schema; it is {_kind(parameters)}")
    described = {key: value for key, value in function.items() if key != "type" or function is not tool}
    return {"type": "function", "function": described | {"parameters": dict(parameters)}}


class _Images:
    """The images of a row, in order, and how many of them the messages have shown."""

    def __init__(self, fields: Mapping[str, Any], source: PromptField) -> None:
        self._name = source.images
        there, images = find(source.images, fields) if source.images is not None else (False, None)
        if not there and source.images is not None and "images" in source.model_fields_set:
            raise RowError(f"there is no field `{source.images}`")
        if images is None:
            images = []
        self.given = [images] if isinstance(images, str | Mapping) else images
        if not isinstance(self.given, Sequence):
            raise RowError(f"`{source.images}` must be a list of images; it is {_kind(images)}")
        self.marked = bool(self.given) or (source.images is not None and "images" in source.model_fields_set)
        """Whether `<image>` in a text means an image."""
        self.shown = 0

    def next(self, where: str) -> ImagePart:
        if self.shown >= len(self.given):
            raise RowError(f"`{where}` shows image {self.shown + 1}, and `{self._name}` has {len(self.given)}")
        self.shown += 1
        return image_of(self.given[self.shown - 1], f"{self._name}[{self.shown - 1}]")


def image_of(value: Any, where: str) -> ImagePart:
    """An image in any form that data sets have: a path, a URI, `{bytes, path}`, `{image: …}`, `{url: …}`, a part.

    Raises:
        RowError: it is none of these.
    """
    reference = plain(value)
    while isinstance(reference, Mapping):
        key = next(
            (key for key in ("image", "image_url", "url", "path", "base64") if reference.get(key) is not None), None
        )
        if key is None:
            raise RowError(f"`{where}` is no image: it has neither `image`, `image_url`, `url`, `path` nor `bytes`")
        inner = plain(reference[key])
        reference = f"data:;base64,{inner}" if key == "base64" and isinstance(inner, str) else inner
    if not isinstance(reference, str) or not reference:
        raise RowError(
            f"`{where}` is no image: give a path, a URL, a data: URI or {{bytes, path}}; it is {_kind(reference)}"
        )
    return image_part(reference)


def _message(row: Any, where: str, at: int, images: _Images) -> Message:
    row = _without_nulls(row)
    if not isinstance(row, Mapping):
        raise RowError(f"`{where}` must be a message `{{role, content}}`; it is {_kind(row)}")
    role = _ROLES.get(row.get("role", ""))
    if role is None:
        raise RowError(f"`{where}.role` must be one of {', '.join(_ROLES)}; it is {row.get('role')!r}")
    unknown = sorted(key for key in row if key not in _MESSAGE_KEYS)
    if unknown:
        raise RowError(f"`{where}` has the key `{unknown[0]}`, which no message has; remove it from the data")
    if row.get("refusal") or row.get("audio"):
        raise RowError(f"`{where}` has a refusal or audio, which an episode cannot show")
    content = row.get("content", "")
    if not isinstance(content, str):
        if not isinstance(content, Sequence):
            raise RowError(f"`{where}.content` must be a text or a list of parts; it is {_kind(content)}")
        content = [_part(part, f"{where}.content[{at}]", images) for at, part in enumerate(content)]
    elif images.marked and IMAGE_MARK in content:
        pieces = [piece for piece in _MARKS.split(content) if piece]
        shown_at = f"{where}.content"
        content = [images.next(shown_at) if piece == IMAGE_MARK else TextPart(text=piece) for piece in pieces]
    try:
        return Message.read(
            {
                "role": role,
                "content": content,
                "reasoning": row.get("reasoning", row.get("reasoning_content")),
                "tool_calls": list(_calls(row.get("tool_calls", []), f"{where}.tool_calls", at)),
                "tool_call_id": row.get("tool_call_id"),
                "name": row.get("name"),
            }
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join([where, *map(str, first["loc"])])
        raise RowError(f"`{place}`: {first['msg'].removeprefix('Value error, ')}") from error


def _part(part: Any, where: str, images: _Images) -> ContentPart:
    part = _without_nulls(part)
    if isinstance(part, str):
        return TextPart(text=part)
    if not isinstance(part, Mapping):
        raise RowError(f"`{where}` must be a part of `type: text` or `type: image`; it is {_kind(part)}")
    kind = part.get("type", "text" if "text" in part else None)
    if kind in ("text", "input_text") and isinstance(part.get("text"), str):
        return TextPart(text=part["text"])
    if kind in ("image", "image_url", "input_image"):
        if part.keys() <= {"type"}:
            return images.next(where)
        return image_of({key: value for key, value in part.items() if key != "type"}, where)
    raise RowError(f"`{where}` must be a part of `type: text` or `type: image`; its type is {kind!r}")


def _calls(calls: Any, where: str, message: int) -> Iterator[ToolCall]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RowError(f"`{where}` must be a list of calls; it is {_kind(calls)}")
    for at, call in enumerate(calls):
        place = f"{where}[{at}]"
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping) or "name" not in function:
            raise RowError(f"`{place}` must be a call `{{id, function: {{name, arguments}}}}`")
        arguments = function.get("arguments", {})
        arguments = _json("{}" if arguments == "" else arguments, f"{place}.arguments")
        if not isinstance(arguments, Mapping):
            raise RowError(f"`{place}.arguments` must be a JSON object; it is {_kind(arguments)}")
        yield ToolCall(
            id=str(call.get("id") or f"row_{message}_{at}"), name=str(function["name"]), arguments=dict(arguments)
        )


def _without_nulls(value: Any, *, deep: bool = False) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _without_nulls(item, deep=deep) if deep else item for key, item in value.items() if item is not None
        }
    return [_without_nulls(item, deep=deep) for item in value] if deep and isinstance(value, list) else value


def _json(value: Any, where: str) -> Any:
    """A value that a row may hold as JSON text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise RowError(f"`{where}` is no JSON: {error}") from error


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, Sequence) and not len(value):
        return "empty"
    return f"a {type(value).__name__}"
