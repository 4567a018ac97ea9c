"""The source of a chat template -> what it tests or changes of the conversation, and what makes every prompt be rendered whole.

Bridges are checked on probes that stand for messages of the same kinds (check.py). That holds for a template that copies
contents and tests no more than a kind says. So this reading of the source decides, once for a template:

- literals that it looks for in contents (`in`, `startswith`, `split`, `replace`, …): in a message without any of them, all these tests
  are false and all these cuts change nothing. A message that has one makes its conversation be rendered whole at each turn;
- whether it writes contents changed (cut, in capitals, as JSON): then bridges and replies are rendered with the actual contents;
- whether it shows the date;
- everything else that it tests (lengths, parts of contents, numbers of messages, states over several messages, …), and all that this
  reading does not understand: then every conversation is rendered whole at each turn.

The reading is conservative: labels say what a value may depend on, and a variable has the labels of all its assignments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntFlag
from functools import lru_cache, reduce
from operator import or_
from typing import Any, TypeGuard

import msgspec
from jinja2 import nodes

from engine.tokens.bridge.check import REPLY_STYLES, STYLES, WRAPPER_STYLES
from engine.tokens.bridge.kinds import MARKERS, WRAP, Looked
from engine.tokens.jinja import parse_template


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


_TEXT = Of.CONTENT | Of.JOINED | Of.CHANGED
_COUNTED = Of.PLACE | Of.COUNT | Of.NUMBER
_CARRIED = Of.LATER | Of.LATCH | Of.STATE  # what a test passes on to everything that depends on it
_TEXT_KEYS = ("content", "reasoning_content", "reasoning", "thinking")
_CALL_KEYS = ("tool_calls", "name", "tool_call_id", "tool_call", "function_call")
_MAX_ROUNDS = 12
_LOOP = {
    "first": Of.NOTHING, "last": Of.LATER, "index": Of.PLACE, "index0": Of.PLACE, "length": Of.COUNT,
    "previtem": Of.MESSAGE, "nextitem": Of.MESSAGE | Of.LATER,
}  # fmt: skip
"""What is read of `loop` in a loop over messages."""
_GIVEN = ("messages", "tools", "loop")
_FUNCTIONS = ("strftime_now", "raise_exception", "namespace", "range", "dict")

_TRIMS = ("strip", "lstrip", "rstrip")
_SEARCHES = ("startswith", "endswith", "find", "rfind", "index", "rindex", "count")
_CUTS = ("split", "rsplit", "partition", "rpartition", "replace", "removeprefix", "removesuffix")
_TEXT_FILTERS = ("trim", "string", "safe", "e", "escape")
_VISIBLE = ("upper", "lower", "title", "capitalize", "urlencode", "tojson", "string", "join")
"""Filters and methods that change any text, so that checks of probes see it."""
_CHANGES = (*_VISIBLE, "indent", "truncate", "replace", "striptags")
_KINDS_TELL = (*MARKERS, *WRAP)  # literals that kinds of messages tell of
_PURE_TESTS = frozenset(
    ("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "boolean", "true", "false", "number", "integer", "float", "callable")
)  # fmt: skip
_PURE_FILTERS = frozenset(
    (*_TEXT_FILTERS, *_CHANGES, "default", "d", "list", "items", "dictsort", "map", "reject", "select", "selectattr", "rejectattr", "first", "last",
     "length", "count", "int", "float", "abs", "sort", "unique", "reverse", "wordcount", "sum", "min", "max", "attr", "round", "format", "batch")
)  # fmt: skip
_DAY = re.compile(r"(?:[^%]|%[-_^#0]?[aAbBdeDhjmxyYGuUVwWFC%])*\Z")
"""A format of `strftime` that says no more than the day."""


class TemplateKeys(msgspec.Struct, frozen=True):
    """What `read_template` finds."""

    literals: tuple[str, ...] = ()
    """Texts that the template looks for in contents."""
    equals: tuple[str, ...] = ()
    """Texts that it compares contents with."""
    in_calls: bool = False
    """It looks for them in tool calls or names of tools."""
    replaces: bool = False
    """It replaces something in texts, which may put a token together."""
    copies: bool = True
    """Contents are written as they are, trimmed at most."""
    tests_blank: bool = False
    """It tests whether a text is empty, which white space is not."""
    tests_tools: bool = False
    """It tests more of the tools than whether there are any."""
    dated: bool = False
    """It shows the date."""
    timed: bool = False
    """It shows the time: no two renderings are alike."""
    whole_because: tuple[str, ...] = ()
    """Why every conversation is rendered whole at each turn; empty where that is not needed."""

    @property
    def reads(self) -> bool:
        """Whether it does anything to contents but write them."""
        return bool(self.literals or self.equals or self.replaces or self.whole_because or not self.copies)


@dataclass
class _Slot:
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


@lru_cache(maxsize=64)
def _read(sources: tuple[str, ...], variables: tuple[tuple[str, Any], ...], in_parts: bool) -> TemplateKeys:
    readings = [_Reading(parse_template(source), dict(variables), in_parts) for source in sources]
    by_source = [reading.keys() for reading in readings]
    return TemplateKeys(
        tuple(dict.fromkeys(text for keys in by_source for text in keys.literals)),
        tuple(dict.fromkeys(text for keys in by_source for text in keys.equals)),
        any(keys.in_calls for keys in by_source),
        any(keys.replaces for keys in by_source),
        all(keys.copies for keys in by_source),
        any(keys.tests_blank for keys in by_source),
        any(keys.tests_tools for keys in by_source),
        any(keys.dated for keys in by_source),
        any(keys.timed for keys in by_source),
        tuple(dict.fromkeys(why for keys in by_source for why in keys.whole_because)),
    )


def read_template(sources: Sequence[str], variables: Mapping[str, Any], in_parts: bool = False) -> TemplateKeys:
    """What templates test or change of a conversation.

    Args:
        sources: Their Jinja sources, which are valid.
        variables: What they are rendered with, besides messages and tools.
        in_parts: They are given contents as lists of parts.
    """
    plain = {name: value for name, value in variables.items() if isinstance(value, str | int | float | bool | None)}
    others = {name: ... for name in variables if name not in plain}
    return _read(tuple(sources), tuple(sorted({**plain, **others}.items())), in_parts)


def looks(keys: TemplateKeys, source: str) -> tuple[Looked, re.Pattern[str] | None, re.Pattern[str] | None]:
    """What a template looks for: what kinds have to tell, what may be in a text of a reply (None: nothing), and what in several texts put together.

    Args:
        keys: What it tests.
        source: Its source.
    """
    markers = tuple(marker for marker in MARKERS if marker in source)
    others = [text for text in keys.literals if text not in markers]
    inside = [re.escape(text.strip()) for text in keys.equals]  # a marker may stand before what is compared
    equal = [rf"\A\s*{re.escape(text.strip())}\s*\Z" for text in keys.equals]
    wrap = any(text in keys.literals for text in WRAP)
    looked = Looked(
        markers,
        _any([*map(re.escape, keys.literals), *equal]),
        _any([*map(re.escape, others), *(inside if markers else equal)]),
        wrap,
        keys.tests_blank,
        keys.in_calls,
    )
    if not keys.copies:
        return looked, re.compile(""), re.compile("")
    searched = [*map(re.escape, [*markers, *others])]
    return looked, _any([*searched, *equal]), _any([*searched, *(re.escape(text.strip()) for text in keys.equals)])


def _any(patterns: Sequence[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(patterns)) if patterns else None


_PROBES = "Q A x " + "".join(
    style(text) for style in (*STYLES, *WRAPPER_STYLES, *REPLY_STYLES) for text in ("Qz1234567890vKxProbe", "Wq1234567890jZyProbe", "Wr1234567890kXyProbe", "Why Qz0w")
)  # fmt: skip
"""What the probes of all checks contain."""


class _Reading:
    """The reading of one template."""

    def __init__(self, tree: nodes.Template, variables: Mapping[str, Any], in_parts: bool) -> None:
        self._tree = tree
        self._in_parts = in_parts
        self._variables = {**variables, "add_generation_prompt": True, "documents": None}
        self._names: dict[tuple[int, str], Of] = {}  # (scope, name) -> labels. A scope is a loop or a macro
        self._numbers: dict[tuple[int, str], tuple[str, int] | None] = {}
        """(scope, name) -> a message's number that it has: see `_number`."""
        self._scopes = [0]
        self._writing = False  # the value is written at once, and not looked at
        self._attributes: dict[str, Of] = {}
        self._slots: dict[str, _Slot] = {}
        self._outer: set[str] = set()  # namespaces that are made outside of the loops over messages and of macros
        self._macros: dict[str, nodes.Macro] = {node.name: node for node in tree.find_all(nodes.Macro)}
        self._returns: dict[str, Of] = {}
        self._assigned = {node.name for node in tree.find_all(nodes.Name) if node.ctx in ("store", "param")}
        self._texts = _constant_texts(tree)  # names that are set once, to a text
        self._macro = ""
        self._loop_tests = 0  # how many of `_tests` are outside of the innermost loop over messages
        self._loops: list[tuple[Of, bool]] = []
        """For each loop that the node is in: the labels of what it goes through, and whether it does so backwards."""
        self._tests: list[tuple[nodes.Node, bool, Of]] = []
        """For each condition that the node is under: the test, whether it holds, and its labels."""
        self._literals: dict[str, None] = {}
        self._equals: dict[str, None] = {}
        self._around: dict[str, None] = {}
        """Texts of the template that are put next to contents before the result is looked at."""
        self._whole: dict[str, None] = {}
        self._copies = True
        self._in_calls = False
        called = tree.find_all((nodes.Filter, nodes.Getattr))
        self._replaces = any("replace" in (getattr(node, "name", ""), getattr(node, "attr", "")) for node in called)
        self._blank = self._tools = self._dated = self._timed = False
        self._late_tests = self._latched_output = False

    def keys(self) -> TemplateKeys:
        """The result."""
        for _ in range(_MAX_ROUNDS):
            before = self._state()
            self._literals, self._equals, self._whole = {}, {}, {}
            self._statements(self._tree.body)
            if self._state() == before:
                break
        else:
            self._whole = {"it is too intricate to be read": None}
        if not self._copies and self._late_tests:
            self._refuse("it writes contents cut or changed, depending on later messages")
        if self._latched_output and any(slot.places for slot in self._slots.values()):
            self._refuse("what it writes for a message depends on earlier messages and on later ones")
        return TemplateKeys(
            tuple(self._literals), tuple(self._equals), self._in_calls, self._replaces, self._copies, self._blank, self._tools, self._dated, self._timed, tuple(self._whole)
        )  # fmt: skip

    def _state(self) -> str:
        return repr((self._around, self._names, self._attributes, self._slots, self._returns, self._numbers))

    def _refuse(self, why: str, node: nodes.Node | None = None) -> None:
        self._whole[f"{why} (line {node.lineno})" if node is not None else why] = None

    # --- statements -----------------------------------------------------------------------------------------

    def _statements(self, body: Iterable[nodes.Node]) -> None:
        for node in body:
            self._statement(node)

    def _statement(self, node: nodes.Node) -> None:
        match node:
            case nodes.Output():
                for part in node.nodes:
                    self._write(part)
            case nodes.Assign():
                self._assign(node.target, self._value(node.node), node.node)
            case nodes.AssignBlock():
                self._statements(node.body)
                self._assign(node.target, self._written(node.body) | Of.JOINED, None)
                if node.filter is not None:
                    self._refuse("it filters a block", node)
            case nodes.If():
                self._branches(node)
            case nodes.For():
                self._for(node)
            case nodes.Macro():
                self._define(node)
            case nodes.CallBlock() if isinstance(node.call.node, nodes.ExtensionAttribute):
                self._statements(node.body)
            case nodes.ExprStmt():
                self._value(node.node)
            case nodes.Continue() | nodes.Break():
                self._notice(self._condition())
                if any(loop & Of.MESSAGES for loop, _ in self._loops[-1:]):
                    self._refuse("it leaves a loop over messages", node)
            case nodes.Scope():
                self._statements(node.body)
            case _:
                self._refuse(f"it has a {type(node).__name__.lower()}, which is not read", node)

    def _write(self, node: nodes.Expr) -> None:
        if isinstance(node, nodes.TemplateData):
            written = Of.NOTHING
        else:
            self._writing = True
            written = self._value(node)
            self._writing = False
            if written & _COUNTED:
                self._refuse("it writes a number that depends on the conversation", node)
            if written & (Of.MESSAGES | Of.MESSAGE):
                self._refuse("it writes a message as a whole", node)
        if written & Of.PART:
            written = written & ~Of.PART | Of.CONTENT
        condition = self._condition()
        if _calls(node, "raise_exception"):
            return
        self._latched_output |= bool((condition | written) & Of.LATCH)
        if condition & Of.STATE or (written & Of.STATE and not written & _TEXT):
            self._refuse("what it writes for a message depends on a state that earlier messages left", node)
        if self._macro:
            self._return(node, written, condition)

    def _return(self, node: nodes.Expr, written: Of, condition: Of) -> None:
        """A macro writes something."""
        text = getattr(node, "data", "") or (isinstance(node, nodes.Const) and node.value)
        if text:
            self._around[str(text)] = None
            written |= Of.JOINED
        self._returns[self._macro] |= written | condition

    def _written(self, body: Iterable[nodes.Node]) -> Of:
        inside = [part for node in body for part in (node, *node.find_all(nodes.Output))]
        return self._all(part for output in inside if isinstance(output, nodes.Output) for part in output.nodes)

    def _condition(self) -> Of:
        """What it depends on whether the current node is reached."""
        return _union(labels for _, _, labels in self._tests) & _CARRIED

    def _branches(self, node: nodes.If) -> None:
        rest: list[nodes.Node] = node.else_
        if node.elif_:
            first, *others = node.elif_
            rest = [nodes.If(first.test, first.body, others, node.else_, lineno=first.lineno)]
        outcome = self._known(node.test)
        if outcome is not None:
            self._statements(node.body if outcome else rest)
        elif not self._is_alternation(node):
            labels = self._test(node.test)
            for holds, body in ((True, node.body), (False, rest)):
                with self._under(node.test, holds, labels):
                    self._statements(body)

    @contextmanager
    def _under(self, test: nodes.Node, holds: bool, labels: Of) -> Iterator[None]:
        self._tests.append((test, holds, labels))
        try:
            yield
        finally:
            self._tests.pop()

    def _is_alternation(self, node: nodes.If) -> bool:
        """Whether users and others must take turns: the kinds that follow each other say that too."""
        parts = [part for inner in node.body for part in (inner.nodes if isinstance(inner, nodes.Output) else [inner])]
        written = [part for part in parts if not (isinstance(part, nodes.TemplateData) and part.data.isspace())]
        only_raises = all(_calls(part, "raise_exception") for part in written) and not node.elif_ and not node.else_
        test = node.test
        if not (only_raises and isinstance(test, nodes.Compare) and len(test.ops) == 1):
            return False
        left, right = test.expr, test.ops[0].expr
        if not (
            isinstance(left, nodes.Compare) and isinstance(right, nodes.Compare) and isinstance(right.expr, nodes.Mod)
        ):
            return False
        number, modulus = self._number(right.expr.left), right.expr.right
        is_odd = number is not None and number[0] == "place" and isinstance(modulus, nodes.Const) and modulus.value == 2
        return is_odd and not self._value(left)

    def _for(self, node: nodes.For) -> None:
        item = labels = self._value(node.iter)
        part = node.iter.arg if isinstance(node.iter, nodes.Getitem) else None
        backwards = isinstance(part, nodes.Slice) and part.step is not None
        if labels & Of.MESSAGES:
            if any(loop & Of.MESSAGES for loop, _ in self._loops):
                self._refuse("it goes through the messages again for each message", node)
            if self._macro:
                self._refuse("a macro goes through the messages", node)
            if node.test is not None:
                self._refuse("it leaves out messages in a loop over them", node)
            item = Of.MESSAGE
        elif labels & Of.CONTENT and self._is_in_parts(node.iter):
            item = Of.PART
        elif labels & _COUNTED:
            self._refuse("it repeats something as many times as the conversation says", node)
        if node.recursive:
            self._refuse("it has a recursive loop", node)
        self._scopes.append(id(node))
        self._assign(node.target, item, None)
        self._loops.append((labels, backwards))
        if node.test is not None:
            self._test(node.test)
        with self._under(node.iter, True, labels & _CARRIED):
            before, self._loop_tests = self._loop_tests, len(self._tests) if labels & Of.MESSAGES else self._loop_tests
            self._statements(node.body)
            self._loop_tests = before
        self._loops.pop()
        self._scopes.pop()
        self._statements(node.else_)

    def _is_in_parts(self, node: nodes.Node) -> bool:
        """Whether a content has parts where the current node is: it is no string."""
        if self._in_parts:
            return True
        of = repr(node.node if isinstance(node, nodes.Filter) else node)
        for condition, holds, _ in self._tests:
            for part in _conjuncts(condition) if holds else [condition]:
                negated = isinstance(part, nodes.Not)
                test = part.node if isinstance(part, nodes.Not) else part
                is_string = isinstance(test, nodes.Test) and test.name == "string" and repr(test.node) == of
                if is_string and holds == negated:
                    return True
        return False

    def _define(self, node: nodes.Macro) -> None:
        outside, self._macro = self._macro, node.name
        scopes, self._scopes = self._scopes, [0, id(node)]
        self._returns.setdefault(node.name, Of.NOTHING)
        for parameter, value in zip(node.args[len(node.args) - len(node.defaults) :], node.defaults, strict=True):
            self._join(parameter.name, self._value(value))
        loops, self._loops = self._loops, []
        tests, self._tests = self._tests, []
        self._statements(node.body)
        self._macro, self._loops, self._tests, self._scopes = outside, loops, tests, scopes

    # --- assignments ----------------------------------------------------------------------------------------

    def _join(self, name: str, labels: Of) -> None:
        key = (self._scopes[-1], name)
        self._names[key] = self._names.get(key, Of.NOTHING) | labels

    def _assign(self, target: nodes.Node, labels: Of, value: nodes.Node | None) -> None:
        if isinstance(target, nodes.Tuple):
            for item in target.items:
                self._assign(item, labels, None)
            return
        labels |= self._condition()
        if isinstance(target, nodes.NSRef):
            self._assign_attribute(target, labels, value)
            return
        assert isinstance(target, nodes.Name)
        key = (self._scopes[-1], target.name)
        if _calls(value, "namespace"):
            self._join(target.name, Of.NAMESPACE)
            if not self._in_messages():
                self._outer.add(target.name)
            for pair in value.kwargs:
                self._set(pair.key, self._value(pair.value))
            return
        number = self._number(value)
        if number is not None or labels & Of.PLACE:
            earlier = self._numbers.get(key, number)
            self._numbers[key] = number if earlier == number else None
        self._join(target.name, labels)

    def _in_messages(self) -> bool:
        return bool(self._macro) or any(loop & Of.MESSAGES for loop, _ in self._loops)

    def _scope(self, name: str) -> int:
        """The innermost scope that has a name."""
        return next((scope for scope in reversed(self._scopes) if (scope, name) in self._names), 0)

    def _set(self, attribute: str, labels: Of) -> None:
        self._attributes[attribute] = self._attributes.get(attribute, Of.NOTHING) | labels

    def _assign_attribute(self, target: nodes.NSRef, labels: Of, value: nodes.Node | None) -> None:
        if not (self._in_messages() and self._scope(target.name) == 0 and target.name in self._outer):
            self._set(target.attr, labels | Of.NUMBER if self._repeats(value) else labels)
            return
        slot = self._slots.setdefault(target.attr, _Slot())
        number = self._number(value)
        if isinstance(value, nodes.Const):
            slot.constants.add((type(value.value), value.value))
            slot.other = slot.other or self._depends_on_other_slots(target.attr)
            slot.reset |= not self._macro and not self._tests[self._loop_tests :] and len(self._loops) == 1
        elif number is not None and number[0] == "place" and number[1] in (0, 1) and self._is_of_a_user():
            slot.places = True
        elif labels & _TEXT and not labels & (_COUNTED | Of.STATE):
            self._set(target.attr, labels | Of.STATE)
            return
        else:
            slot.other = True

    def _repeats(self, value: nodes.Node | None) -> bool:
        """Whether a value is a sum with a number, in a loop whose length no kind tells."""
        if not (self._loops and isinstance(value, nodes.Add | nodes.Sub | nodes.Mul)):
            return False
        sides = (value.left, value.right)
        return any(isinstance(side, nodes.Const) and isinstance(side.value, int | float) for side in sides)

    def _depends_on_other_slots(self, attribute: str) -> bool:
        for test, _, labels in self._tests:
            if labels & Of.STATE:
                return True
            if labels & Of.LATCH:
                names = {node.attr for node in [test, *test.find_all(nodes.Getattr)] if isinstance(node, nodes.Getattr)}
                if names & set(self._slots) - {attribute}:
                    return True
        return any(labels & Of.LATER for _, _, labels in self._tests)

    def _is_of_a_user(self) -> bool:
        """Whether the current node is reached for each message of a user and no other; going backwards, for the last one."""
        if not self._loops[-1][1] and any(labels & (Of.LATCH | Of.STATE) for _, _, labels in self._tests):
            return False
        return any(holds and any(map(_says_user, _conjuncts(test))) for test, holds, _ in self._tests)

    # --- expressions ----------------------------------------------------------------------------------------

    def _all(self, parts: Iterable[nodes.Expr]) -> Of:
        return _union(map(self._value, parts))

    def _value(self, node: nodes.Node | None) -> Of:
        """What a value may depend on."""
        match node:
            case None | nodes.Const() | nodes.TemplateData():
                return Of.NOTHING
            case nodes.Name():
                return self._name(node)
            case nodes.Getattr():
                return self._item(node.node, node.attr, node)
            case nodes.Getitem():
                return self._getitem(node)
            case nodes.Filter():
                return self._filter(node)
            case nodes.Test() | nodes.Compare() | nodes.Not():
                return self._test(node)
            case nodes.And() | nodes.Or():
                return self._test(node.left) | self._value(node.right)
            case nodes.CondExpr():
                return self._conditional(node)
            case nodes.Call():
                return self._call(node)
            case nodes.List() | nodes.Tuple():
                return self._all(node.items)
            case nodes.Dict():
                return self._all(part for pair in node.items for part in (pair.key, pair.value))
            case nodes.Concat():
                return self._joined(node.nodes)
            case nodes.Add():
                if (number := self._number(node)) is not None:
                    return Of.PLACE if number[0] == "place" else Of.COUNT
                return self._joined([node.left, node.right])
            case nodes.Sub() if (number := self._number(node)) is not None:
                return {"place": Of.PLACE, "count": Of.COUNT, "kept": Of.PLACE | Of.LATER}.get(number[0], Of.NOTHING)
            case nodes.BinExpr():
                parts = self._all([node.left, node.right])
                return parts | Of.NUMBER if parts & ~Of.TOOLS else parts
            case nodes.UnaryExpr():
                return self._value(node.node)
            case _:
                self._refuse(f"it has a {type(node).__name__.lower()}, which is not read", node)
                return Of.NUMBER

    def _joined(self, parts: Sequence[nodes.Expr]) -> Of:
        part_labels = [self._value(part) for part in parts]
        joined = _union(part_labels)
        if joined & _COUNTED:
            return joined | Of.NUMBER
        if self._writing or not joined & _TEXT:
            return joined
        in_parts = bool(self._loops) and bool(self._loops[-1][0] & Of.CONTENT)  # an image's text is between two texts
        if sum(bool(labels & _TEXT) for labels in part_labels) > 1 and not in_parts:
            return joined & ~Of.CONTENT | Of.CHANGED
        for part, labels in zip(parts, part_labels, strict=True):
            if not labels & _TEXT and (texts := self._texts_of(part)) != [""]:
                if texts is None:
                    return joined & ~Of.CONTENT | Of.CHANGED
                self._around.update(dict.fromkeys(filter(None, texts)))
                joined |= Of.JOINED
        return joined

    def _texts_of(self, node: nodes.Expr) -> list[str] | None:
        """The texts that an expression may write; None where they are not known."""
        match node:
            case nodes.CondExpr():
                return _flat([self._texts_of(node.expr1), self._texts_of(node.expr2 or nodes.Const(""))])
            case nodes.Add():
                return _flat([self._texts_of(node.left), self._texts_of(node.right)])
            case nodes.Concat():
                return _flat([self._texts_of(part) for part in node.nodes])
        return self._literals_of(node)

    def _name(self, node: nodes.Name) -> Of:
        if node.name == "loop":
            return Of.LOOP
        scope = self._scope(node.name)
        given = {"messages": Of.MESSAGES, "tools": Of.TOOLS}.get(node.name, Of.NOTHING)
        assigned = self._names.get((scope, node.name))
        if assigned is None:
            return given
        return assigned if scope else assigned | given & Of.MESSAGES

    def _item(self, of: nodes.Expr, key: Any, node: nodes.Expr) -> Of:
        """`of.key`"""
        if isinstance(of, nodes.Name) and of.name == "loop":
            return self._loop_value(key, node)
        labels = self._value(of)
        if labels & Of.NAMESPACE and isinstance(key, str):
            assigned = self._attributes.get(key, Of.NOTHING)
            return assigned | self._slots[key].label if key in self._slots else assigned
        if labels & Of.MESSAGE:
            read = Of.CONTENT if key in _TEXT_KEYS else Of.CALL if key in _CALL_KEYS else Of.NOTHING
            return read | labels & _CARRIED
        if labels & Of.CALL and key == "type":
            return labels & ~Of.CALL
        if labels & Of.PART:
            return labels & _CARRIED | (Of.CONTENT if key in ("text", "content") else Of.NOTHING)
        if labels & Of.MESSAGES:
            self._refuse(f"it reads `{key}` of all messages", node)
        return labels & ~Of.NAMESPACE

    def _loop_value(self, key: str, node: nodes.Expr) -> Of:
        over = self._loops[-1][0] if self._loops else Of.NOTHING
        if not self._loops:
            self._refuse("it reads `loop` of a loop outside", node)
        if over & Of.MESSAGES:
            if key not in _LOOP:
                self._refuse(f"it reads `loop.{key}` of the messages", node)
            return _LOOP.get(key, Of.NUMBER)
        if key in ("first", "last"):
            return Of.NOTHING
        if key in ("previtem", "nextitem"):
            return over
        return Of.NUMBER if over & ~Of.TOOLS else Of.NOTHING

    def _getitem(self, node: nodes.Getitem) -> Of:
        if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
            return self._item(node.node, node.arg.value, node)
        labels = self._value(node.node)
        if isinstance(node.arg, nodes.Slice):
            return self._slice(node.arg, labels, node)
        if labels & Of.MESSAGES:
            return self._message_at(node.arg, node)
        index = self._value(node.arg)
        if labels & Of.CONTENT and self._is_in_parts(node.node):
            return Of.PART | labels & _CARRIED
        if labels & _TEXT and not isinstance(node.node, nodes.Call):
            return self._cut(labels)
        return labels | index | (Of.NUMBER if index & _COUNTED else Of.NOTHING)

    def _slice(self, part: nodes.Slice, labels: Of, node: nodes.Getitem) -> Of:
        ends = [part.start, part.stop, part.step]
        if labels & Of.MESSAGES:
            constants = [None if end is None else _constant(end) for end in ends]
            if not (constants[0] in (None, 0, 1) and constants[1] in (None, -1) and constants[2] in (None, 1, -1)):
                self._refuse("it takes some of the messages by their number", node)
            return Of.MESSAGES
        numbers = self._all(end for end in ends if end is not None)
        if labels & _TEXT:
            return self._cut(labels)
        return labels | Of.NUMBER if (numbers | labels) & ~Of.TOOLS else labels

    def _cut(self, labels: Of) -> Of:
        self._copies = False
        return labels & ~Of.CONTENT | Of.CHANGED

    def _message_at(self, index: nodes.Expr, node: nodes.Expr) -> Of:
        value = _constant(index)
        if value == 0:
            return Of.MESSAGE
        number = ("count", -1) if value == -1 else self._number(index)
        if number in (("count", -1), ("place", 1)):
            return Of.MESSAGE | Of.LATER
        if number not in (("place", 0), ("place", -1)):
            self._refuse("it takes a message by its number", node)
        return Of.MESSAGE

    def _number(self, node: nodes.Node | None) -> tuple[str, int] | None:
        """A number of messages: (`place`: of a message, `count`: of all, `kept`: of an earlier message, `fixed`), and what is added to it."""
        match node:
            case nodes.Const() if isinstance(node.value, int) and not isinstance(node.value, bool):
                return "fixed", node.value
            case nodes.Neg() if isinstance(node.node, nodes.Const) and isinstance(node.node.value, int):
                return "fixed", -node.node.value
            case nodes.Getattr() if isinstance(node.node, nodes.Name) and node.node.name == "loop":
                over, backwards = self._loops[-1] if self._loops else (Of.NOTHING, False)
                if backwards and node.attr in ("index", "index0"):
                    return "back", int(node.attr == "index")
                numbers = {"index0": ("place", 0), "index": ("place", 1), "length": ("count", 0)}
                return numbers.get(node.attr) if over & Of.MESSAGES else None
            case nodes.Getattr() if self._value(node.node) & Of.NAMESPACE and node.attr in self._slots:
                return ("kept", 0) if self._slots[node.attr].label & Of.PLACE else None
            case nodes.Filter() if (
                node.name in ("length", "count") and node.node is not None and self._value(node.node) & Of.MESSAGES
            ):
                return "count", 0
            case nodes.Name():
                return self._numbers.get((self._scope(node.name), node.name))
            case nodes.Add() | nodes.Sub():
                left, right = self._number(node.left), self._number(node.right)
                if left is None or right is None:
                    return None
                if right[0] == "fixed":
                    return left[0], left[1] + (right[1] if isinstance(node, nodes.Add) else -right[1])
                if isinstance(node, nodes.Add) and left[0] == "fixed":
                    return right[0], left[1] + right[1]
                if isinstance(node, nodes.Sub) and left[0] == "count" and right[0] == "back":
                    return "place", left[1] - right[1] + 1
        return None

    # --- tests ----------------------------------------------------------------------------------------------

    def _known(self, node: nodes.Node) -> bool | None:
        """The outcome of a test on variables alone; None where it is not known."""
        match node:
            case nodes.Const():
                return bool(node.value)
            case nodes.Name() if node.name not in self._assigned and node.name not in _GIVEN:
                value = self._variables.get(node.name)
                return None if value is ... else bool(value)
            case nodes.Not():
                outcome = self._known(node.node)
                return None if outcome is None else not outcome
            case nodes.And() | nodes.Or():
                sides, decisive = (self._known(node.left), self._known(node.right)), isinstance(node, nodes.Or)
                return decisive if decisive in sides else None if None in sides else not decisive
            case nodes.Test() if isinstance(node.node, nodes.Name) and node.name in ("defined", "undefined"):
                name = node.node.name
                if name in self._assigned or name in (*_GIVEN, *_FUNCTIONS):
                    return None
                return (name in self._variables) == (node.name == "defined")
            case nodes.Compare() | nodes.Call():
                return self._finds(node)
        return None

    def _finds(self, node: nodes.Compare | nodes.Call) -> bool | None:
        """The outcome of looking for a literal in a content that has none of those that the template looks for; None for other tests."""
        if isinstance(node, nodes.Compare):
            if len(node.ops) != 1 or node.ops[0].op not in ("in", "notin", "eq", "ne"):
                return None
            operator, left, right = node.ops[0].op, node.expr, node.ops[0].expr
            if operator in ("in", "notin") and not isinstance(right, nodes.List | nodes.Tuple):
                left, right = right, left
        elif (
            isinstance(node.node, nodes.Getattr)
            and node.node.attr in ("startswith", "endswith")
            and len(node.args) == 1
        ):
            operator, left, right = "in", node.node.node, node.args[0]
        else:
            return None
        texts, labels = self._literals_of(right), self._value(left)
        if not texts or not all(texts) or any(text in _KINDS_TELL for text in texts):
            return None
        others = Of.CHANGED | Of.CALL | Of.PART | Of.MESSAGE | _COUNTED
        if not labels & (Of.CONTENT | Of.JOINED) or labels & others or self._value(right):
            return None
        if labels & Of.JOINED and any(self._crosses(text, operator in ("eq", "ne")) for text in texts):
            return None
        self._test(node)
        return operator in ("notin", "ne")

    def _test(self, node: nodes.Node) -> Of:
        """What the outcome of a test may depend on."""
        match node:
            case nodes.Not():
                return self._test(node.node)
            case nodes.And() | nodes.Or():
                return self._test(node.left) | self._test(node.right)
            case nodes.Test():
                labels = self._value(node.node)
                arguments = self._all([*node.args, *(pair.value for pair in node.kwargs)])
                if node.name in _PURE_TESTS:
                    return labels & _CARRIED
                if labels & ~(_CARRIED | Of.TOOLS) or arguments & ~(_CARRIED | Of.TOOLS):
                    self._refuse(f"it tests whether a part of the conversation is `{node.name}`", node)
                return (labels | arguments) & _CARRIED
            case nodes.Compare():
                operands = zip([node.expr, *(operand.expr for operand in node.ops)], node.ops, strict=False)
                return _union(self._compare(left, right.op, right.expr, node) for left, right in operands)
        labels = self._value(node)
        if labels & _COUNTED or (labels & Of.CHANGED and not self._copies):
            self._refuse("it tests a number or a changed text", node)
        self._blank |= bool(labels & _TEXT)
        self._tools = self._tools or (bool(labels & Of.TOOLS) and not isinstance(node, nodes.Name))
        self._notice(labels)
        return labels & _CARRIED

    def _notice(self, labels: Of) -> None:
        self._late_tests |= bool(labels & Of.LATER)

    def _compare(self, left: nodes.Expr, operator: str, right: nodes.Expr, node: nodes.Compare) -> Of:
        sides = self._value(left), self._value(right)
        labels = sides[0] | sides[1]
        self._notice(labels)
        self._tools |= bool(labels & Of.TOOLS)
        if labels & (Of.PLACE | Of.COUNT):
            return self._compare_numbers(left, operator, right, node)
        only_which_part = labels & Of.PART and not labels & _TEXT
        if labels & Of.STATE:
            return labels & _CARRIED
        if labels & (Of.NUMBER | Of.CHANGED | Of.MESSAGES):
            if not self._counts_none(left, operator, right):
                self._refuse("it compares a length, a number or a changed text", node)
        elif labels & Of.MESSAGE and not only_which_part:
            has_key = operator in ("in", "notin") and not sides[0] and isinstance(left, nodes.Const)
            if not has_key:
                self._refuse("it compares a message", node)
        elif labels & (_TEXT | Of.CALL) and not only_which_part:
            self._compare_text(left, operator, right, sides, node)
        return labels & _CARRIED

    def _compare_text(
        self, left: nodes.Expr, operator: str, right: nodes.Expr, sides: tuple[Of, Of], node: nodes.Compare
    ) -> None:
        of_left = bool(sides[0] & (_TEXT | Of.CALL))
        other = right if of_left else left
        texts = self._literals_of(other)
        equal = operator in ("eq", "ne") or of_left
        in_list = operator in ("in", "notin") and (not of_left or isinstance(other, nodes.List | nodes.Tuple))
        if all(sides) or texts is None or not (operator in ("eq", "ne") or in_list):
            self._refuse("it compares contents with something that is not written in it", node)
        else:
            self._look_for(texts, sides[0] | sides[1], node, equal)

    def _look_for(self, texts: Sequence[str], labels: Of, node: nodes.Expr, equal: bool = False) -> None:
        self._in_calls |= bool(labels & Of.CALL)
        for text in texts:
            if text and text in _PROBES:
                self._refuse(f"it looks for {text!r}, which probes of the checks have too", node)
        crossed = labels & Of.JOINED and any(self._crosses(text, equal) for text in texts)
        if any(texts) and (labels & Of.CHANGED or crossed):
            self._refuse("it looks for something in a text that it has put together", node)
        for text in texts:
            if text:
                (self._equals if equal else self._literals)[text] = None
            else:
                self._blank = True

    def _crosses(self, text: str, equal: bool) -> bool:
        """Whether a text may be in contents with the template's texts around them although it is in no content."""
        return any(around in text if equal else _overlap(text, around) for around in self._around)

    def _counts_none(self, left: nodes.Expr, operator: str, right: nodes.Expr) -> bool:
        """Whether a length of a text or of calls is compared so that only none, one or more can matter."""
        number = self._number(right)
        if not (
            isinstance(left, nodes.Filter) and left.name in ("length", "count") and number and number[0] == "fixed"
        ):
            return False
        of = self._value(left.node)
        if of & (Of.MESSAGES | Of.CHANGED | Of.NUMBER):
            return False
        self._blank |= bool(of & _TEXT)
        bounds = {"gt": (0,), "lteq": (0,), "gteq": (0, 1), "lt": (0, 1), "eq": (0,), "ne": (0,)}
        more = {"gt": (0, 1), "lteq": (0, 1), "gteq": (0, 1, 2), "lt": (0, 1, 2), "eq": (0, 1), "ne": (0, 1)}
        return number[1] in (bounds if of & _TEXT else more).get(operator, ())

    def _compare_numbers(self, left: nodes.Expr, operator: str, right: nodes.Expr, node: nodes.Compare) -> Of:
        """Numbers of messages may tell the first, the last, and those before and after a user's newest message."""
        one, other = self._number(left), self._number(right)
        order = ("place", "kept", "count", "fixed")
        if one is not None and other is not None and {one[0], other[0]} <= {*order}:
            if order.index(one[0]) > order.index(other[0]):
                flipped = {"gt": "lt", "lt": "gt", "gteq": "lteq", "lteq": "gteq"}
                one, other, operator = other, one, flipped.get(operator, operator)
            if _is_edge(one[0], operator, other[0], other[1] - one[1]):
                later = Of.LATER if {"kept", "count"} & {one[0], other[0]} else Of.NOTHING
                self._notice(later)
                return later
        self._refuse("it tests the number of a message or of messages", node)
        return Of.LATER

    def _literals_of(self, node: nodes.Expr) -> list[str] | None:
        """The texts that an expression stands for; None where they are not known."""
        match node:
            case nodes.Const():
                return [node.value] if isinstance(node.value, str) else []
            case nodes.List() | nodes.Tuple():
                return _flat([self._literals_of(item) for item in node.items])
            case nodes.Name() if node.name in self._texts:
                return [self._texts[node.name]]
            case nodes.Name() if node.name not in self._assigned:
                text = self._variables.get(node.name, "")
                return [text] if isinstance(text, str) else None
        return None

    # --- filters and calls ----------------------------------------------------------------------------------

    def _conditional(self, node: nodes.CondExpr) -> Of:
        outcome = self._known(node.test)
        if outcome is not None:
            return self._value(node.expr1 if outcome else node.expr2)
        labels = self._test(node.test)
        with self._under(node.test, True, labels):
            chosen = self._value(node.expr1)
        with self._under(node.test, False, labels):
            chosen |= self._value(node.expr2)
        if labels & Of.STATE:
            self._refuse("what it writes for a message depends on a state that earlier messages left", node)
        self._latched_output |= bool(labels & Of.LATCH)
        return chosen | labels

    def _filter(self, node: nodes.Filter) -> Of:
        if node.node is None:
            self._refuse("it filters a block", node)
            return Of.NUMBER
        labels = self._value(node.node)
        arguments = [*node.args, *(pair.value for pair in node.kwargs)]
        given = self._all(arguments)
        if node.name not in _PURE_FILTERS and (labels | given) & ~Of.TOOLS:
            self._refuse(f"it uses the filter `{node.name}`", node)
            return labels | Of.NUMBER
        if node.name in ("default", "d"):
            if any(not (isinstance(part, nodes.Const) and not part.value) for part in arguments[1:]):
                labels |= self._test(node.node)
            return labels | given
        if node.name in ("length", "count"):
            counted = Of.NUMBER | labels & _CARRIED if labels & ~(Of.TOOLS | _CARRIED) else labels
            return Of.COUNT if labels & Of.MESSAGES else counted
        if labels & Of.MESSAGES:
            if node.name in ("first", "last"):
                return Of.MESSAGE if node.name == "first" else Of.MESSAGE | Of.LATER
            if node.name != "list":
                self._refuse(f"it uses the filter `{node.name}` on the messages", node)
            return labels
        if not labels & _TEXT:
            return labels | given
        in_parts = node.name in ("selectattr", "rejectattr") and self._is_in_parts(node.node)
        if in_parts or (node.name in _TEXT_FILTERS and not node.args):
            return labels
        if node.name == "tojson":
            self._around.update(dict.fromkeys('"\\'))
            return labels | Of.JOINED
        if node.name not in _VISIBLE:
            self._copies = False
        return labels & ~Of.CONTENT | Of.CHANGED | given

    def _call(self, node: nodes.Call) -> Of:
        arguments = [*node.args, *(pair.value for pair in node.kwargs)]
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            self._refuse("it calls something with unpacked arguments", node)
        if isinstance(node.node, nodes.Getattr):
            return self._method(node, node.node, arguments)
        if not isinstance(node.node, nodes.Name):
            self._refuse("it calls what it has worked out", node)
            return self._all(arguments) | Of.NUMBER
        name = node.node.name
        if name in self._macros:
            return self._call_macro(self._macros[name], node)
        labels = self._all(arguments)
        if name in ("namespace", "raise_exception", "dict"):
            return labels
        if name == "strftime_now":
            self._show_time(node)
            return Of.NOTHING
        if name == "range" and not labels & ~Of.TOOLS:
            return labels
        if name == "caller" and self._macro:
            return Of.JOINED
        self._refuse(f"it calls `{name}`", node)
        return labels | Of.NUMBER

    def _show_time(self, node: nodes.Call) -> None:
        texts = self._literals_of(node.args[0]) if node.args else None
        if texts and all(map(_DAY.match, texts)):
            self._dated = True
            return
        self._timed = True
        self._refuse("it shows the time", node)

    def _call_macro(self, macro: nodes.Macro, node: nodes.Call) -> Of:
        writing, self._writing = self._writing, False
        given = [self._value(part) for part in node.args]
        self._writing = writing
        named = {pair.key: self._value(pair.value) for pair in node.kwargs}
        if len(given) > len(macro.args):
            self._refuse("it gives a macro more than it takes", node)
        scopes, self._scopes = self._scopes, [0, id(macro)]
        for parameter, labels in zip(macro.args, given, strict=False):
            self._join(parameter.name, labels)
        for key, labels in named.items():
            self._join(key, labels)
        self._scopes = scopes
        return self._returns.get(macro.name, Of.NOTHING)

    def _method(self, node: nodes.Call, called: nodes.Getattr, arguments: list[nodes.Expr]) -> Of:
        labels = self._value(called.node)
        given = self._all(arguments)
        name = called.attr
        if labels & Of.NAMESPACE or (isinstance(called.node, nodes.Name) and called.node.name == "loop"):
            self._refuse(f"it calls `{name}`", node)
            return Of.NUMBER
        if name == "get" and arguments:
            key = arguments[0].value if isinstance(arguments[0], nodes.Const) else ...
            if labels & Of.MESSAGE and key is ...:
                self._refuse("it reads a key of a message that it has worked out", node)
            read = self._item(called.node, key, node) if key is not ... else labels
            return read | self._all(arguments[1:])
        if not labels & ~(Of.TOOLS | _CARRIED) and not given & ~Of.TOOLS:
            return labels
        if labels & (Of.MESSAGE | Of.MESSAGES | _COUNTED):
            goes_through = name in ("items", "keys", "values")
            self._refuse("it goes through all keys of a message" if goes_through else f"it calls `{name}`", node)
            return Of.NUMBER
        if labels & Of.CALL and not labels & _TEXT and name in ("items", "keys", "values"):
            return labels
        if labels & (_TEXT | Of.CALL):
            return self._text_method(node, name, arguments, labels, given)
        self._refuse(f"it calls `{name}`", node)
        return labels | given | Of.NUMBER

    def _text_method(self, node: nodes.Call, name: str, arguments: list[nodes.Expr], labels: Of, given: Of) -> Of:
        texts = [self._literals_of(part) for part in arguments]
        if name in _TRIMS:
            characters = "".join(text for literals in texts for text in literals or ())
            if None in texts or characters.strip():
                return self._cut(labels)
            return labels
        if name in _SEARCHES and len(texts) == 1 and texts[0]:
            self._look_for(texts[0], labels, node)
            return labels & _CARRIED
        if name in _CUTS and texts and texts[0] and all(texts[0]) and not given:
            self._look_for(texts[0][:1], labels, node)
            return labels
        if name in _VISIBLE or name == "replace":
            self._copies = self._copies and name != "replace"
            return labels & ~Of.CONTENT | Of.CHANGED
        self._refuse(f"it calls `{name}` of a content", node)
        return labels | Of.NUMBER


def _union(labels: Iterable[Of]) -> Of:
    return reduce(or_, labels, Of.NOTHING)


def _is_edge(one: str, operator: str, other: str, difference: int) -> bool:
    """Whether comparing two numbers of messages, `one operator other + difference`, tells no more than the kinds' order does."""
    between = {"gt": difference + 1, "lteq": difference + 1, "gteq": difference, "lt": difference}
    if other == "fixed":
        if operator in ("eq", "ne"):
            return difference in {"place": (0,), "count": (0, 1), "kept": (-1,)}[one]
        return between.get(operator) in {"place": (0, 1), "count": (0, 1, 2), "kept": (-1, 0)}[one]
    if other == "count":
        if operator in ("eq", "ne"):
            return one != "count" and difference == -1
        return one != "count" and between.get(operator) in (-1, 0)
    return one != other and other == "kept" and abs(difference) <= 1


def _constant(node: nodes.Expr) -> Any:
    """A value that is written in the template, negated or not; `...` where it is not."""
    if isinstance(node, nodes.Neg) and isinstance(node.node, nodes.Const):
        return -node.node.value
    return node.value if isinstance(node, nodes.Const) else ...


def _constant_texts(tree: nodes.Template) -> dict[str, str]:
    stored = [node.name for node in tree.find_all(nodes.Name) if node.ctx in ("store", "param")]
    texts = {}
    for node in tree.find_all(nodes.Assign):
        if isinstance(node.target, nodes.Name) and isinstance(node.node, nodes.Const):
            texts[node.target.name] = node.node.value
    return {name: text for name, text in texts.items() if isinstance(text, str) and stored.count(name) == 1}


def _flat(lists: list[list[str] | None]) -> list[str] | None:
    """All texts; None where some are not known."""
    return None if None in lists else [text for texts in lists for text in texts or ()]


def _overlap(text: str, around: str) -> bool:
    """Whether a text may occur in contents with `around` next to them although it occurs in no content."""
    if not around or text in around or around in text:
        return True
    sizes = range(1, min(len(text), len(around)))
    return any(around.endswith(text[:size]) or text.endswith(around[:size]) for size in sizes)


def _calls(node: nodes.Node | None, name: str) -> TypeGuard[nodes.Call]:
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == name


def _conjuncts(test: nodes.Node) -> Iterator[nodes.Node]:
    if isinstance(test, nodes.And):
        yield from _conjuncts(test.left)
        yield from _conjuncts(test.right)
    else:
        yield test


def _says_user(test: nodes.Node) -> bool:
    """Whether a test is `message.role == "user"`."""
    if not (isinstance(test, nodes.Compare) and len(test.ops) == 1 and test.ops[0].op == "eq"):
        return False
    left, right = test.expr, test.ops[0].expr
    key = left.attr if isinstance(left, nodes.Getattr) else getattr(getattr(left, "arg", None), "value", None)
    return key == "role" and isinstance(right, nodes.Const) and right.value == "user"
