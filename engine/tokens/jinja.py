"""The source of a chat template -> the template compiled as transformers compiles it, without importing transformers.

Invariant: a template writes, character for character, what `apply_chat_template` writes: the same sandbox, white space,
filters and functions. Tests compare the two on every template that they have.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from types import BuiltinMethodType
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
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


_OF_DICTS = frozenset(dir(dict))
FORMATS = frozenset(("format", "format_map"))
"""Methods of texts that the sandbox replaces."""
_PLAIN = frozenset((str, int, bool, dict, list, type(None)))
"""Types of values that are no methods."""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, in which what nearly all templates read is not examined each time: the sandbox has nothing to refuse
    there.

    It does not examine a key of a dict that is not the name of an attribute of the dict, a public attribute of a loop
    or namespace that holds a plain value, and a public method of a text that is not in `FORMATS`.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        """See `SandboxedEnvironment.getattr`."""
        kind = type(obj)
        if kind is dict:
            if attribute in obj and attribute not in _OF_DICTS:
                return obj[attribute]
        elif kind is str:
            if attribute[:1] != "_" and attribute not in FORMATS and hasattr(str, attribute):
                return getattr(obj, attribute)
        elif (kind is LoopContext or kind is _Namespace) and attribute[:1] != "_":
            value = getattr(obj, attribute, self)
            if type(value) in _PLAIN:
                return value
        return super().getattr(obj, attribute)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """See `SandboxedEnvironment.call`: no method of a text is refused, or takes a context."""
        if type(obj) is BuiltinMethodType and type(obj.__self__) is str:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return obj(*args, **kwargs)
        return super().call(context, obj, *args, **kwargs)


plain_json = json.JSONEncoder(ensure_ascii=False).encode
"""A value as `to_json` writes it without arguments."""


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON: jinja2's own filter would escape characters of HTML."""
    if not ensure_ascii and indent is None and separators is None and not sort_keys:
        return plain_json(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def make_environment() -> ImmutableSandboxedEnvironment:
    """The environment of chat templates."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = to_json
    changes: dict[str, Any] = {
        "raise_exception": _raise,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    environment.globals.update(changes)
    return environment


@lru_cache(maxsize=64)
def compile_template(source: str) -> Template:
    """A chat template, ready to be rendered.

    Raises:
        jinja2.TemplateSyntaxError: The source is not valid Jinja.
    """
    return make_environment().from_string(source)
