"""Arguments of a call as a parser read them -> their values as the sampled text between tags has them.

A template that writes `<parameter=text>` or `<arg_value>` writes a string as it stands, and any other value as JSON or as Python
prints it. The parsers of the library `renderers` trim such strings, and take `None`, `True` and `False` for text.

Invariant: a string keeps its white space, and `None`, `True` and `False` are values only where the tool's schema or the quotes
of the family say so. A text that could stand for two values is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from engine.tokens.toolcalls import UnreadableCall

_PYTHON: dict[str, tuple[Any, str]] = {"True": (True, "boolean"), "False": (False, "boolean"), "None": (None, "null")}
_TAGGED = (
    re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL),
    re.compile(r'<parameter name="([^"]+)">\n?(.*?)\n?</parameter>', re.DOTALL),
    re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL),
)
"""A parameter's name and its value as the families write them."""
_QUOTE = re.escape('<|"|>')
"""Quotes of Gemma 4, which it puts around strings only."""
_QUOTED_NONE = re.compile(f"{_QUOTE}None{_QUOTE}(?=[,}}\\]])")
_BARE_NONE = re.compile(r"[:\[,]None(?=[,}\]])")


def restored(
    name: str | None, arguments: dict[str, Any], raw: str, tools: Sequence[dict[str, Any]]
) -> tuple[dict[str, Any], bool]:
    """A call's arguments as they were written.

    Args:
        name: The tool.
        arguments: The call's arguments as the library read them.
        raw: The call as it was written.
        tools: The tools' schemas, in OpenAI's form.

    Returns:
        The arguments, and whether the tool's schema permits each text among them.

    Raises:
        UnreadableCall: A text could stand for two values.
    """
    tagged = "<" in raw
    written = {key.strip(): value for pattern in _TAGGED for key, value in pattern.findall(raw)} if tagged else {}
    if not written and "None" in raw and _BARE_NONE.search(raw):
        if _QUOTED_NONE.search(raw):
            raise UnreadableCall("It holds None both as a text and as no value: write null for no value.")
        return _each(arguments, lambda text: None if text == "None" else text), True
    schema = _properties(name, tools)
    values = dict(arguments)
    permitted = True
    for key, value in arguments.items():
        if not isinstance(value, str):
            continue
        text, types = written.get(key, value), schema.get(key)
        word, kind = _PYTHON.get(value, (None, ""))
        if key in written and kind and _permits(types, kind):  # as the library reads JSON, where text is permitted too
            values[key] = word
            continue
        if text.strip() == value:
            values[key] = text
        permitted = permitted and _permits(types, "string")
    return values, permitted


def _each(value: Any, change: Callable[[str], Any]) -> Any:
    """A JSON value with each text in it changed."""
    if isinstance(value, dict):
        return {key: _each(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_each(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def _properties(name: str | None, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The schemas of a tool's parameters."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return properties if isinstance(properties, dict) else {}
    return {}


def _permits(schema: Any, type_: str) -> bool:
    """Whether a parameter may be of this type of JSON. One without a schema may be of any."""
    if not isinstance(schema, dict):
        return True
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return any(_permits(option, type_) for option in options)
    if "type" in schema:
        return type_ == schema["type"] or (isinstance(schema["type"], list) and type_ in schema["type"])
    if isinstance(values := schema.get("enum"), list):
        return any(isinstance(value, {"string": str, "boolean": bool, "null": type(None)}[type_]) for value in values)
    return True
