"""CEL's grammar, as far as guards need it: an expression -> a tree that knows the place of each of its parts.

Knows nothing of variables or types. The library that runs guards gives no tree; it remains the authority on what is
CEL, and this parser reads what it accepts. Grammar: the Common Expression Language specification, "Syntax".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

DEEPEST = 50
"""Levels that a tree may have: bounds the recursion of whoever walks it."""

MACROS = {"all": 1, "exists": 1, "exists_one": 1, "filter": 1, "map": 1}
"""Comprehensions over a list or the keys of a map; `map` may have a condition before its result."""


class ExpressionError(ValueError):
    """The text is no expression that this parser knows."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


@dataclass(frozen=True, slots=True)
class Node:
    """A part of an expression: the text from `start` up to `end`."""

    start: int
    end: int

    def children(self) -> Iterator[Node]:
        """The parts that it is made of, in the order in which they are written."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Node):
                yield value
            elif isinstance(value, tuple):
                yield from value

    def walk(self) -> Iterator[Node]:
        """It and all that is in it, outermost first."""
        yield self
        for child in self.children():
            yield from child.walk()


@dataclass(frozen=True, slots=True)
class Name(Node):
    """A variable, or a type such as `int`."""

    name: str


@dataclass(frozen=True, slots=True)
class Constant(Node):
    """A literal: its CEL type and its text."""

    type: str
    text: str


@dataclass(frozen=True, slots=True)
class Select(Node):
    """`of.field`; inside `has()`, a test whether it is there."""

    of: Node
    field: str
    test: bool = False


@dataclass(frozen=True, slots=True)
class Index(Node):
    """`of[key]`."""

    of: Node
    key: Node


@dataclass(frozen=True, slots=True)
class Call(Node):
    """`name(args)`, or `target.name(args)`."""

    name: str
    target: Node | None
    args: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Operation(Node):
    """An operator and what it is applied to: `!`, `-` (one), `?:` (three), `&&`, `||` (two or more), others two."""

    operator: str
    args: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Comprehension(Node):
    """`over.name(variable, bodies)`."""

    name: str
    over: Node
    variable: str
    bodies: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class ListOf(Node):
    """`[a, b]`."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class MapOf(Node):
    """`{key: value}`: keys and values in turn."""

    items: tuple[Node, ...]


_TOKEN = re.compile(
    r"""(?P<blank>[\t\n\f\r ]+|//[^\n]*)
    |(?P<bytes>(?:[bB][rR]?|[rR][bB])(?:'''(?s:.*?)'''|\"\"\"(?s:.*?)\"\"\"|'(?:\\.|[^'\\\n\r])*'|"(?:\\.|[^"\\\n\r])*"))
    |(?P<string>[rR](?:'''(?s:.*?)'''|\"\"\"(?s:.*?)\"\"\"|'[^'\n\r]*'|"[^"\n\r]*")
       |'''(?s:\\.|[^\\])*?'''|\"\"\"(?s:\\.|[^\\])*?\"\"\"|'(?:\\.|[^'\\\n\r])*'|"(?:\\.|[^"\\\n\r])*")
    |(?P<double>\d*\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)
    |(?P<uint>(?:0x[0-9a-fA-F]+|\d+)[uU])
    |(?P<int>0x[0-9a-fA-F]+|\d+)
    |(?P<name>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<sign>==|!=|<=|>=|&&|\|\||[.,\[\]{}()<>+\-*/%!?:])""",
    re.VERBOSE,
)

_LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"||"}),
    frozenset({"&&"}),
    frozenset({"==", "!=", "<", "<=", ">", ">=", "in"}),
    frozenset({"+", "-"}),
    frozenset({"*", "/", "%"}),
)
"""Binary operators, loosest first; all group from the left."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


def _tokens(text: str) -> list[_Token]:
    found = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ExpressionError(f"`{text[at]}` cannot be read", at)
        kind = str(match.lastgroup)
        if kind != "blank":
            word = match[0] in ("in", "true", "false", "null")
            found.append(_Token("sign" if word else kind, match[0], at))
        at = match.end()
    found.append(_Token("end", "", len(text)))
    return found


def parse(text: str) -> Node:
    """An expression's tree.

    Raises:
        ExpressionError: it is not CEL, or nested too deeply.
    """
    parser = _Parser(text)
    tree = parser.expression()
    parser.expect("", "end")
    return tree


class _Parser:
    """Recursive descent; `deep` counts the levels that are open."""

    def __init__(self, text: str) -> None:
        self.tokens = _tokens(text)
        self.at = 0
        self.deep = 0

    @property
    def token(self) -> _Token:
        return self.tokens[self.at]

    def take(self, *texts: str) -> _Token | None:
        """The next token, where it is one of these signs."""
        token = self.token
        if token.kind == "sign" and token.text in texts:
            self.at += 1
            return token
        return None

    def expect(self, text: str, kind: str = "sign") -> _Token:
        token = self.token
        if token.kind != kind or (text and token.text != text):
            raise ExpressionError(f"`{token.text or 'the end'}` where `{text or kind}` belongs", token.start)
        self.at += 1
        return token

    def nest(self, levels: int = 1) -> None:
        self.deep += levels
        if self.deep > DEEPEST:
            raise ExpressionError(f"nested more than {DEEPEST} deep", self.token.start)

    def expression(self) -> Node:
        self.nest()
        node = self.binary(0)
        if self.take("?"):
            then = self.binary(0)
            self.expect(":")
            other = self.expression()
            node = Operation(node.start, other.end, "?:", (node, then, other))
        self.deep -= 1
        return node

    def binary(self, level: int) -> Node:
        if level == len(_LEVELS):
            return self.unary()
        before = self.deep
        node = self.binary(level + 1)
        while sign := self.take(*_LEVELS[level]):
            right = self.binary(level + 1)
            chain = node.args if level < 2 and isinstance(node, Operation) and node.operator == sign.text else (node,)
            if len(chain) == 1:
                self.nest()
            node = Operation(node.start, right.end, sign.text, (*chain, right))
        self.deep = before
        return node

    def unary(self) -> Node:
        sign = self.take("!", "-")
        if sign is None:
            return self.member()
        self.nest()
        inner = self.unary()
        self.deep -= 1
        if sign.text == "-" and isinstance(inner, Constant) and inner.type in ("int", "double"):
            return Constant(sign.start, inner.end, inner.type, "-" + inner.text)
        return Operation(sign.start, inner.end, sign.text, (inner,))

    def member(self) -> Node:
        before = self.deep
        node = self.primary()
        while sign := self.take(".", "["):
            self.nest()
            if sign.text == "[":
                key = self.expression()
                node = Index(node.start, self.expect("]").end, node, key)
                continue
            name = self.expect("", "name")
            if self.take("("):
                args = self.listed(")")
                node = self.call(node, name.text, args, self.tokens[self.at - 1].end)
            else:
                node = Select(node.start, name.end, node, name.text)
        self.deep = before
        return node

    def call(self, target: Node | None, name: str, args: tuple[Node, ...], end: int) -> Node:
        """A call, or the macro that it stands for."""
        start = target.start if target is not None else self.tokens[self.at].start
        if target is not None and name in MACROS and args and isinstance(args[0], Name):
            bodies = len(args) - 1
            if bodies == MACROS[name] or (name == "map" and bodies == 2):
                return Comprehension(start, end, name, target, args[0].name, args[1:])
        return Call(start, end, name, target, args)

    def listed(self, close: str) -> tuple[Node, ...]:
        """Expressions up to the closing sign; a comma may follow the last of a list."""
        items: list[Node] = []
        while not self.take(close):
            items.append(self.expression())
            if not self.take(","):
                self.expect(close)
                break
        return tuple(items)

    def primary(self) -> Node:
        token = self.token
        if token.kind in ("int", "uint", "double", "string", "bytes"):
            self.at += 1
            return Constant(token.start, token.end, token.kind, token.text)
        if found := self.take("true", "false", "null"):
            return Constant(found.start, found.end, "null" if found.text == "null" else "bool", found.text)
        if self.take("("):
            inner = self.expression()
            self.expect(")")
            return inner
        if self.take("["):
            items = self.listed("]")
            return ListOf(token.start, self.tokens[self.at - 1].end, items)
        if self.take("{"):
            return self.map_of(token)
        self.take(".")  # a leading dot means the outermost name, which all names here are
        name = self.expect("", "name")
        if self.take("("):
            return self.function(name, token.start)
        return Name(token.start, name.end, name.text)

    def function(self, name: _Token, start: int) -> Node:
        args = self.listed(")")
        end = self.tokens[self.at - 1].end
        if name.text == "has" and len(args) == 1 and isinstance(args[0], Select):
            inner = args[0]
            return Select(inner.start, inner.end, inner.of, inner.field, test=True)
        return Call(start, end, name.text, None, args)

    def map_of(self, brace: _Token) -> Node:
        items: list[Node] = []
        while not self.take("}"):
            items.append(self.expression())
            self.expect(":")
            items.append(self.expression())
            if not self.take(","):
                self.expect("}")
                break
        return MapOf(brace.start, self.tokens[self.at - 1].end, tuple(items))
