"""Chat templates compiled as transformers compiles them, without importing it.

Invariant: a template writes, character for character, what `apply_chat_template` writes: the same sandbox, white space,
filters and functions. Tests compare the two on every template that they have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class _Generation(Extension):
    """`{% generation %}`: trainers mark the assistant's text with it. Its content is written unchanged."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        """The block, as a call that returns its content."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    @staticmethod
    def _content(caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` for templates: callable, without access to the type itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """See `dict.fromkeys`."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` for templates: no attribute that begins with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]  # so that a template may write `namespace(self=…)`
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not set {name!r} on a namespace; rename it")


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


_encode = json.JSONEncoder(ensure_ascii=False).encode


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON: jinja2's own filter would escape characters of HTML."""
    if not ensure_ascii and indent is None and separators is None and not sort_keys:
        return _encode(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])


def looked_for(sources: Iterable[str], also: Iterable[str] = ()) -> re.Pattern[str] | None:
    """A pattern of the texts that templates may look for inside a message; None where there are none.

    These are their string constants, without those that are only written, names (`tool_calls`) and white space.
    """
    found = set(also)
    for source in sources:
        found |= _looked_for(source)
    telling = sorted(text for text in found if re.search(r"[^\w\s]", text))
    return re.compile("|".join(map(re.escape, telling))) if telling else None


@lru_cache(maxsize=64)
def _looked_for(source: str) -> frozenset[str]:
    found: set[str] = set()
    _collect(_environment().parse(source), "looked", found)
    return frozenset(found)


def _collect(node: nodes.Node, use: str, found: set[str]) -> None:
    """Adds the string constants below a node. `use`: what happens to the node's value: `written`, `assigned` or `looked` at."""
    if isinstance(node, nodes.Const):
        if use != "written" and isinstance(node.value, str):
            found.add(node.value)
        return
    for child in node.iter_child_nodes():
        inside = "looked"
        if isinstance(node, nodes.Output):
            inside = "written"
        elif isinstance(node, nodes.Assign):
            inside = "assigned"
        elif isinstance(node, nodes.Add | nodes.Concat) and use != "looked":
            inside = "written"
        elif isinstance(node, nodes.CondExpr) and child is not node.test:
            inside = use
        _collect(child, inside, found)


@lru_cache(maxsize=64)
def compile_template(source: str) -> Template:
    """A chat template, ready to be rendered.

    Raises:
        jinja2.TemplateSyntaxError: The source is not valid Jinja.
    """
    environment = _environment()
    environment.filters["tojson"] = to_json
    environment.globals.update(
        {"raise_exception": _raise, "strftime_now": _now, "dict": _Dict(), "namespace": _Namespace}
    )
    return environment.from_string(source)
