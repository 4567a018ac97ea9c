"""The source of a chat template -> what it tests or changes of the conversation, and what makes every prompt be
rendered whole.

Bridges are checked on probes that stand for messages of the same kinds (check.py). That holds for a template that
copies contents and tests no more than a kind says. So this reading of the source decides, once for a template:

- literals that it looks for in contents (`in`, `startswith`, `split`, `replace`, …): in a message without any of them,
  all these tests are false and all these cuts change nothing. A message that has one makes its conversation be rendered
  whole at each turn;
- whether it writes contents changed (cut, in capitals, as JSON): then bridges and replies are rendered with the actual
  contents;
- whether it shows the date;
- everything else that it tests (lengths, parts of contents, numbers of messages, states over several messages, …), and
  all that this reading does not understand: then every conversation is rendered whole at each turn.

The reading is conservative: labels say what a value may depend on, and a variable has the labels of all its
assignments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import msgspec
from jinja2 import nodes

from engine.tokens.bridge.expressions import Expressions, calls
from engine.tokens.bridge.kinds import MARKERS, WRAP, Looked
from engine.tokens.bridge.reading import CARRIED, COUNTED, TEXT, Of, Slot
from engine.tokens.jinja import make_environment

_MAX_ROUNDS = 12


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
    changes: bool = False
    """It writes contents cut or changed, not as they are or trimmed at most."""
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
        return bool(self.literals or self.equals or self.replaces or self.whole_because or self.changes)


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


@lru_cache(maxsize=64)
def _read(sources: tuple[str, ...], variables: tuple[tuple[str, Any], ...], in_parts: bool) -> TemplateKeys:
    readings = [_Statements(make_environment().parse(source), dict(variables), in_parts) for source in sources]
    merged: dict[str, Any] = {}
    for field in TemplateKeys.__struct_fields__:
        values = [getattr(reading, field) for reading in readings]
        texts = isinstance(values[0], dict)
        merged[field] = tuple(dict.fromkeys(chain.from_iterable(values))) if texts else any(values)
    return TemplateKeys(**merged)


def looks(keys: TemplateKeys, source: str) -> tuple[Looked, re.Pattern[str] | None, re.Pattern[str] | None]:
    """What a template looks for: what kinds have to tell, what may be in a text of a reply (None: nothing), and what in
    several texts put together.

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
    if keys.changes:
        return looked, re.compile(""), re.compile("")
    searched = [*map(re.escape, [*markers, *others])]
    return looked, _any([*searched, *equal]), _any([*searched, *(re.escape(text.strip()) for text in keys.equals)])


def _any(patterns: Sequence[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(patterns)) if patterns else None


class _Statements(Expressions):
    """Goes through the statements of one template."""

    def __init__(self, tree: nodes.Template, variables: Mapping[str, Any], in_parts: bool) -> None:
        super().__init__(tree, variables, in_parts)
        self._outer: set[str] = set()
        """Namespaces that are made outside of the loops over messages and of macros."""
        self._loop_tests = 0
        """How many of `tests` are outside of the innermost loop over messages."""
        for _ in range(_MAX_ROUNDS):
            before = self.known()
            self.literals, self.equals, self.whole_because = {}, {}, {}
            self._statements(tree.body)
            if self.known() == before:
                break
        else:
            self.whole_because = {"it is too intricate to be read": None}
        if self.changes and self.tests_later:
            self.refuse("it writes contents cut or changed, depending on later messages")
        if self.writes_latch and any(slot.places for slot in self.slots.values()):
            self.refuse("what it writes for a message depends on earlier messages and on later ones")

    def _statements(self, body: Iterable[nodes.Node]) -> None:
        for node in body:
            match node:
                case nodes.Output():
                    for part in node.nodes:
                        self._write(part)
                case nodes.Assign():
                    self._assign(node.target, self.value(node.node), node.node)
                case nodes.AssignBlock():
                    self._statements(node.body)
                    outputs = [part for inner in node.body for part in (inner, *inner.find_all(nodes.Output))]
                    block = self.all(
                        part for output in outputs if isinstance(output, nodes.Output) for part in output.nodes
                    )
                    self._assign(node.target, block | Of.JOINED, None)
                    if node.filter is not None:
                        self.refuse("it filters a block", node)
                case nodes.If():
                    self._branches(node)
                case nodes.For():
                    self._for(node)
                case nodes.Macro():
                    self._define(node)
                case nodes.ExprStmt():
                    self.value(node.node)
                case nodes.Continue() | nodes.Break():
                    self.tests_later |= bool(self.condition() & Of.LATER)
                    if any(loop & Of.MESSAGES for loop, _ in self.loops[-1:]):
                        self.refuse("it leaves a loop over messages", node)
                case nodes.Scope() | nodes.CallBlock(call=nodes.Call(node=nodes.ExtensionAttribute())):
                    self._statements(node.body)
                case _:
                    self.refuse(f"it has a {type(node).__name__.lower()}, which is not read", node)

    def _write(self, node: nodes.Expr) -> None:
        if isinstance(node, nodes.TemplateData):
            written = Of.NOTHING
        else:
            self.writing = True
            written = self.value(node)
            self.writing = False
            if written & COUNTED:
                self.refuse("it writes a number that depends on the conversation", node)
            if written & (Of.MESSAGES | Of.MESSAGE):
                self.refuse("it writes a message as a whole", node)
        if written & Of.PART:
            written = written & ~Of.PART | Of.CONTENT
        condition = self.condition()
        if calls(node, "raise_exception"):
            return
        self.writes_latch |= bool((condition | written) & Of.LATCH)
        if condition & Of.STATE or (written & Of.STATE and not written & TEXT):
            self.refuse("what it writes for a message depends on a state that earlier messages left", node)
        if self.macro:
            if text := getattr(node, "data", "") or (isinstance(node, nodes.Const) and node.value):
                self.around[str(text)] = None
                written |= Of.JOINED
            self.returns[self.macro] |= written | condition

    def _branches(self, node: nodes.If) -> None:
        rest: list[nodes.Node] = node.else_
        if node.elif_:
            first, *others = node.elif_
            rest = [nodes.If(first.test, first.body, others, node.else_, lineno=first.lineno)]
        outcome = self.outcome(node.test)
        if outcome is not None:
            self._statements(node.body if outcome else rest)
        elif not self._is_alternation(node):
            labels = self.test(node.test)
            for holds, body in ((True, node.body), (False, rest)):
                with self.under(node.test, holds, labels):
                    self._statements(body)

    def _is_alternation(self, node: nodes.If) -> bool:
        """Whether users and others must take turns: the kinds that follow each other say that too."""
        parts = [part for inner in node.body for part in (inner.nodes if isinstance(inner, nodes.Output) else [inner])]
        written = [part for part in parts if not (isinstance(part, nodes.TemplateData) and part.data.isspace())]
        only_raises = all(calls(part, "raise_exception") for part in written) and not node.elif_ and not node.else_
        match node.test:
            case nodes.Compare(
                expr=nodes.Compare() as is_user,
                ops=[nodes.Operand(expr=nodes.Compare(expr=nodes.Mod(left=place, right=nodes.Const(value=2))))],
            ) if only_raises:
                number = self.number(place)
                return number is not None and number[0] == "place" and not self.value(is_user)
        return False

    def _for(self, node: nodes.For) -> None:
        item = labels = self.value(node.iter)
        part = node.iter.arg if isinstance(node.iter, nodes.Getitem) else None
        backwards = isinstance(part, nodes.Slice) and part.step is not None
        if labels & Of.MESSAGES:
            if any(loop & Of.MESSAGES for loop, _ in self.loops):
                self.refuse("it goes through the messages again for each message", node)
            if self.macro:
                self.refuse("a macro goes through the messages", node)
            if node.test is not None:
                self.refuse("it leaves out messages in a loop over them", node)
            item = Of.MESSAGE
        elif labels & Of.CONTENT and self.has_parts(node.iter):
            item = Of.PART
        elif labels & COUNTED:
            self.refuse("it repeats something as many times as the conversation says", node)
        if node.recursive:
            self.refuse("it has a recursive loop", node)
        self.scopes.append(id(node))
        self._assign(node.target, item, None)
        self.loops.append((labels, backwards))
        if node.test is not None:
            self.test(node.test)
        with self.under(node.iter, True, labels & CARRIED):
            before = self._loop_tests
            if labels & Of.MESSAGES:
                self._loop_tests = len(self.tests)
            self._statements(node.body)
            self._loop_tests = before
        self.loops.pop()
        self.scopes.pop()
        self._statements(node.else_)

    def _define(self, node: nodes.Macro) -> None:
        outside = self.macro, self.scopes, self.loops, self.tests
        self.macro, self.scopes = node.name, [0, id(node)]
        self.returns.setdefault(node.name, Of.NOTHING)
        for parameter, value in zip(node.args[len(node.args) - len(node.defaults) :], node.defaults, strict=True):
            self.join(parameter.name, self.value(value))
        self.loops, self.tests = [], []
        self._statements(node.body)
        self.macro, self.scopes, self.loops, self.tests = outside

    # --- assignments ----------------------------------------------------------------------------------------

    def _assign(self, target: nodes.Node, labels: Of, value: nodes.Node | None) -> None:
        if isinstance(target, nodes.Tuple):
            for item in target.items:
                self._assign(item, labels, None)
            return
        labels |= self.condition()
        if isinstance(target, nodes.NSRef):
            self._assign_attribute(target, labels, value)
            return
        assert isinstance(target, nodes.Name)
        key = (self.scopes[-1], target.name)
        if calls(value, "namespace"):
            self.join(target.name, Of.NAMESPACE)
            if not self.in_messages():
                self._outer.add(target.name)
            for pair in value.kwargs:
                self.set_attribute(pair.key, self.value(pair.value))
            return
        number = self.number(value)
        if number is not None or labels & Of.PLACE:
            earlier = self.numbers.get(key, number)
            self.numbers[key] = number if earlier == number else None
        self.join(target.name, labels)

    def _assign_attribute(self, target: nodes.NSRef, labels: Of, value: nodes.Node | None) -> None:
        if not (self.in_messages() and self.scope(target.name) == 0 and target.name in self._outer):
            if self.loops and isinstance(value, nodes.Add | nodes.Sub | nodes.Mul):
                sides = (value.left, value.right)
                if any(isinstance(side, nodes.Const) and isinstance(side.value, int | float) for side in sides):
                    labels |= Of.NUMBER  # it is added up, in a loop whose length no kind tells
            self.set_attribute(target.attr, labels)
            return
        slot = self.slots.setdefault(target.attr, Slot())
        number = self.number(value)
        if isinstance(value, nodes.Const):
            slot.constants.add((type(value.value), value.value))
            slot.other = slot.other or self.depends_on_other_slots(target.attr)
            slot.reset |= not self.macro and not self.tests[self._loop_tests :] and len(self.loops) == 1
        elif number is not None and number[0] == "place" and number[1] in (0, 1) and self.is_of_a_user():
            slot.places = True
        elif labels & TEXT and not labels & (COUNTED | Of.STATE):
            self.set_attribute(target.attr, labels | Of.STATE)
            return
        else:
            slot.other = True
