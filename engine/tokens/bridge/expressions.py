"""An expression of a chat template -> the labels of its value: what the value may depend on.

Reading an expression also notes what it tests or changes: literals that are looked for in contents, cuts, the date, and
why the template cannot be followed. The reading is conservative: a variable has the labels of all its assignments.
keys.py reads the statements.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

from jinja2 import nodes

from engine.tokens.bridge.check import REPLY_STYLES, STYLES, WRAPPER_STYLES
from engine.tokens.bridge.labels import (
    CALL_KEYS,
    CARRIED,
    COUNTED,
    CUTTING,
    FUNCTIONS,
    GIVEN,
    KINDS_TELL,
    LOOP,
    PURE_FILTERS,
    PURE_TESTS,
    SEARCHING,
    TEXT,
    TEXT_FILTERS,
    TEXT_KEYS,
    TRIMMING,
    VISIBLE,
    Of,
    Slot,
    union,
)

_DAY = re.compile(r"(?:[^%]|%[-_^#0]?[aAbBdeDhjmxyYGuUVwWFC%])*\Z")
"""A format of `strftime` that says no more than the day."""
_PROBES = "Q A x " + "".join(
    style(text) for style in (*STYLES, *WRAPPER_STYLES, *REPLY_STYLES) for text in ("Qz1234567890vKxProbe",
    "Wq1234567890jZyProbe", "Wr1234567890kXyProbe", "Why Qz0w")
)  # fmt: skip
"""What the probes of all checks contain."""


class ExpressionReading:
    """The state of reading one template, and what its expressions depend on."""

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
        self._slots: dict[str, Slot] = {}
        self._macros: dict[str, nodes.Macro] = {node.name: node for node in tree.find_all(nodes.Macro)}
        self._returns: dict[str, Of] = {}
        self._assigned = {node.name for node in tree.find_all(nodes.Name) if node.ctx in ("store", "param")}
        self._texts = _constant_texts(tree)  # names that are set once, to a text
        self._macro = ""
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

    def _refuse(self, why: str, node: nodes.Node | None = None) -> None:
        self._whole[f"{why} (line {node.lineno})" if node is not None else why] = None

    def _condition(self) -> Of:
        """What it depends on whether the current node is reached."""
        return union(labels for _, _, labels in self._tests) & CARRIED

    @contextmanager
    def _under(self, test: nodes.Node, holds: bool, labels: Of) -> Iterator[None]:
        self._tests.append((test, holds, labels))
        try:
            yield
        finally:
            self._tests.pop()

    def _join(self, name: str, labels: Of) -> None:
        key = (self._scopes[-1], name)
        self._names[key] = self._names.get(key, Of.NOTHING) | labels

    def _scope(self, name: str) -> int:
        """The innermost scope that has a name."""
        return next((scope for scope in reversed(self._scopes) if (scope, name) in self._names), 0)

    def _is_in_parts(self, node: nodes.Node) -> bool:
        """Whether a content has parts where the current node is: it is no string."""
        if self._in_parts:
            return True
        of = repr(node.node if isinstance(node, nodes.Filter) else node)
        for condition, holds, _ in self._tests:
            for part in conjuncts(condition) if holds else [condition]:
                negated = isinstance(part, nodes.Not)
                test = part.node if isinstance(part, nodes.Not) else part
                is_string = isinstance(test, nodes.Test) and test.name == "string" and repr(test.node) == of
                if is_string and holds == negated:
                    return True
        return False

    # --- expressions ----------------------------------------------------------------------------------------

    def _all(self, parts: Iterable[nodes.Expr]) -> Of:
        return union(map(self._value, parts))

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
        joined = union(part_labels)
        if joined & COUNTED:
            return joined | Of.NUMBER
        if self._writing or not joined & TEXT:
            return joined
        in_parts = bool(self._loops) and bool(self._loops[-1][0] & Of.CONTENT)  # an image's text is between two texts
        if sum(bool(labels & TEXT) for labels in part_labels) > 1 and not in_parts:
            return joined & ~Of.CONTENT | Of.CHANGED
        for part, labels in zip(parts, part_labels, strict=True):
            if not labels & TEXT and (texts := self._texts_of(part)) != [""]:
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
            read = Of.CONTENT if key in TEXT_KEYS else Of.CALL if key in CALL_KEYS else Of.NOTHING
            return read | labels & CARRIED
        if labels & Of.CALL and key == "type":
            return labels & ~Of.CALL
        if labels & Of.PART:
            return labels & CARRIED | (Of.CONTENT if key in ("text", "content") else Of.NOTHING)
        if labels & Of.MESSAGES:
            self._refuse(f"it reads `{key}` of all messages", node)
        return labels & ~Of.NAMESPACE

    def _loop_value(self, key: str, node: nodes.Expr) -> Of:
        over = self._loops[-1][0] if self._loops else Of.NOTHING
        if not self._loops:
            self._refuse("it reads `loop` of a loop outside", node)
        if over & Of.MESSAGES:
            if key not in LOOP:
                self._refuse(f"it reads `loop.{key}` of the messages", node)
            return LOOP.get(key, Of.NUMBER)
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
            return Of.PART | labels & CARRIED
        if labels & TEXT and not isinstance(node.node, nodes.Call):
            return self._cut(labels)
        return labels | index | (Of.NUMBER if index & COUNTED else Of.NOTHING)

    def _slice(self, part: nodes.Slice, labels: Of, node: nodes.Getitem) -> Of:
        ends = [part.start, part.stop, part.step]
        if labels & Of.MESSAGES:
            constants = [None if end is None else _constant(end) for end in ends]
            if not (constants[0] in (None, 0, 1) and constants[1] in (None, -1) and constants[2] in (None, 1, -1)):
                self._refuse("it takes some of the messages by their number", node)
            return Of.MESSAGES
        numbers = self._all(end for end in ends if end is not None)
        if labels & TEXT:
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
        """A number of messages: (`place`: of a message, `count`: of all, `kept`: of an earlier message, `fixed`), and
        what is added to it."""
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
            case nodes.Name() if node.name not in self._assigned and node.name not in GIVEN:
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
                if name in self._assigned or name in (*GIVEN, *FUNCTIONS):
                    return None
                return (name in self._variables) == (node.name == "defined")
            case nodes.Compare() | nodes.Call():
                return self._finds(node)
        return None

    def _finds(self, node: nodes.Compare | nodes.Call) -> bool | None:
        """The outcome of looking for a literal in a content that has none of those that the template looks for; None
        for other tests."""
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
        if not texts or not all(texts) or any(text in KINDS_TELL for text in texts):
            return None
        others = Of.CHANGED | Of.CALL | Of.PART | Of.MESSAGE | COUNTED
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
                if node.name in PURE_TESTS:
                    return labels & CARRIED
                if labels & ~(CARRIED | Of.TOOLS) or arguments & ~(CARRIED | Of.TOOLS):
                    self._refuse(f"it tests whether a part of the conversation is `{node.name}`", node)
                return (labels | arguments) & CARRIED
            case nodes.Compare():
                operands = zip([node.expr, *(operand.expr for operand in node.ops)], node.ops, strict=False)
                return union(self._compare(left, right.op, right.expr, node) for left, right in operands)
        labels = self._value(node)
        if labels & COUNTED or (labels & Of.CHANGED and not self._copies):
            self._refuse("it tests a number or a changed text", node)
        self._blank |= bool(labels & TEXT)
        self._tools = self._tools or (bool(labels & Of.TOOLS) and not isinstance(node, nodes.Name))
        self._notice(labels)
        return labels & CARRIED

    def _notice(self, labels: Of) -> None:
        self._late_tests |= bool(labels & Of.LATER)

    def _compare(self, left: nodes.Expr, operator: str, right: nodes.Expr, node: nodes.Compare) -> Of:
        sides = self._value(left), self._value(right)
        labels = sides[0] | sides[1]
        self._notice(labels)
        self._tools |= bool(labels & Of.TOOLS)
        if labels & (Of.PLACE | Of.COUNT):
            return self._compare_numbers(left, operator, right, node)
        only_which_part = labels & Of.PART and not labels & TEXT
        if labels & Of.STATE:
            return labels & CARRIED
        if labels & (Of.NUMBER | Of.CHANGED | Of.MESSAGES):
            if not self._counts_none(left, operator, right):
                self._refuse("it compares a length, a number or a changed text", node)
        elif labels & Of.MESSAGE and not only_which_part:
            has_key = operator in ("in", "notin") and not sides[0] and isinstance(left, nodes.Const)
            if not has_key:
                self._refuse("it compares a message", node)
        elif labels & (TEXT | Of.CALL) and not only_which_part:
            self._compare_text(left, operator, right, sides, node)
        return labels & CARRIED

    def _compare_text(
        self, left: nodes.Expr, operator: str, right: nodes.Expr, sides: tuple[Of, Of], node: nodes.Compare
    ) -> None:
        of_left = bool(sides[0] & (TEXT | Of.CALL))
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
        self._blank |= bool(of & TEXT)
        bounds = {"gt": (0,), "lteq": (0,), "gteq": (0, 1), "lt": (0, 1), "eq": (0,), "ne": (0,)}
        more = {"gt": (0, 1), "lteq": (0, 1), "gteq": (0, 1, 2), "lt": (0, 1, 2), "eq": (0, 1), "ne": (0, 1)}
        return number[1] in (bounds if of & TEXT else more).get(operator, ())

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
        if node.name not in PURE_FILTERS and (labels | given) & ~Of.TOOLS:
            self._refuse(f"it uses the filter `{node.name}`", node)
            return labels | Of.NUMBER
        if node.name in ("default", "d"):
            if any(not (isinstance(part, nodes.Const) and not part.value) for part in arguments[1:]):
                labels |= self._test(node.node)
            return labels | given
        if node.name in ("length", "count"):
            counted = Of.NUMBER | labels & CARRIED if labels & ~(Of.TOOLS | CARRIED) else labels
            return Of.COUNT if labels & Of.MESSAGES else counted
        if labels & Of.MESSAGES:
            if node.name in ("first", "last"):
                return Of.MESSAGE if node.name == "first" else Of.MESSAGE | Of.LATER
            if node.name != "list":
                self._refuse(f"it uses the filter `{node.name}` on the messages", node)
            return labels
        if not labels & TEXT:
            return labels | given
        in_parts = node.name in ("selectattr", "rejectattr") and self._is_in_parts(node.node)
        if in_parts or (node.name in TEXT_FILTERS and not node.args):
            return labels
        if node.name == "tojson":
            self._around.update(dict.fromkeys('"\\'))
            return labels | Of.JOINED
        if node.name not in VISIBLE:
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
            texts = self._literals_of(node.args[0]) if node.args else None
            if texts and all(map(_DAY.match, texts)):
                self._dated = True
            else:
                self._timed = True
                self._refuse("it shows the time", node)
            return Of.NOTHING
        if name == "range" and not labels & ~Of.TOOLS:
            return labels
        if name == "caller" and self._macro:
            return Of.JOINED
        self._refuse(f"it calls `{name}`", node)
        return labels | Of.NUMBER

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
        if not labels & ~(Of.TOOLS | CARRIED) and not given & ~Of.TOOLS:
            return labels
        if labels & (Of.MESSAGE | Of.MESSAGES | COUNTED):
            goes_through = name in ("items", "keys", "values")
            self._refuse("it goes through all keys of a message" if goes_through else f"it calls `{name}`", node)
            return Of.NUMBER
        if labels & Of.CALL and not labels & TEXT and name in ("items", "keys", "values"):
            return labels
        if labels & (TEXT | Of.CALL):
            return self._text_method(node, name, arguments, labels, given)
        self._refuse(f"it calls `{name}`", node)
        return labels | given | Of.NUMBER

    def _text_method(self, node: nodes.Call, name: str, arguments: list[nodes.Expr], labels: Of, given: Of) -> Of:
        texts = [self._literals_of(part) for part in arguments]
        if name in TRIMMING:
            characters = "".join(text for literals in texts for text in literals or ())
            if None in texts or characters.strip():
                return self._cut(labels)
            return labels
        if name in SEARCHING and len(texts) == 1 and texts[0]:
            self._look_for(texts[0], labels, node)
            return labels & CARRIED
        if name in CUTTING and texts and texts[0] and all(texts[0]) and not given:
            self._look_for(texts[0][:1], labels, node)
            return labels
        if name in VISIBLE or name == "replace":
            self._copies = self._copies and name != "replace"
            return labels & ~Of.CONTENT | Of.CHANGED
        self._refuse(f"it calls `{name}` of a content", node)
        return labels | Of.NUMBER


def _is_edge(one: str, operator: str, other: str, difference: int) -> bool:
    """Whether comparing two numbers of messages, `one operator other + difference`, tells no more than the kinds' order
    does."""
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


def calls(node: nodes.Node | None, name: str) -> TypeGuard[nodes.Call]:
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == name


def conjuncts(test: nodes.Node) -> Iterator[nodes.Node]:
    if isinstance(test, nodes.And):
        yield from conjuncts(test.left)
        yield from conjuncts(test.right)
    else:
        yield test
