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
from typing import Any

import msgspec
from jinja2 import nodes

from engine.tokens.bridge.expressions import ExpressionReading, calls, conjuncts
from engine.tokens.bridge.kinds import MARKERS, WRAP, Looked
from engine.tokens.bridge.labels import CARRIED, COUNTED, TEXT, Of, Slot
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
    readings = [_TemplateReading(make_environment().parse(source), dict(variables), in_parts) for source in sources]
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
    if not keys.copies:
        return looked, re.compile(""), re.compile("")
    searched = [*map(re.escape, [*markers, *others])]
    return looked, _any([*searched, *equal]), _any([*searched, *(re.escape(text.strip()) for text in keys.equals)])


def _any(patterns: Sequence[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(patterns)) if patterns else None


class _TemplateReading(ExpressionReading):
    """The reading of one template: its statements."""

    def __init__(self, tree: nodes.Template, variables: Mapping[str, Any], in_parts: bool) -> None:
        super().__init__(tree, variables, in_parts)
        self._outer: set[str] = set()  # namespaces that are made outside of the loops over messages and of macros
        self._loop_tests = 0  # how many of `_tests` are outside of the innermost loop over messages

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
            tuple(self._literals), tuple(self._equals), self._in_calls, self._replaces, self._copies, self._blank,
            self._tools, self._dated, self._timed, tuple(self._whole)
        )  # fmt: skip

    def _state(self) -> str:
        return repr((self._around, self._names, self._attributes, self._slots, self._returns, self._numbers))

    def _statements(self, body: Iterable[nodes.Node]) -> None:
        for node in body:
            match node:
                case nodes.Output():
                    for part in node.nodes:
                        self._write(part)
                case nodes.Assign():
                    self._assign(node.target, self._value(node.node), node.node)
                case nodes.AssignBlock():
                    self._statements(node.body)
                    outputs = [part for inner in node.body for part in (inner, *inner.find_all(nodes.Output))]
                    block = self._all(
                        part for output in outputs if isinstance(output, nodes.Output) for part in output.nodes
                    )
                    self._assign(node.target, block | Of.JOINED, None)
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
            if written & COUNTED:
                self._refuse("it writes a number that depends on the conversation", node)
            if written & (Of.MESSAGES | Of.MESSAGE):
                self._refuse("it writes a message as a whole", node)
        if written & Of.PART:
            written = written & ~Of.PART | Of.CONTENT
        condition = self._condition()
        if calls(node, "raise_exception"):
            return
        self._latched_output |= bool((condition | written) & Of.LATCH)
        if condition & Of.STATE or (written & Of.STATE and not written & TEXT):
            self._refuse("what it writes for a message depends on a state that earlier messages left", node)
        if self._macro:
            if text := getattr(node, "data", "") or (isinstance(node, nodes.Const) and node.value):
                self._around[str(text)] = None
                written |= Of.JOINED
            self._returns[self._macro] |= written | condition

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

    def _is_alternation(self, node: nodes.If) -> bool:
        """Whether users and others must take turns: the kinds that follow each other say that too."""
        parts = [part for inner in node.body for part in (inner.nodes if isinstance(inner, nodes.Output) else [inner])]
        written = [part for part in parts if not (isinstance(part, nodes.TemplateData) and part.data.isspace())]
        only_raises = all(calls(part, "raise_exception") for part in written) and not node.elif_ and not node.else_
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
        elif labels & COUNTED:
            self._refuse("it repeats something as many times as the conversation says", node)
        if node.recursive:
            self._refuse("it has a recursive loop", node)
        self._scopes.append(id(node))
        self._assign(node.target, item, None)
        self._loops.append((labels, backwards))
        if node.test is not None:
            self._test(node.test)
        with self._under(node.iter, True, labels & CARRIED):
            before, self._loop_tests = self._loop_tests, len(self._tests) if labels & Of.MESSAGES else self._loop_tests
            self._statements(node.body)
            self._loop_tests = before
        self._loops.pop()
        self._scopes.pop()
        self._statements(node.else_)

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
        if calls(value, "namespace"):
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

    def _set(self, attribute: str, labels: Of) -> None:
        self._attributes[attribute] = self._attributes.get(attribute, Of.NOTHING) | labels

    def _assign_attribute(self, target: nodes.NSRef, labels: Of, value: nodes.Node | None) -> None:
        if not (self._in_messages() and self._scope(target.name) == 0 and target.name in self._outer):
            self._set(target.attr, labels | Of.NUMBER if self._repeats(value) else labels)
            return
        slot = self._slots.setdefault(target.attr, Slot())
        number = self._number(value)
        if isinstance(value, nodes.Const):
            slot.constants.add((type(value.value), value.value))
            slot.other = slot.other or self._depends_on_other_slots(target.attr)
            slot.reset |= not self._macro and not self._tests[self._loop_tests :] and len(self._loops) == 1
        elif number is not None and number[0] == "place" and number[1] in (0, 1) and self._is_of_a_user():
            slot.places = True
        elif labels & TEXT and not labels & (COUNTED | Of.STATE):
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
        """Whether the current node is reached for each message of a user and no other; going backwards, for the last
        one."""
        if not self._loops[-1][1] and any(labels & (Of.LATCH | Of.STATE) for _, _, labels in self._tests):
            return False
        return any(holds and any(map(_says_user, conjuncts(test))) for test, holds, _ in self._tests)


def _says_user(test: nodes.Node) -> bool:
    """Whether a test is `message.role == "user"`."""
    if not (isinstance(test, nodes.Compare) and len(test.ops) == 1 and test.ops[0].op == "eq"):
        return False
    left, right = test.expr, test.ops[0].expr
    key = left.attr if isinstance(left, nodes.Getattr) else getattr(getattr(left, "arg", None), "value", None)
    return key == "role" and isinstance(right, nodes.Const) and right.value == "user"
