"""Tool calls that are written as text: one class reads and writes each format.

    base.py      ToolCallFormat: what a format declares; TaggedFormat: calls between two tags; HermesFormat: JSON in <tool_call>
    plain.py     name(argument=value) in <call>
    pythonic.py  LFM2's list of calls

A format of your own is a subclass of `ToolCallFormat`, named `package.module:Class` in `model.tool_calls`. To add a built-in
format, write one file and add its class to `FORMATS`.
"""

from __future__ import annotations

from pathlib import Path

from engine.errors import RenderError
from engine.storable import words_of
from engine.tokens.toolcalls.base import (
    Call,
    HermesFormat,
    ParsedCalls,
    TaggedFormat,
    ToolCallFormat,
    UnreadableCall,
    parse_calls,
)
from engine.tokens.toolcalls.plain import PlainFormat
from engine.tokens.toolcalls.pythonic import PythonicFormat

__all__ = [
    "FORMATS",
    "Call",
    "HermesFormat",
    "ParsedCalls",
    "PlainFormat",
    "PythonicFormat",
    "TaggedFormat",
    "ToolCallFormat",
    "UnreadableCall",
    "parse_calls",
    "tool_call_format",
]

FORMATS: dict[str, type[ToolCallFormat]] = {kind.name: kind for kind in (HermesFormat, PlainFormat, PythonicFormat)}
"""Built-in formats, by the name that `model.tool_calls` has for them."""


def tool_call_format(name: str, base: Path | None = None) -> ToolCallFormat:
    """The format that `model.tool_calls` names: a built-in one, or `package.module:Class`.

    Args:
        name: The value of `model.tool_calls`; not `auto`.
        base: The spec's folder, where modules are looked for first.

    Raises:
        RenderError: There is no such format, or the class is not a `ToolCallFormat`.
        EntryError: It cannot be imported.
    """
    if name in FORMATS:
        return FORMATS[name]()
    if ":" not in name:
        raise RenderError(
            f"model.tool_calls: {name!r} is unknown; write auto, {', '.join(FORMATS)} or package.module:Class"
        )
    from engine.spec.code.entry import load_entry

    loaded = load_entry(name, base)
    fix = "derive it from engine.tokens.toolcalls.ToolCallFormat and define parse(text, tools, prefix) and write(text, calls)"
    if isinstance(loaded, type) and issubclass(loaded, ToolCallFormat):
        if missing := sorted(loaded.__abstractmethods__):
            raise RenderError(f"model.tool_calls: {name} does not define {' and '.join(missing)}; {fix}")
        try:
            return loaded()
        except Exception as error:
            raise RenderError(f"model.tool_calls: {name}() raised {words_of(error)}") from error
    if isinstance(loaded, ToolCallFormat):
        return loaded
    raise RenderError(f"model.tool_calls: {name} is not a ToolCallFormat; {fix}")
