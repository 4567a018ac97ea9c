"""Tool calls that are written as text: one class reads and writes each format.

    base.py      ToolCallFormat: what a format declares; TaggedFormat: calls between two tags
    formats.py   the built-in formats

A format of your own is a subclass of `ToolCallFormat`, named `package.module:Class` in `model.tool_calls`.
"""

from engine.tokens.toolcalls.base import (
    Call,
    ParsedCalls,
    TaggedFormat,
    ToolCallFormat,
    UnreadableCall,
    parse_calls,
)
from engine.tokens.toolcalls.formats import FORMATS, HermesFormat, PlainFormat, PythonicFormat, tool_call_format

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
