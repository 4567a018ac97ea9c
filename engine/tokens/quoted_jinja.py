"""Chat templates that are given quoted texts, and test and cut them as if they were not quoted.

A quoted text (tokenizer.py) has marks in the tokens that it spells, so `content.endswith("/nothink")` would be false of a text that ends in
`/nothink` where that is an added token. A template that is compiled here works out tests, lengths and cuts on the text before quoting, and keeps
the marks in what it writes. A text in which a replacement forms a token is quoted, too.

Invariant: no token that a quoted text spells is written without its mark. What is not seen through here (a filter that counts characters, say)
is done to the quoted text; `JinjaSource.text` finds that the result differs, and refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from jinja2 import Template, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from engine.tokens.jinja import FORMATS, make_environment
from engine.tokens.tokenizer import MARK, Quoting, unquote

_UNITS = re.compile(f"{MARK}{MARK}|[^{MARK}]{MARK}?|{MARK}", re.DOTALL)
"""A character of the text before quoting, with the mark that follows it."""
_TESTS = ("equalto", "eq", "==", "ne", "!=", "in", "gt", "lt", "ge", "le", "greaterthan", "lessthan", "divisibleby")
_LISTS = ("split", "rsplit", "partition", "rpartition", "splitlines")
_TOLD = (
    "startswith",
    "endswith",
    "find",
    "rfind",
    "index",
    "rindex",
    "count",
    "isdigit",
    "isupper",
    "islower",
    "isalpha",
    "isalnum",
    "isspace",
    "isnumeric",
    "isdecimal",
    "istitle",
)


def _marked(value: Any) -> bool:
    return isinstance(value, str) and MARK in value


def plain(value: Any) -> Any:
    """A text before quoting; anything else as it is."""
    return unquote(value) if isinstance(value, str) else value


def _units(text: str) -> list[str]:
    return [unit for unit in _UNITS.findall(text) if unit != MARK]


def cut(value: Any, *ends: int | None) -> Any:
    """`value[start:stop:step]`"""
    return "".join(_units(value)[slice(*ends)]) if _marked(value) else value[slice(*ends)]


def truncate(
    value: Any, length: int = 255, killwords: bool = False, end: str = "...", leeway: int | None = None
) -> Any:
    """The filter `truncate`; jinja2 looks for a leeway of 5 in its environment's policies."""
    text, leeway = plain(value), 5 if leeway is None else leeway
    if len(text) <= length + leeway:
        return value
    kept = text[: length - len(end)]
    return cut(value, None, len(kept if killwords else kept.rsplit(" ", 1)[0])) + end


def characters(value: Any) -> Any:
    """What a loop goes through: characters with their marks."""
    return _units(value) if _marked(value) else value


class _Quoted:
    """The methods of a quoted text, as those of the text before quoting."""

    def __init__(self, text: str, quoting: Quoting) -> None:
        self._text, self._quoting = text, quoting

    def method(self, name: str) -> Any:
        """A method by name."""
        if name in _TOLD:
            return getattr(unquote(self._text), name)
        if name in _LISTS:
            return partial(self._pieces, name)
        if name in ("strip", "lstrip", "rstrip", "removeprefix", "removesuffix"):
            return partial(self._trimmed, name)
        return partial(self.replaced) if name == "replace" else getattr(self._text, name)

    def _pieces(self, name: str, *args: Any, **kwargs: Any) -> Any:
        text, units = unquote(self._text), _units(self._text)
        found, at = [], 0
        pieces = getattr(text, name)(*map(plain, args), **kwargs)
        for piece in pieces:
            at = text.index(piece, at)
            found.append("".join(units[at : at + len(piece)]))
            at += len(piece)
        return type(pieces)(found)

    def _trimmed(self, name: str, *args: Any) -> str:
        text, units = unquote(self._text), _units(self._text)
        left = name in ("strip", "lstrip", "removeprefix")
        rest = getattr(text, {"strip": "lstrip"}.get(name, name))(*map(plain, args)) if left else text
        start = len(text) - len(rest)
        kept = (
            getattr(rest, {"strip": "rstrip"}.get(name, name))(*map(plain, args))
            if name not in ("lstrip", "removeprefix")
            else rest
        )
        return "".join(units[start : start + len(kept)])

    def replaced(self, old: str, new: str, count: int = -1) -> str:
        """`replace`. Tokens that only come about by it are quoted."""
        pieces = self._pieces("split", old, count) if plain(old) else [self._text]
        return self._quoting.quote_new(new.join(pieces), self._text)


class _SeenThrough(NodeTransformer):
    """Wraps what a template looks at."""

    @staticmethod
    def _wrapped(node: nodes.Node, filter_: str, *args: nodes.Expr) -> nodes.Expr:
        return nodes.Filter(node, filter_, list(args), [], None, None, lineno=node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """Both sides are compared before quoting."""
        self.generic_visit(node)
        node.expr = self._wrapped(node.expr, "plain")
        for operand in node.ops:
            operand.expr = self._wrapped(operand.expr, "plain")
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:  # noqa: N802
        """Tests that compare."""
        self.generic_visit(node)
        if node.name in _TESTS:
            node.node = self._wrapped(node.node, "plain")
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802
        """Filters that count."""
        self.generic_visit(node)
        if node.node is not None and node.name in ("length", "count", "wordcount", "int", "float"):
            node.node = self._wrapped(node.node, "plain")
        elif node.node is not None and node.name in ("list", "first", "last"):
            node.node = self._wrapped(node.node, "characters")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        """Slices, which do not go through the environment."""
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = [end if end is not None else nodes.Const(None) for end in (node.arg.start, node.arg.stop, node.arg.step)]
        return self._wrapped(node.node, "cut", *ends)

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        """Loops over characters."""
        self.generic_visit(node)
        node.iter = self._wrapped(node.iter, "characters")
        return node


def _environment(quoting: Quoting) -> ImmutableSandboxedEnvironment:
    base = make_environment()

    class SeenThrough(type(base)):  # type: ignore[misc]
        """The environment of chat templates, in which methods of quoted texts see through the marks."""

        def getattr(self, obj: Any, attribute: str) -> Any:
            """`obj.attribute`"""
            if (
                isinstance(obj, str)
                and (MARK in obj or attribute == "replace")
                and not attribute.startswith("_")
                and attribute not in FORMATS
                and hasattr(str, attribute)
            ):
                return _Quoted(obj, quoting).method(attribute)
            return super().getattr(obj, attribute)

        def getitem(self, obj: Any, argument: Any) -> Any:
            """`obj[argument]`"""
            if _marked(obj) and isinstance(argument, int):
                units = _units(obj)
                return (
                    units[argument] if -len(units) <= argument < len(units) else self.undefined(obj=obj, name=argument)
                )
            return super().getitem(obj, argument)

    environment = SeenThrough(trim_blocks=True, lstrip_blocks=True, extensions=list(base.extensions))
    environment.filters.update(base.filters)
    environment.globals.update(base.globals)
    changes: dict[str, Callable[..., Any]] = {
        "plain": plain,
        "characters": characters,
        "cut": cut,
        "trim": lambda value, chars=None: environment.getattr(value if isinstance(value, str) else str(value), "strip")(
            chars
        ),
        "truncate": truncate,
        "replace": lambda value, *args: _Quoted(value if isinstance(value, str) else str(value), quoting).replaced(
            *args
        ),
    }
    environment.filters.update(changes)
    return environment


@lru_cache(maxsize=64)
def compile_quoted(source: str, quoting: Quoting) -> Template:
    """A chat template for quoted texts, ready to be rendered.

    Args:
        source: Its source, which is valid.
        quoting: The quoting of its tokenizer.
    """
    environment = _environment(quoting)
    tree = _SeenThrough().visit(environment.parse(source))
    tree.set_environment(environment)
    return environment.from_string(tree)
