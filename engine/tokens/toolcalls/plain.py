"""The format `plain`, which a small model learns from two examples: a function call between tags.

    <call>calculate(expression="3 * (4 + 5)")</call>
    <call>calculate(3 * (4 + 5))</call>

Arguments are Python literals, by keyword or in the order of the tool's parameters. For a parameter of type string, text that
is not a literal is taken as it stands. A tool with one parameter, a string, takes everything in the parentheses.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence
from typing import Any

from engine.terminal import around
from engine.tokens.toolcalls.base import JSON_WORDS, Call, TaggedFormat, UnreadableCall, as_json

_FORM = "Write name(argument=value)."
_NAMED = re.compile(r"([A-Za-z_][\w.\-]*)\s*\((.*)\)\Z", re.DOTALL)


class PlainFormat(TaggedFormat):
    """One function call with Python literals in each pair of tags."""

    name = "plain"
    marks = ("<call>", "</call>")

    def read_body(self, body: str, tools: Sequence[dict[str, Any]]) -> Call:
        """See `TaggedFormat.read_body`."""
        match = _NAMED.match(body)
        if match is None:
            raise UnreadableCall(f"{around(body, 0)!r} is not of the form name(...). {_FORM}")
        name, inside = match.group(1), match.group(2).strip()
        parameters = _parameters(name, tools)
        sole = next(iter(parameters)) if list(parameters.values()) == ["string"] else None
        if not inside:
            return name, {}
        source = f"f({inside}\n)"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # "3 (4)" and "\\d" are the model's mistakes; they do not belong in the log
                call = ast.parse(source, mode="eval").body
            if not isinstance(call, ast.Call) or call.func.end_col_offset != 1:
                raise SyntaxError
            return name, _bind(call, source, parameters, sole)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            if sole is not None:
                return name, {sole: inside}
            raise UnreadableCall(f"What is in the parentheses of {name}(...) cannot be read. {_FORM}") from None

    def write(self, text: str, calls: Sequence[Call]) -> str:
        """See `ToolCallFormat.write`."""
        written = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls)
        return "\n".join([*([text] if text else []), *(f"<call>{call}</call>" for call in written)])


def _parameters(name: str, tools: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Parameters of a tool, in order, with their JSON types; empty for an unknown tool."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = function.get("parameters", {}).get("properties", {})
            return {key: str(schema.get("type", "")) for key, schema in properties.items()}
    return {}


def _bind(call: ast.Call, source: str, parameters: dict[str, str], sole: str | None) -> dict[str, Any]:
    """Arguments by name. Raises ValueError where the source is not a list of arguments."""
    if any(isinstance(argument, ast.Starred) for argument in call.args) or any(w.arg is None for w in call.keywords):
        raise ValueError
    names = list(parameters)
    if sole is not None and call.args:
        if len(call.args) > 1 or call.keywords or not _is_text(call.args[0]):
            raise ValueError
    elif len(call.args) > len(names):
        if not names:
            raise UnreadableCall(f"Its arguments have no names, and no tool that takes any is called so. {_FORM}")
        raise UnreadableCall(
            f"It has {len(call.args)} arguments without a name, but the tool takes {', '.join(names)}."
        )
    given = [*zip(names, call.args, strict=False), *((str(word.arg), word.value) for word in call.keywords)]
    arguments: dict[str, Any] = {}
    for key, node in given:
        if key in arguments:
            raise UnreadableCall(f"It gives {key} twice.")
        arguments[key] = _value(key, node, source, parameters.get(key, ""))
    return arguments


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _value(key: str, node: ast.expr, source: str, type_: str) -> Any:
    """One argument. Where the type is string, anything that is not a string literal is taken as it is written."""
    if type_ == "string" and not _is_text(node):
        return ast.get_source_segment(source, node)
    if isinstance(node, ast.Name) and node.id.lower() in JSON_WORDS:
        return JSON_WORDS[node.id.lower()]
    try:
        return as_json(ast.literal_eval(node))
    except (ValueError, TypeError):
        raise UnreadableCall(f"The value of {key} is not a literal: put text in quotes.") from None
