"""Labels of the values of a chat template, and Jinja's functions, filters and tests by what they do to the labels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntFlag
from functools import reduce
from operator import or_
from typing import Any

from engine.tokens.bridge.kinds import MARKERS, WRAP


class Of(IntFlag):
    """What a value may depend on, beside the template, its variables and the kinds of messages."""

    NOTHING = 0
    CONTENT = 1  # it is a message's text, trimmed at most, or a part of it between literals that are looked for
    JOINED = 2  # it is a content with text of the template around it
    CHANGED = 4  # it is a text that was put together from contents, or of which something was cut or changed
    MESSAGE = 8
    MESSAGES = 16
    CALL = 32  # it is a part of a tool call, or a tool's name
    TOOLS = 64
    PLACE = 128  # it is the number of a message
    COUNT = 256  # it is the number of messages
    NUMBER = 512  # it is another number or fact that no kind tells: a length, a count, a sum
    LATER = 1024  # it changes as the conversation goes on
    LATCH = 2048  # it is true from some message on
    STATE = 4096  # it has gone through several values over the messages
    LOOP = 8192  # it is `loop`
    NAMESPACE = 16384
    PART = 32768  # it is a part of a content that has images


def union(labels: Iterable[Of]) -> Of:
    return reduce(or_, labels, Of.NOTHING)


TEXT = Of.CONTENT | Of.JOINED | Of.CHANGED
COUNTED = Of.PLACE | Of.COUNT | Of.NUMBER
CARRIED = Of.LATER | Of.LATCH | Of.STATE  # what a test passes on to everything that depends on it
TEXT_KEYS = ("content", "reasoning_content", "reasoning", "thinking")
CALL_KEYS = ("tool_calls", "name", "tool_call_id", "tool_call", "function_call")
LOOP = {
    "first": Of.NOTHING, "last": Of.LATER, "index": Of.PLACE, "index0": Of.PLACE, "length": Of.COUNT,
    "previtem": Of.MESSAGE, "nextitem": Of.MESSAGE | Of.LATER,
}  # fmt: skip
"""What is read of `loop` in a loop over messages."""
GIVEN = ("messages", "tools", "loop")
FUNCTIONS = ("strftime_now", "raise_exception", "namespace", "range", "dict")

TRIMMING = ("strip", "lstrip", "rstrip")
SEARCHING = ("startswith", "endswith", "find", "rfind", "index", "rindex", "count")
CUTTING = ("split", "rsplit", "partition", "rpartition", "replace", "removeprefix", "removesuffix")
TEXT_FILTERS = ("trim", "string", "safe", "e", "escape")
VISIBLE = ("upper", "lower", "title", "capitalize", "urlencode", "tojson", "string", "join")
"""Filters and methods that change any text, so that checks of probes see it."""
_CHANGES = (*VISIBLE, "indent", "truncate", "replace", "striptags")
KINDS_TELL = (*MARKERS, *WRAP)  # literals that kinds of messages tell of
PURE_TESTS = frozenset(
    ("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "boolean", "true", "false",
     "number", "integer", "float", "callable")
)  # fmt: skip
PURE_FILTERS = frozenset(
    (*TEXT_FILTERS, *_CHANGES, "default", "d", "list", "items", "dictsort", "map", "reject", "select", "selectattr",
     "rejectattr", "first", "last",
     "length", "count", "int", "float", "abs", "sort", "unique", "reverse", "wordcount", "sum", "min", "max", "attr",
     "round", "format", "batch")
)  # fmt: skip


@dataclass
class Slot:
    """An attribute of a namespace that is set for one message after another."""

    constants: set[Any] = field(default_factory=set)
    places: bool = False  # a message's number was assigned, where the message is a user's
    reset: bool = False  # it is set for each message, so it depends on one message alone
    other: bool = False  # something else was assigned, or under a condition on another such attribute

    @property
    def label(self) -> Of:
        if self.reset and not self.other and not self.places:
            return Of.LATER
        if self.other:
            return Of.STATE | Of.NUMBER
        if (self.places and self.constants) or len(self.constants) > 1:
            return Of.STATE
        return Of.PLACE | Of.LATER if self.places else Of.LATCH
