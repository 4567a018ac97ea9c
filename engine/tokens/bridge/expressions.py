"""An expression of a chat template -> the labels of its value: what the value may depend on.

Labelling an expression also notes what it tests or changes: literals that are looked for in contents, cuts, the date,
and why the template cannot be followed. It is conservative: a variable has the labels of all its assignments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, TypeGuard

from jinja2 import nodes

from engine.tokens.bridge.reading import (
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
    Reading,
    union,
)

_DAY = re.compile(r"(?:[^%]|%[-_^#0]?[aAbBdeDhjmxyYGuUVwWFC%])*\Z")
"""A format of `strftime` that says no more than the day."""
_MOST_TEXTS = 64
"""Maximum number of different texts that are kept for one expression."""


class Expressions(Reading):
    """The labels of the expressions of one template, where its reading is."""

    def all(self, parts: Iterable[nodes.Expr]) -> Of:
        """The labels of several values."""
        return union(map(self.value, parts))

    def value(self, node: nodes.Node | None) -> Of:
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
                return self.test(node)
            case nodes.And() | nodes.Or():
                return self.test(node.left) | self.value(node.right)
            case nodes.CondExpr():
                return self._conditional(node)
            case nodes.Call():
                return self._call(node)
            case nodes.List() | nodes.Tuple():
                return self.all(node.items)
            case nodes.Dict():
                return self.all(part for pair in node.items for part in (pair.key, pair.value))
            case nodes.Concat():
                return self._joined(node.nodes)
            case nodes.Add():
                if (number := self.number(node)) is not None:
                    return Of.PLACE if number[0] == "place" else Of.COUNT
                return self._joined([node.left, node.right])
            case nodes.Sub() if (number := self.number(node)) is not None:
                return {"place": Of.PLACE, "count": Of.COUNT, "kept": Of.PLACE | Of.LATER}.get(number[0], Of.NOTHING)
            case nodes.BinExpr():
                parts = self.all([node.left, node.right])
                return parts | Of.NUMBER if parts & ~Of.TOOLS else parts
            case nodes.UnaryExpr():
                return self.value(node.node)
            case _:
                return self.refuse(f"it has a {type(node).__name__.lower()}, which is not read", node)

    def _joined(self, parts: Sequence[nodes.Expr]) -> Of:
        """Texts that are put together."""
        part_labels = [self.value(part) for part in parts]
        joined = union(part_labels)
        if joined & COUNTED:
            return joined | Of.NUMBER
        if self.writing or not joined & TEXT:
            return joined
        in_parts = bool(self.loops) and bool(self.loops[-1][0] & Of.CONTENT)  # an image is between two texts
        if sum(bool(labels & TEXT) for labels in part_labels) > 1 and not in_parts:
            return self.changed(joined, seen=True)
        for part, labels in zip(parts, part_labels, strict=True):
            if not labels & TEXT and (texts := self.texts(part)) != [""]:
                if texts is None:
                    return self.changed(joined, seen=True)
                self.around.update(dict.fromkeys(filter(None, texts)))
                joined |= Of.JOINED
        return joined

    def texts(self, node: nodes.Node) -> list[str] | None:
        """The texts that an expression may stand for, or that a list of texts holds; None where they are not known."""
        parts = list[nodes.Expr]()
        match node:
            case nodes.Const():
                return [node.value] if isinstance(node.value, str) else []
            case nodes.Name() if node.name in self.constants:
                return [self.constants[node.name]]
            case nodes.Name() if node.name not in self.assigned:
                text = self.variables.get(node.name, "")
                return [text] if isinstance(text, str) else None
            case nodes.List() | nodes.Tuple():
                parts = node.items
            case nodes.CondExpr():
                parts = [node.expr1, node.expr2 or nodes.Const("")]
            case nodes.Add() | nodes.Concat():
                parts = node.nodes if isinstance(node, nodes.Concat) else [node.left, node.right]
            case _:
                return None
        choices = [texts for part in parts if (texts := self.texts(part)) is not None]
        if len(choices) < len(parts):
            return None
        if isinstance(node, nodes.List | nodes.Tuple | nodes.CondExpr):
            return [text for texts in choices for text in texts]
        joined = {"".join(texts) for texts, _ in zip(product(*choices), range(_MOST_TEXTS + 1), strict=False)}
        return None if len(joined) > _MOST_TEXTS else sorted(joined)

    def _name(self, node: nodes.Name) -> Of:
        if node.name == "loop":
            return Of.LOOP
        scope = self.scope(node.name)
        given = {"messages": Of.MESSAGES, "tools": Of.TOOLS}.get(node.name, Of.NOTHING)
        assigned = self.names.get((scope, node.name))
        if assigned is None:
            return given
        return assigned if scope else assigned | given & Of.MESSAGES

    # --- parts of values ------------------------------------------------------------------------------------

    def _item(self, of: nodes.Expr, key: Any, node: nodes.Expr) -> Of:
        """`of.key`"""
        if isinstance(of, nodes.Name) and of.name == "loop":
            return self._loop_value(key, node)
        labels = self.value(of)
        if labels & Of.NAMESPACE and isinstance(key, str):
            assigned = self.attributes.get(key, Of.NOTHING)
            return assigned | self.slots[key].label if key in self.slots else assigned
        if labels & Of.MESSAGE:
            read = Of.CONTENT if key in TEXT_KEYS else Of.CALL if key in CALL_KEYS else Of.NOTHING
            return read | labels & CARRIED
        if labels & Of.CALL and key == "type":
            return labels & ~Of.CALL
        if labels & Of.PART:
            return labels & CARRIED | (Of.CONTENT if key in ("text", "content") else Of.NOTHING)
        if labels & Of.MESSAGES:
            self.refuse(f"it reads `{key}` of all messages", node)
        return labels & ~Of.NAMESPACE

    def _loop_value(self, key: str, node: nodes.Expr) -> Of:
        over = self.loops[-1][0] if self.loops else Of.NOTHING
        if not self.loops:
            self.refuse("it reads `loop` of a loop outside", node)
        if over & Of.MESSAGES:
            if key not in LOOP:
                self.refuse(f"it reads `loop.{key}` of the messages", node)
            return LOOP.get(key, Of.NUMBER)
        if key in ("first", "last"):
            return Of.NOTHING
        if key in ("previtem", "nextitem"):
            return over
        return Of.NUMBER if over & ~Of.TOOLS else Of.NOTHING

    def _getitem(self, node: nodes.Getitem) -> Of:
        if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
            return self._item(node.node, node.arg.value, node)
        labels = self.value(node.node)
        if isinstance(node.arg, nodes.Slice):
            return self._slice(node.arg, labels, node)
        if labels & Of.MESSAGES:
            return self._message_at(node.arg, node)
        index = self.value(node.arg)
        if labels & Of.CONTENT and self.has_parts(node.node):
            return Of.PART | labels & CARRIED
        if labels & TEXT and not isinstance(node.node, nodes.Call):
            return self.changed(labels)
        return labels | index | (Of.NUMBER if index & COUNTED else Of.NOTHING)

    def _slice(self, part: nodes.Slice, labels: Of, node: nodes.Getitem) -> Of:
        ends = [part.start, part.stop, part.step]
        if labels & Of.MESSAGES:
            start, stop, step = (None if end is None else _constant(end) for end in ends)
            if not (start in (None, 0, 1) and stop in (None, -1) and step in (None, 1, -1)):
                self.refuse("it takes some of the messages by their number", node)
            return Of.MESSAGES
        numbers = self.all(end for end in ends if end is not None)
        if labels & TEXT:
            return self.changed(labels)
        return labels | Of.NUMBER if (numbers | labels) & ~Of.TOOLS else labels

    def _message_at(self, index: nodes.Expr, node: nodes.Expr) -> Of:
        value = _constant(index)
        if value == 0:
            return Of.MESSAGE
        number = ("count", -1) if value == -1 else self.number(index)
        if number in (("count", -1), ("place", 1)):
            return Of.MESSAGE | Of.LATER
        if number not in (("place", 0), ("place", -1)):
            self.refuse("it takes a message by its number", node)
        return Of.MESSAGE

    # --- numbers of messages --------------------------------------------------------------------------------

    def number(self, node: nodes.Node | None) -> tuple[str, int] | None:
        """A number of messages: (`place`: of a message, `count`: of all, `kept`: of an earlier message, `back`: of a
        message from the end, `fixed`), and what is added to it."""
        match node:
            case nodes.Const() | nodes.Neg() if type(constant := _constant(node)) is int:
                return "fixed", constant
            case nodes.Getattr() if isinstance(node.node, nodes.Name) and node.node.name == "loop":
                over, backwards = self.loops[-1] if self.loops else (Of.NOTHING, False)
                if backwards and node.attr in ("index", "index0"):
                    return "back", int(node.attr == "index")
                numbers = {"index0": ("place", 0), "index": ("place", 1), "length": ("count", 0)}
                return numbers.get(node.attr) if over & Of.MESSAGES else None
            case nodes.Getattr() if self.value(node.node) & Of.NAMESPACE and node.attr in self.slots:
                return ("kept", 0) if self.slots[node.attr].label & Of.PLACE else None
            case nodes.Filter() if (
                node.name in ("length", "count") and node.node is not None and self.value(node.node) & Of.MESSAGES
            ):
                return "count", 0
            case nodes.Name():
                return self.numbers.get((self.scope(node.name), node.name))
            case nodes.Add() | nodes.Sub():
                left, right = self.number(node.left), self.number(node.right)
                if left is None or right is None:
                    return None
                if right[0] == "fixed":
                    return left[0], left[1] + (right[1] if isinstance(node, nodes.Add) else -right[1])
                if isinstance(node, nodes.Add) and left[0] == "fixed":
                    return right[0], left[1] + right[1]
                if isinstance(node, nodes.Sub) and left[0] == "count" and right[0] == "back":
                    return "place", left[1] - right[1] + 1
        return None

    def _compare_numbers(self, left: nodes.Expr, operator: str, right: nodes.Expr, node: nodes.Compare) -> Of:
        """Numbers of messages may tell the first, the last, and those before and after a user's newest message."""
        one, other = self.number(left), self.number(right)
        order = ("place", "kept", "count", "fixed")
        if one is not None and other is not None and {one[0], other[0]} <= {*order}:
            if order.index(one[0]) > order.index(other[0]):
                flipped = {"gt": "lt", "lt": "gt", "gteq": "lteq", "lteq": "gteq"}
                one, other, operator = other, one, flipped.get(operator, operator)
            if _is_edge(one[0], operator, other[0], other[1] - one[1]):
                later = Of.LATER if {"kept", "count"} & {one[0], other[0]} else Of.NOTHING
                self.tests_later |= bool(later)
                return later
        self.refuse("it tests the number of a message or of messages", node)
        return Of.LATER

    def _counts_none(self, left: nodes.Expr, operator: str, right: nodes.Expr) -> bool:
        """Whether a length of a text or of calls is compared so that only none, one or more can matter."""
        number = self.number(right)
        if not (
            isinstance(left, nodes.Filter) and left.name in ("length", "count") and number and number[0] == "fixed"
        ):
            return False
        of = self.value(left.node)
        if of & (Of.MESSAGES | Of.CHANGED | Of.NUMBER):
            return False
        self.tests_blank |= bool(of & TEXT)
        bounds = {"gt": (0,), "lteq": (0,), "gteq": (0, 1), "lt": (0, 1), "eq": (0,), "ne": (0,)}
        more = {"gt": (0, 1), "lteq": (0, 1), "gteq": (0, 1, 2), "lt": (0, 1, 2), "eq": (0, 1), "ne": (0, 1)}
        return number[1] in (bounds if of & TEXT else more).get(operator, ())

    # --- tests ----------------------------------------------------------------------------------------------

    def outcome(self, node: nodes.Node) -> bool | None:
        """The outcome of a test on variables alone; None where it is not known."""
        match node:
            case nodes.Const():
                return bool(node.value)
            case nodes.Name() if node.name not in self.assigned and node.name not in GIVEN:
                value = self.variables.get(node.name)
                return None if value is ... else bool(value)
            case nodes.Not():
                outcome = self.outcome(node.node)
                return None if outcome is None else not outcome
            case nodes.And() | nodes.Or():
                sides, decisive = (self.outcome(node.left), self.outcome(node.right)), isinstance(node, nodes.Or)
                return decisive if decisive in sides else None if None in sides else not decisive
            case nodes.Test() if isinstance(node.node, nodes.Name) and node.name in ("defined", "undefined"):
                name = node.node.name
                if name in self.assigned or name in (*GIVEN, *FUNCTIONS):
                    return None
                return (name in self.variables) == (node.name == "defined")
            case nodes.Compare(ops=[operand]) if operand.op in ("eq", "ne"):
                return self._finds(node, node.expr, operand.expr, negated=operand.op == "ne", equal=True)
            case nodes.Compare(ops=[operand]) if operand.op in ("in", "notin"):
                sides_ = [node.expr, operand.expr]
                if not isinstance(operand.expr, nodes.List | nodes.Tuple):
                    sides_.reverse()
                return self._finds(node, *sides_, negated=operand.op == "notin")
            case nodes.Call(node=nodes.Getattr() as called, args=[text]) if called.attr in ("startswith", "endswith"):
                return self._finds(node, called.node, text)
        return None

    def _finds(
        self, node: nodes.Node, content: nodes.Expr, text: nodes.Expr, *, negated: bool = False, equal: bool = False
    ) -> bool | None:
        """The outcome of looking for a literal in a content that has none of those that the template looks for; None
        for other values."""
        texts, labels = self.texts(text), self.value(content)
        if not texts or not all(texts) or any(text in KINDS_TELL for text in texts):
            return None
        others = Of.CHANGED | Of.CALL | Of.PART | Of.MESSAGE | COUNTED
        if not labels & (Of.CONTENT | Of.JOINED) or labels & others or self.value(text):
            return None
        if labels & Of.JOINED and any(self.crosses(text, equal) for text in texts):
            return None
        self.test(node)
        return negated

    def test(self, node: nodes.Node) -> Of:
        """What the outcome of a test may depend on."""
        match node:
            case nodes.Not():
                return self.test(node.node)
            case nodes.And() | nodes.Or():
                return self.test(node.left) | self.test(node.right)
            case nodes.Test():
                labels = self.value(node.node)
                arguments = self.all([*node.args, *(pair.value for pair in node.kwargs)])
                if node.name in PURE_TESTS:
                    return labels & CARRIED
                if labels & ~(CARRIED | Of.TOOLS) or arguments & ~(CARRIED | Of.TOOLS):
                    self.refuse(f"it tests whether a part of the conversation is `{node.name}`", node)
                return (labels | arguments) & CARRIED
            case nodes.Compare():
                operands = zip([node.expr, *(operand.expr for operand in node.ops)], node.ops, strict=False)
                return union(self._compare(left, right.op, right.expr, node) for left, right in operands)
        labels = self.value(node)
        if labels & COUNTED or (labels & Of.CHANGED and self.changes):
            self.refuse("it tests a number or a changed text", node)
        self.tests_blank |= bool(labels & TEXT)
        self.tests_tools |= bool(labels & Of.TOOLS) and not isinstance(node, nodes.Name)
        self.tests_later |= bool(labels & Of.LATER)
        return labels & CARRIED

    def _compare(self, left: nodes.Expr, operator: str, right: nodes.Expr, node: nodes.Compare) -> Of:
        sides = self.value(left), self.value(right)
        labels = sides[0] | sides[1]
        self.tests_later |= bool(labels & Of.LATER)
        self.tests_tools |= bool(labels & Of.TOOLS)
        if labels & (Of.PLACE | Of.COUNT):
            return self._compare_numbers(left, operator, right, node)
        only_which_part = labels & Of.PART and not labels & TEXT
        if labels & Of.STATE:
            return labels & CARRIED
        if labels & (Of.NUMBER | Of.CHANGED | Of.MESSAGES):
            if not self._counts_none(left, operator, right):
                self.refuse("it compares a length, a number or a changed text", node)
        elif labels & Of.MESSAGE and not only_which_part:
            has_key = operator in ("in", "notin") and not sides[0] and isinstance(left, nodes.Const)
            if not has_key:
                self.refuse("it compares a message", node)
        elif labels & (TEXT | Of.CALL) and not only_which_part:
            of_left = bool(sides[0] & (TEXT | Of.CALL))
            other = right if of_left else left
            texts = self.texts(other)
            equal = operator in ("eq", "ne")
            in_list = operator in ("in", "notin") and (not of_left or isinstance(other, nodes.List | nodes.Tuple))
            if all(sides) or texts is None or not (equal or in_list):
                self.refuse("it compares contents with something that is not written in it", node)
            else:
                self.look_for(texts, labels, node, equal=equal or of_left)
        return labels & CARRIED

    def _conditional(self, node: nodes.CondExpr) -> Of:
        outcome = self.outcome(node.test)
        if outcome is not None:
            return self.value(node.expr1 if outcome else node.expr2)
        labels = self.test(node.test)
        chosen = Of.NOTHING
        for holds, value in ((True, node.expr1), (False, node.expr2)):
            with self.under(node.test, holds, labels):
                chosen |= self.value(value)
        if labels & Of.STATE:
            self.refuse("what it writes for a message depends on a state that earlier messages left", node)
        self.writes_latch |= bool(labels & Of.LATCH)
        return chosen | labels

    # --- filters and calls ----------------------------------------------------------------------------------

    def _filter(self, node: nodes.Filter) -> Of:
        if node.node is None:
            return self.refuse("it filters a block", node)
        labels = self.value(node.node)
        arguments = [*node.args, *(pair.value for pair in node.kwargs)]
        given = self.all(arguments)
        if node.name not in PURE_FILTERS and (labels | given) & ~Of.TOOLS:
            return labels | self.refuse(f"it uses the filter `{node.name}`", node)
        if node.name in ("default", "d"):
            if any(not (isinstance(part, nodes.Const) and not part.value) for part in arguments[1:]):
                labels |= self.test(node.node)
            return labels | given
        if node.name in ("length", "count"):
            counted = Of.NUMBER | labels & CARRIED if labels & ~(Of.TOOLS | CARRIED) else labels
            return Of.COUNT if labels & Of.MESSAGES else counted
        if labels & Of.MESSAGES:
            if node.name in ("first", "last"):
                return Of.MESSAGE if node.name == "first" else Of.MESSAGE | Of.LATER
            if node.name != "list":
                self.refuse(f"it uses the filter `{node.name}` on the messages", node)
            return labels
        if not labels & TEXT:
            return labels | given
        in_parts = node.name in ("selectattr", "rejectattr") and self.has_parts(node.node)
        if in_parts or (node.name in TEXT_FILTERS and not node.args):
            return labels
        if node.name == "tojson":
            self.around.update(dict.fromkeys('"\\'))
            return labels | Of.JOINED
        return self.changed(labels, seen=node.name in VISIBLE) | given

    def _call(self, node: nodes.Call) -> Of:
        arguments = [*node.args, *(pair.value for pair in node.kwargs)]
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            self.refuse("it calls something with unpacked arguments", node)
        if isinstance(node.node, nodes.Getattr):
            return self._method(node, node.node, arguments)
        if not isinstance(node.node, nodes.Name):
            return self.refuse("it calls what it has worked out", node) | self.all(arguments)
        name = node.node.name
        if name in self.macros:
            return self._call_macro(self.macros[name], node)
        labels = self.all(arguments)
        if name in ("namespace", "raise_exception", "dict"):
            return labels
        if name == "strftime_now":
            texts = self.texts(node.args[0]) if node.args else None
            if texts and all(map(_DAY.match, texts)):
                self.dated = True
            else:
                self.timed = True
                self.refuse("it shows the time", node)
            return Of.NOTHING
        if name == "range" and not labels & ~Of.TOOLS:
            return labels
        if name == "caller" and self.macro:
            return Of.JOINED
        return labels | self.refuse(f"it calls `{name}`", node)

    def _call_macro(self, macro: nodes.Macro, node: nodes.Call) -> Of:
        writing, self.writing = self.writing, False
        given = [self.value(part) for part in node.args]
        self.writing = writing
        named = {pair.key: self.value(pair.value) for pair in node.kwargs}
        if len(given) > len(macro.args):
            self.refuse("it gives a macro more than it takes", node)
        scopes, self.scopes = self.scopes, [0, id(macro)]
        parameters = zip((parameter.name for parameter in macro.args), given, strict=False)
        for name, labels in (*parameters, *named.items()):
            self.join(name, labels)
        self.scopes = scopes
        return self.returns.get(macro.name, Of.NOTHING)

    def _method(self, node: nodes.Call, called: nodes.Getattr, arguments: list[nodes.Expr]) -> Of:
        labels = self.value(called.node)
        given = self.all(arguments)
        name = called.attr
        if labels & Of.NAMESPACE or (isinstance(called.node, nodes.Name) and called.node.name == "loop"):
            return self.refuse(f"it calls `{name}`", node)
        if name == "get" and arguments:
            key = _constant(arguments[0])
            if labels & Of.MESSAGE and key is ...:
                self.refuse("it reads a key of a message that it has worked out", node)
            read = self._item(called.node, key, node) if key is not ... else labels
            return read | self.all(arguments[1:])
        if not labels & ~(Of.TOOLS | CARRIED) and not given & ~Of.TOOLS:
            return labels
        if labels & (Of.MESSAGE | Of.MESSAGES | COUNTED):
            goes_through = name in ("items", "keys", "values")
            return self.refuse("it goes through all keys of a message" if goes_through else f"it calls `{name}`", node)
        if labels & Of.CALL and not labels & TEXT and name in ("items", "keys", "values"):
            return labels
        if labels & (TEXT | Of.CALL):
            return self._text_method(node, name, arguments, labels, given)
        return labels | given | self.refuse(f"it calls `{name}`", node)

    def _text_method(self, node: nodes.Call, name: str, arguments: list[nodes.Expr], labels: Of, given: Of) -> Of:
        texts = [self.texts(part) for part in arguments]
        if name in TRIMMING:
            characters = "".join(text for literals in texts for text in literals or ())
            return self.changed(labels) if None in texts or characters.strip() else labels
        if name in SEARCHING and len(texts) == 1 and texts[0]:
            self.look_for(texts[0], labels, node)
            return labels & CARRIED
        if name in CUTTING and texts and texts[0] and all(texts[0]) and not given:
            self.look_for(texts[0], labels, node)
            return labels
        if name in VISIBLE or name == "replace":
            return self.changed(labels, seen=name != "replace")
        return labels | self.refuse(f"it calls `{name}` of a content", node)


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


def _constant(node: nodes.Node) -> Any:
    """A value that is written in the template, negated or not; `...` where it is not."""
    if isinstance(node, nodes.Neg) and isinstance(node.node, nodes.Const) and isinstance(node.node.value, int):
        return -node.node.value
    return node.value if isinstance(node, nodes.Const) else ...


def calls(node: nodes.Node | None, name: str) -> TypeGuard[nodes.Call]:
    """Whether a node calls a function of this name."""
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == name
