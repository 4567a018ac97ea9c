"""The text of an expression -> a syntax tree whose nodes know their position in the text.

The grammar is that of the Common Expression Language (specification, section "Syntax") without unsigned integers, byte
strings and messages, which no guard variable holds. The parser knows nothing of variables and types.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import isfinite
from typing import Any

from msgspec.structs import replace

from engine.schemas.base import Struct

MAX_DEPTH = 50
"""Nesting levels of a tree; bounds the recursion of every function that walks it."""

MACROS = {"all": 1, "exists": 1, "exists_one": 1, "filter": 1, "map": 1}
"""Macros over a list or the keys of a map, and how many expressions follow the variable; `map` also takes a condition
before its result."""


class ExpressionError(ValueError):
    """The text is not a valid expression.

    Attributes:
        offset: Index of the wrong character, from 0.
        fix: What to write instead, where that is known.
    """

    def __init__(self, message: str, offset: int, fix: str | None = None) -> None:
        super().__init__(message)
        self.offset = offset
        self.fix = fix


class Node(Struct, frozen=True, kw_only=True):
    """A part of an expression: the characters from `start` up to, not including, `end`."""

    start: int
    end: int

    def children(self) -> Iterator[Node]:
        """Yield the operands, in the order in which they are written."""
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if isinstance(value, Node):
                yield value
            elif isinstance(value, tuple):
                yield from value

    def walk(self) -> Iterator[Node]:
        """Yield this node and all nodes below it, outermost first."""
        yield self
        for child in self.children():
            yield from child.walk()


class Name(Node, frozen=True, kw_only=True):
    """A variable, or the name of a type, such as `int`."""

    name: str


class Constant(Node, frozen=True, kw_only=True):
    """A literal: the name of its CEL type and its Python value."""

    type: str
    value: Any


class Select(Node, frozen=True, kw_only=True):
    """`of.field`; `test` is set inside `has()`, which asks whether the field exists."""

    of: Node
    field: str
    test: bool = False


class Index(Node, frozen=True, kw_only=True):
    """`of[key]`."""

    of: Node
    key: Node


class Call(Node, frozen=True, kw_only=True):
    """`name(args)`, or `target.name(args)`."""

    name: str
    target: Node | None
    args: tuple[Node, ...]


class Operation(Node, frozen=True, kw_only=True):
    """An operator and its operands: one for `!` and the minus sign, three for `?:`, two or more for `&&` and `||`, else
    two."""

    operator: str
    args: tuple[Node, ...]


class Comprehension(Node, frozen=True, kw_only=True):
    """A macro: `over.name(variable, bodies)`."""

    name: str
    over: Node
    variable: str
    bodies: tuple[Node, ...]


class ListOf(Node, frozen=True, kw_only=True):
    """`[a, b]`."""

    items: tuple[Node, ...]


class MapOf(Node, frozen=True, kw_only=True):
    """`{key: value}`; `items` holds key, value, key, value and so on."""

    items: tuple[Node, ...]


_TOKEN = re.compile(
    r"""(?P<blank>[\t\n\f\r ]+|//[^\n]*)
    |(?P<string>[rR](?:'''(?s:.*?)'''|\"\"\"(?s:.*?)\"\"\"|'[^'\n\r]*'|"[^"\n\r]*")
       |'''(?s:\\.|[^\\])*?'''|\"\"\"(?s:\\.|[^\\])*?\"\"\"|'(?:\\.|[^'\\\n\r])*'|"(?:\\.|[^"\\\n\r])*")
    |(?P<double>\d*\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)
    |(?P<int>0x[0-9a-fA-F]+|\d+)
    |(?P<name>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<sign>==|!=|<=|>=|&&|\|\||[.,\[\]{}()<>+\-*/%!?:])""",
    re.VERBOSE | re.ASCII,
)
_ESCAPE = re.compile(
    r"""\\(?:(?P<char>[abfnrtv\\?"'`])|[xX](?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})
    |(?P<octal>[0-3][0-7]{2})|(?P<unknown>.))""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_WORDS = {"true": True, "false": False, "null": None}
_FOREIGN = {"and": "&&", "or": "||", "not": "!", "=": "==", "&": "&&", "|": "||", "is": "=="}
"""What other languages write, and the CEL operator for it."""

_LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"||"}),
    frozenset({"&&"}),
    frozenset({"==", "!=", "<", "<=", ">", ">=", "in"}),
    frozenset({"+", "-"}),
    frozenset({"*", "/", "%"}),
)
"""Binary operators, loosest first; all are left-associative."""


class _Token(Struct, frozen=True, kw_only=True):
    kind: str
    text: str
    start: int

    @property
    def end(self) -> int:
        """Index behind the last character."""
        return self.start + len(self.text)


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            # an earlier word of another language, which is read as a name, is the first thing to correct
            for before, token in zip([None, *tokens], tokens, strict=False):
                if token.kind == "name" and token.text in _FOREIGN and (before is None or before.text != "."):
                    raise ExpressionError(f"`{token.text}` is no operator", token.start, _replacement(token.text))
            raise ExpressionError(f"`{text[at]}` cannot be read", at, _replacement(text[at]))
        kind = str(match.lastgroup)
        if kind != "blank":
            tokens.append(_Token(kind="sign" if match[0] in ("in", *_WORDS) else kind, text=match[0], start=at))
        at = match.end()
    tokens.append(_Token(kind="end", text="", start=len(text)))
    return tokens


def _replacement(word: str) -> str | None:
    return f"CEL writes `{_FOREIGN[word]}`" if word in _FOREIGN else None


def parse(text: str) -> Node:
    """Return the syntax tree of an expression.

    Raises:
        ExpressionError: the text is not a valid expression, or is nested more than `MAX_DEPTH` levels deep.
    """
    if not text.strip():
        raise ExpressionError("the expression is empty", 0, "leave it out if it always holds")
    parser = _Parser(text)
    tree = parser.expression()
    parser.expect("", "end")
    return tree


def _number(token: _Token) -> int | float:
    """The value of a number token, with its minus sign if the text has one.

    Raises:
        ExpressionError: the value does not fit into 64 bits.
    """
    if token.kind == "double":
        if isfinite(double := float(token.text)):
            return double
    elif -(2**63) <= (integer := int(token.text, 16 if "x" in token.text else 10)) < 2**63:
        return integer
    raise ExpressionError(f"`{token.text}` does not fit into 64 bits", token.start)


def _string(token: _Token) -> str:
    """The value of a string token: quotes removed, escapes replaced unless it is raw.

    Raises:
        ExpressionError: an escape is unknown.
    """
    raw = token.text[0] in "rR"
    body = token.text[raw:]
    quotes = 3 if body[:3] in ("'''", '"""') else 1

    def character(match: re.Match[str]) -> str:
        if match["char"]:
            return _ESCAPED.get(match["char"], match["char"])
        digits = match["x"] or match["u"] or match["U"]
        code = int(digits, 16) if digits else int(match["octal"], 8) if match["octal"] else -1
        if not 0 <= code <= 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise ExpressionError(
                f"unknown escape `{match[0]}` in a string", token.start, "write `\\\\` for a backslash"
            )
        return chr(code)

    body = body[quotes:-quotes]
    return body if raw else _ESCAPE.sub(character, body)


class _Parser:
    """Recursive-descent parser; `depth` is the number of open levels."""

    def __init__(self, text: str) -> None:
        self.tokens = _tokens(text)
        self.at = 0
        self.depth = 0

    @property
    def token(self) -> _Token:
        return self.tokens[self.at]

    def take(self, *texts: str) -> _Token | None:
        """Consume the next token if it is one of these signs."""
        token = self.token
        if token.kind == "sign" and token.text in texts:
            self.at += 1
            return token
        return None

    def expect(self, text: str, kind: str = "sign") -> _Token:
        token = self.token
        if token.kind != kind or (text and token.text != text):
            if token.kind == "end":
                raise ExpressionError("the expression ends too early", token.start)
            before = self.tokens[self.at - 1].text if self.at else ""
            fix = _replacement("not" if before == "not" else token.text)
            raise ExpressionError(f"`{token.text}` is not expected here", token.start, fix)
        self.at += 1
        return token

    def nest(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ExpressionError(f"nested more than {MAX_DEPTH} levels deep", self.token.start)

    def expression(self) -> Node:
        self.nest()
        node = self.binary(0)
        if self.take("?"):
            then = self.binary(0)
            self.expect(":")
            other = self.expression()
            node = Operation(start=node.start, end=other.end, operator="?:", args=(node, then, other))
        self.depth -= 1
        return node

    def binary(self, level: int) -> Node:
        if level == len(_LEVELS):
            return self.unary()
        before = self.depth
        node = self.binary(level + 1)
        while sign := self.take(*_LEVELS[level]):
            right = self.binary(level + 1)
            chain = node.args if level < 2 and isinstance(node, Operation) and node.operator == sign.text else (node,)
            if len(chain) == 1:
                self.nest()
            node = Operation(start=node.start, end=right.end, operator=sign.text, args=(*chain, right))
        self.depth = before
        return node

    def unary(self) -> Node:
        sign = self.take("!", "-")
        if sign is None:
            return self.member()
        if sign.text == "-" and self.token.kind in ("int", "double") and self.token.start == sign.end:
            number = self.token
            self.tokens[self.at] = _Token(kind=number.kind, text=f"-{number.text}", start=sign.start)
            return self.member()
        self.nest()
        inner = self.unary()
        self.depth -= 1
        return Operation(start=sign.start, end=inner.end, operator=sign.text, args=(inner,))

    def member(self) -> Node:
        before = self.depth
        node = self.primary()
        while sign := self.take(".", "["):
            self.nest()
            if sign.text == "[":
                key = self.expression()
                node = Index(start=node.start, end=self.expect("]").end, of=node, key=key)
                continue
            name = self.expect("", "name")
            if self.take("("):
                args = self.listed(")")
                node = self.call(node, name.text, args, self.tokens[self.at - 1].end)
            else:
                node = Select(start=node.start, end=name.end, of=node, field=name.text)
        self.depth = before
        return node

    def call(self, target: Node | None, name: str, args: tuple[Node, ...], end: int) -> Node:
        """A call, or the macro of that name."""
        start = target.start if target is not None else self.tokens[self.at].start
        if target is not None and name in MACROS and args and isinstance(args[0], Name):
            bodies = len(args) - 1
            if bodies == MACROS[name] or (name == "map" and bodies == 2):
                return Comprehension(
                    start=start, end=end, name=name, over=target, variable=args[0].name, bodies=args[1:]
                )
        return Call(start=start, end=end, name=name, target=target, args=args)

    def listed(self, close: str, *, pairs: bool = False) -> tuple[Node, ...]:
        """Expressions up to the closing sign, or pairs of them with a colon; a comma may follow the last one."""
        items: list[Node] = []
        while not self.take(close):
            items.append(self.expression())
            if pairs:
                self.expect(":")
                items.append(self.expression())
            if not self.take(","):
                self.expect(close)
                break
        return tuple(items)

    def primary(self) -> Node:
        token = self.token
        if token.kind in ("int", "double", "string"):
            self.at += 1
            return Constant(
                start=token.start,
                end=token.end,
                type=token.kind,
                value=_string(token) if token.kind == "string" else _number(token),
            )
        if word := self.take(*_WORDS):
            return Constant(
                start=word.start,
                end=word.end,
                type="null" if word.text == "null" else "bool",
                value=_WORDS[word.text],
            )
        if self.take("("):
            inner = self.expression()
            self.expect(")")
            return inner
        if self.take("["):
            items = self.listed("]")
            return ListOf(start=token.start, end=self.tokens[self.at - 1].end, items=items)
        if self.take("{"):
            items = self.listed("}", pairs=True)
            return MapOf(start=token.start, end=self.tokens[self.at - 1].end, items=items)
        self.take(".")  # a leading dot asks for the outermost scope; guards have only one
        name = self.expect("", "name")
        if not self.take("("):
            return Name(start=token.start, end=name.end, name=name.text)
        args = self.listed(")")
        if name.text == "has" and len(args) == 1 and isinstance(args[0], Select):
            return replace(args[0], test=True)
        end = self.tokens[self.at - 1].end
        return Call(start=token.start, end=end, name=name.text, target=None, args=args)
