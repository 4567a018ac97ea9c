"""Tool calls that are written as text: reading them, and saying what is wrong with those that cannot be read.

Invariant: every opened call of a reply gives exactly one attempt, in order, read or malformed: none is dropped.

Three formats are built in, and `package.module:Parser` names one of your own.

`hermes`, which large models know:

    <tool_call>
    {"name": "calculate", "arguments": {"expression": "3 * (4 + 5)"}}
    </tool_call>

`plain`, which a small model learns from two examples:

    <call>calculate(expression="3 * (4 + 5)")</call>
    <call>calculate(3 * (4 + 5))</call>

`pythonic`, which LFM2 writes, all calls of a reply in one list:

    <|tool_call_start|>[calculate(expression="3 * (4 + 5)"), now()]<|tool_call_end|>

In `plain`, arguments are Python literals, by keyword or in the order of the tool's parameters. Where a parameter is
a string, what is not a literal is taken as it stands; a tool whose one parameter is a string takes all that is in
the parentheses.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from engine.errors import RenderError
from engine.made import maker
from engine.schemas.message import MalformedCall, ToolCall
from engine.storable import refusal

_LONGEST = 20_000
"""Characters of one call beyond which it is not even tried: literals are parsed recursively."""
_make_call = maker(ToolCall)

LONGEST_NAME = 256
"""Characters of a tool's name."""
_WORDS = {"true": True, "false": False, "null": None, "none": None}


class ReadCalls(NamedTuple):
    """What was found in one reply."""

    content: str
    """The reply without its calls, trimmed at the end."""
    attempts: list[ToolCall | MalformedCall]
    """Calls and failed attempts, in order. Ids are `<prefix>_<index>`."""


class CallParser(Protocol):
    """Reads the tool calls of a reply. Your own class needs this method and no arguments to build it."""

    def parse(self, text: str, tools: Sequence[dict[str, Any]], prefix: str) -> ReadCalls:
        """Read `text`.

        Args:
            text: The reply, without its reasoning and without the token that ended it.
            tools: The tools' schemas, in OpenAI's form.
            prefix: What ids begin with: call number i is `<prefix>_<i>`.
        """
        ...


def call_parser(name: str, base: Path | None = None) -> CallParser:
    """The parser that `model.tool_calls` names: `hermes`, `plain`, `pythonic`, or an entry point.

    Raises:
        RenderError: It has no `parse`.
        EntryError: It cannot be imported.
    """
    if name == "hermes":
        return TaggedParser("<tool_call>", "</tool_call>", _read_hermes)
    if name == "plain":
        return TaggedParser("<call>", "</call>", _read_plain)
    if name == "pythonic":
        return PythonicParser()
    if ":" not in name:
        raise RenderError(
            f"model.tool_calls: {name!r} is unknown; write auto, hermes, plain, pythonic or package.module:Parser"
        )
    from engine.spec.entry import load_entry

    found = load_entry(name, base)
    parser: CallParser = found() if isinstance(found, type) else found
    if not callable(getattr(parser, "parse", None)):
        raise RenderError(f"model.tool_calls: {name} has no method parse(text, tools, prefix)")
    return parser


class Unreadable(Exception):
    """Why a call cannot be read, in words for the model."""


def checked_call(make: Callable[..., ToolCall], id_: str, name: str, arguments: dict[str, Any]) -> ToolCall:
    """A call whose name and arguments can be stored.

    Raises:
        Unreadable: They cannot; see `engine.storable`.
    """
    problem = refusal(arguments)
    if problem is not None:
        raise Unreadable(f"Its arguments cannot be used: {problem}.")
    if len(name) > LONGEST_NAME or refusal(name) is not None:
        raise Unreadable(f"Its name is not a text of at most {LONGEST_NAME} characters.")
    return make(id=id_, name=name, arguments=arguments)


class TaggedParser:
    """Calls between two tags, whose inside `read(body, tools)` understands as (name, arguments).

    A call that is opened and never closed is malformed: its end may be missing, so guessing it could run a
    call that the model did not finish.
    """

    def __init__(self, opening: str, closing: str, read: Any) -> None:
        self.opening = opening
        self.closing = closing
        self._read = read

    def parse(self, text: str, tools: Sequence[dict[str, Any]], prefix: str) -> ReadCalls:
        """See `CallParser.parse`."""
        if self.opening not in text:
            return ReadCalls(text, [])
        attempts: list[ToolCall | MalformedCall] = []
        outside: list[str] = []
        at = 0
        while (start := text.find(self.opening, at)) >= 0:
            outside.append(text[at:start])
            inside = start + len(self.opening)
            end, again = text.find(self.closing, inside), text.find(self.opening, inside)
            closed = end >= 0 and not 0 <= again < end
            at = end + len(self.closing) if closed else (again if again >= 0 else len(text))
            attempts.append(
                self._attempt(text, start, inside, end if closed else -1, at, tools, f"{prefix}_{len(attempts)}")
            )
        outside.append(text[at:])
        return ReadCalls("".join(outside).rstrip(), attempts)

    def _attempt(
        self, text: str, start: int, inside: int, end: int, until: int, tools: Sequence[dict[str, Any]], id_: str
    ) -> ToolCall | MalformedCall:
        raw = text[start:until]
        if end < 0:
            return MalformedCall(
                raw=raw, problem=f"It begins with {self.opening} but is never closed with {self.closing}."
            )
        body = text[inside:end].strip()
        try:
            if len(body) > _LONGEST:
                raise Unreadable(f"It is longer than {_LONGEST} characters.")
            name, arguments = self._read(body, tools)
            return checked_call(_make_call, id_, name, arguments)
        except Unreadable as problem:
            return MalformedCall(raw=raw, problem=str(problem))


class PythonicParser:
    """Calls as a Python list between LFM2's tokens; values are Python literals, or JSON's true, false and null.

    Args:
        escapes: The template escapes text. Where it does not, `\\n` could be one character or two: such a call is malformed.
    """

    def __init__(self, escapes: bool = True) -> None:
        self._escapes = escapes

    opening, closing = "<|tool_call_start|>", "<|tool_call_end|>"

    def parse(self, text: str, tools: Sequence[dict[str, Any]], prefix: str) -> ReadCalls:
        """See `CallParser.parse`."""
        attempts: list[ToolCall | MalformedCall] = []
        outside: list[str] = []
        rest = text
        while self.opening in rest:
            before, _, rest = rest.partition(self.opening)
            body, closed, rest = rest.partition(self.closing)
            outside.append(before)
            raw = f"{self.opening}{body}{closed}"
            if not closed:
                problem = f"It begins with {self.opening} but is never closed with {self.closing}."
                attempts.append(MalformedCall(raw=raw, problem=problem))
                break
            try:
                if not self._escapes and "\\" in body:
                    raise Unreadable(
                        "It holds a backslash, which this model's calls have no way to write: leave it out."
                    )
                read = _read_pythonic(body.strip())
            except Unreadable as problem_:
                attempts.append(MalformedCall(raw=raw, problem=str(problem_)))
                continue
            for name, arguments in read:
                attempts.append(ToolCall(id=f"{prefix}_{len(attempts)}", name=name, arguments=arguments))
        outside.append(rest)
        return ReadCalls("".join(outside).rstrip() if attempts else text, attempts)


_PYTHONIC_FORM = "Write [name(argument=value)]."


def _read_pythonic(body: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of a list of calls."""
    try:
        if len(body) > _LONGEST:
            raise Unreadable(f"It is longer than {_LONGEST} characters.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unreadable(f"{body!r} is not a list of calls. {_PYTHONIC_FORM}") from None
    calls = made.elts if isinstance(made, ast.List) else [made]
    found = []
    for call in calls:
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            raise Unreadable(f"{body!r} is not a list of calls with named arguments. {_PYTHONIC_FORM}")
        arguments = {str(word.arg): _literal(str(word.arg), word.value) for word in call.keywords}
        found.append((ast.unparse(call.func), arguments))
    return found


def _literal(key: str, node: ast.expr) -> Any:
    """A Python literal in which JSON's words stand for their values."""

    class Words(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.AST:
            return ast.Constant(_WORDS[name.id]) if name.id in _WORDS else name

    try:
        return _as_json(ast.literal_eval(Words().visit(node)))
    except (ValueError, TypeError):
        raise Unreadable(f"The value of {key} is not a literal: put text in quotes.") from None


_HERMES_FORM = 'Write {"name": "<tool>", "arguments": {...}}.'


def _read_hermes(body: str, tools: Sequence[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    try:
        value = json.loads(body)
    except json.JSONDecodeError as error:
        raise Unreadable(f"It is not valid JSON: {error.msg} at character {error.pos}. {_HERMES_FORM}") from None
    except RecursionError:
        raise Unreadable(f"Its JSON is nested too deeply. {_HERMES_FORM}") from None
    except ValueError:
        raise Unreadable(f"Its JSON holds a number of too many digits. {_HERMES_FORM}") from None
    if not isinstance(value, dict):
        raise Unreadable(f"It is not a JSON object. {_HERMES_FORM}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise Unreadable(f'It has no "name". {_HERMES_FORM}')
    return name, as_arguments(value.get("arguments", value.get("parameters", {})))


def as_arguments(value: Any) -> dict[str, Any]:
    """Arguments as an object: a dict, or the JSON text of one.

    Raises:
        Unreadable: They are neither.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Unreadable(f'Its "arguments" are text, not a JSON object. {_HERMES_FORM}') from None
    if not isinstance(value, dict):
        raise Unreadable(f'Its "arguments" are not a JSON object. {_HERMES_FORM}')
    return value


_PLAIN_FORM = "Write name(argument=value)."
_NAMED = re.compile(r"([A-Za-z_][\w.\-]*)\s*\((.*)\)\Z", re.DOTALL)


def _read_plain(body: str, tools: Sequence[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    match = _NAMED.match(body)
    if match is None:
        raise Unreadable(f"{body!r} is not of the form name(...). {_PLAIN_FORM}")
    name, inside = match.group(1), match.group(2).strip()
    parameters = _parameters(name, tools)
    sole = next(iter(parameters)) if list(parameters.values()) == ["string"] else None
    if not inside:
        return name, {}
    source = f"f({inside}\n)"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "3 (4)" and "\\d" are the model's business, not the log's
            call = ast.parse(source, mode="eval").body
        if not isinstance(call, ast.Call) or call.func.end_col_offset != 1:
            raise SyntaxError
        return name, _bind(call, source, parameters, sole)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        if sole is not None:
            return name, {sole: inside}
        raise Unreadable(f"What is in the parentheses of {name}(...) cannot be read. {_PLAIN_FORM}") from None


def _parameters(name: str, tools: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Parameters of a tool, in order, with their JSON types; none for a tool that there is not."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = function.get("parameters", {}).get("properties", {})
            return {key: str(schema.get("type", "")) for key, schema in properties.items()}
    return {}


def _bind(call: ast.Call, source: str, parameters: dict[str, str], sole: str | None) -> dict[str, Any]:
    """Arguments by name. ValueError: what is written is no list of arguments."""
    if any(isinstance(argument, ast.Starred) for argument in call.args) or any(w.arg is None for w in call.keywords):
        raise ValueError
    names = list(parameters)
    if sole is not None and call.args:
        if len(call.args) > 1 or call.keywords or not _is_text(call.args[0]):
            raise ValueError
    elif len(call.args) > len(names):
        if not names:
            raise Unreadable(f"Its arguments have no names, and no tool that takes any is called so. {_PLAIN_FORM}")
        raise Unreadable(f"It has {len(call.args)} arguments without a name, but the tool takes {', '.join(names)}.")
    given = [*zip(names, call.args, strict=False), *((str(word.arg), word.value) for word in call.keywords)]
    arguments: dict[str, Any] = {}
    for key, node in given:
        if key in arguments:
            raise Unreadable(f"It gives {key} twice.")
        arguments[key] = _value(key, node, source, parameters.get(key, ""))
    return arguments


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _value(key: str, node: ast.expr, source: str, type_: str) -> Any:
    """One argument. Where a string is wanted, what is no string literal is taken as it is written."""
    if type_ == "string" and not _is_text(node):
        return ast.get_source_segment(source, node)
    if isinstance(node, ast.Name) and node.id.lower() in _WORDS:
        return _WORDS[node.id.lower()]
    try:
        return _as_json(ast.literal_eval(node))
    except (ValueError, TypeError):
        raise Unreadable(f"The value of {key} is not a literal: put text in quotes.") from None


def _as_json(value: Any) -> Any:
    """A literal as JSON holds it: tuples become lists. ValueError: JSON cannot hold it."""
    if value is None or isinstance(value, (str, int, bool)) or (isinstance(value, float) and isfinite(value)):
        return value
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _as_json(item) for key, item in value.items()}
    raise ValueError
