"""The state of reading one chat template: labels of its values, where the reading is, and what it has found out.

Labels say what a value may depend on. Jinja's functions, filters and tests are listed by what they do to labels.
expressions.py gives values their labels, and keys.py goes through the statements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntFlag
from functools import reduce
from operator import or_
from typing import Any

from jinja2 import nodes

from engine.tokens.bridge.check import REPLY_STYLES, STYLES, WRAPPER_STYLES
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


_PROBES = "Q A x " + "".join(
    style(text) for style in (*STYLES, *WRAPPER_STYLES, *REPLY_STYLES) for text in ("Qz1234567890vKxProbe",
    "Wq1234567890jZyProbe", "Wr1234567890kXyProbe", "Why Qz0w")
)  # fmt: skip
"""What the probes of all checks contain."""


class Reading:
    """What the names of a template may hold, where the reading is, and what it has found out."""

    def __init__(self, tree: nodes.Template, variables: Mapping[str, Any], in_parts: bool) -> None:
        self.in_parts = in_parts
        self.variables = {**variables, "add_generation_prompt": True, "documents": None}
        stored = [node.name for node in tree.find_all(nodes.Name) if node.ctx in ("store", "param")]
        self.assigned = set(stored)
        self.constants: dict[str, str] = {
            node.target.name: node.node.value
            for node in tree.find_all(nodes.Assign)
            if isinstance(node.target, nodes.Name) and stored.count(node.target.name) == 1
            if isinstance(node.node, nodes.Const) and isinstance(node.node.value, str)
        }
        """Names that are set once, to a text."""
        self.macros = {node.name: node for node in tree.find_all(nodes.Macro)}
        # --- what names may hold, in all rounds
        self.names: dict[tuple[int, str], Of] = {}
        """(scope, name) -> labels. A scope is a loop or a macro."""
        self.numbers: dict[tuple[int, str], tuple[str, int] | None] = {}
        """(scope, name) -> a message's number that it has: see `Expressions.number`."""
        self.attributes: dict[str, Of] = {}
        self.slots: dict[str, Slot] = {}
        self.returns: dict[str, Of] = {}
        """What a macro writes."""
        self.around: dict[str, None] = {}
        """Texts of the template that are put next to contents before the result is looked at."""
        # --- where the reading is
        self.scopes = [0]
        self.macro = ""
        self.writing = False
        """The value is written at once, and not looked at."""
        self.loops: list[tuple[Of, bool]] = []
        """For each loop that the node is in: the labels of what it goes through, and whether it does so backwards."""
        self.tests: list[tuple[nodes.Node, bool, Of]] = []
        """For each condition that the node is under: the test, whether it holds, and its labels."""
        # --- what it has found out: see `TemplateKeys`
        self.literals: dict[str, None] = {}
        self.equals: dict[str, None] = {}
        self.whole_because: dict[str, None] = {}
        called = tree.find_all((nodes.Filter, nodes.Getattr))
        self.replaces = any("replace" in (getattr(node, "name", ""), getattr(node, "attr", "")) for node in called)
        self.changes = self.in_calls = self.tests_blank = self.tests_tools = self.dated = self.timed = False
        self.tests_later = False
        """It tests something that changes as the conversation goes on."""
        self.writes_latch = False
        """What it writes depends on something that is true from some message on."""

    def known(self) -> str:
        """What names may hold, and what is put next to contents: once this stays the same, the reading is complete."""
        return repr((self.around, self.names, self.attributes, self.slots, self.returns, self.numbers))

    def refuse(self, why: str, node: nodes.Node | None = None) -> Of:
        """Have every conversation rendered whole. Returns the label of a value that cannot be followed."""
        self.whole_because[f"{why} (line {node.lineno})" if node is not None else why] = None
        return Of.NUMBER

    def condition(self) -> Of:
        """What it depends on whether the current node is reached."""
        return union(labels for _, _, labels in self.tests) & CARRIED

    @contextmanager
    def under(self, test: nodes.Node, holds: bool, labels: Of) -> Iterator[None]:
        """The block is reached only if a test has this outcome."""
        self.tests.append((test, holds, labels))
        try:
            yield
        finally:
            self.tests.pop()

    def join(self, name: str, labels: Of) -> None:
        """Add labels to a name of the innermost scope."""
        key = (self.scopes[-1], name)
        self.names[key] = self.names.get(key, Of.NOTHING) | labels

    def scope(self, name: str) -> int:
        """The innermost scope that has a name."""
        return next((scope for scope in reversed(self.scopes) if (scope, name) in self.names), 0)

    def set_attribute(self, attribute: str, labels: Of) -> None:
        """Add labels to an attribute of a namespace."""
        self.attributes[attribute] = self.attributes.get(attribute, Of.NOTHING) | labels

    def depends_on_other_slots(self, attribute: str) -> bool:
        """Whether reaching the current node depends on other attributes that are set for one message after another."""
        others = set(self.slots) - {attribute}
        return any(
            labels & (Of.STATE | Of.LATER)
            or (
                labels & Of.LATCH
                and others & {getattr(node, "attr", "") for node in (test, *test.find_all(nodes.Getattr))}
            )
            for test, _, labels in self.tests
        )

    def is_of_a_user(self) -> bool:
        """Whether the current node is reached for each message of a user and no other; going backwards, for the last
        one."""
        if not self.loops[-1][1] and any(labels & (Of.LATCH | Of.STATE) for _, _, labels in self.tests):
            return False
        for part in (part for test, holds, _ in self.tests if holds for part in conjuncts(test)):
            match part:
                case nodes.Compare(
                    expr=nodes.Getattr(attr="role") | nodes.Getitem(arg=nodes.Const(value="role")),
                    ops=[nodes.Operand(op="eq", expr=nodes.Const(value="user"))],
                ):
                    return True
        return False

    def in_messages(self) -> bool:
        """Whether the current node is reached for several messages."""
        return bool(self.macro) or any(labels & Of.MESSAGES for labels, _ in self.loops)

    def has_parts(self, node: nodes.Node) -> bool:
        """Whether a content has parts where the current node is: it is no string."""
        if self.in_parts:
            return True
        content = repr(node.node if isinstance(node, nodes.Filter) else node)
        for condition, holds, _ in self.tests:
            for part in conjuncts(condition) if holds else [condition]:
                negated = isinstance(part, nodes.Not)
                test = part.node if isinstance(part, nodes.Not) else part
                is_string = isinstance(test, nodes.Test) and test.name == "string" and repr(test.node) == content
                if is_string and holds == negated:
                    return True
        return False

    def changed(self, labels: Of, *, seen: bool = False) -> Of:
        """The labels of a text of which something was cut or changed; `seen`: so that the checks of probes see it."""
        self.changes |= not seen
        return labels & ~Of.CONTENT | Of.CHANGED

    def look_for(self, texts: Sequence[str], labels: Of, node: nodes.Expr, *, equal: bool = False) -> None:
        """The template looks for texts in a value, or compares it with them."""
        self.in_calls |= bool(labels & Of.CALL)
        for text in filter(None, texts):
            if text in _PROBES:
                self.refuse(f"it looks for {text!r}, which probes of the checks have too", node)
            (self.equals if equal else self.literals)[text] = None
        self.tests_blank |= not all(texts)
        crossed = labels & Of.JOINED and any(self.crosses(text, equal) for text in texts)
        if any(texts) and (labels & Of.CHANGED or crossed):
            self.refuse("it looks for something in a text that it has put together", node)

    def crosses(self, text: str, equal: bool) -> bool:
        """Whether a text may be in contents with the template's texts around them although it is in no content."""
        for around in self.around:
            if around in text or (not equal and text in around):
                return True
            sizes = range(0 if equal else min(len(text), len(around)))
            if any(around.endswith(text[:size]) or text.endswith(around[:size]) for size in sizes if size):
                return True
        return False


def conjuncts(test: nodes.Node) -> Iterator[nodes.Node]:
    """The tests that all hold where a test holds."""
    if isinstance(test, nodes.And):
        yield from conjuncts(test.left)
        yield from conjuncts(test.right)
    else:
        yield test
