"""Tool calls that are written as text: the text of a reply <-> its tool calls. One class reads and writes each format.

Invariant: every call that a reply opens gives exactly one attempt, in order, read or malformed. None is left out.

A format of your own is a subclass of `ToolCallFormat`, named `package.module:Class` in `model.tool_calls`. To add a
built-in one, write its class here and add it to `FORMATS`.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

from msgspec.structs import replace

from engine.errors import RenderError
from engine.schemas.base import Struct
from engine.schemas.message import MalformedCall, ToolCall
from engine.storable import call_refusal, words_of
from engine.terminal import around, brief

LONGEST_CALL = 20_000
"""Characters of one call. A longer one is malformed: literals are parsed recursively."""

Call = tuple[str, dict[str, Any]]
"""A tool's name and the call's arguments."""


class ParsedCalls(Struct, frozen=True):
    """The tool calls of one reply."""

    content: str
    """The reply without its calls and without white space at the end."""
    attempts: list[ToolCall | MalformedCall]
    """Calls and malformed calls, in order. The id of call number i is `<prefix>_<i>`."""


class UnreadableCall(Exception):
    """A call that cannot be read. The message tells the model what is wrong with it, and does not repeat a long
    call."""

    def __init__(self, message: str) -> None:
        super().__init__(brief(message))


class ToolCallFormat(ABC):
    """Reads and writes tool calls. Subclass it for a format of your own, and name the class in `model.tool_calls`.

        class Shout(ToolCallFormat):
            def parse(self, text, tools, prefix): ...
            def write(self, text, calls): ...

    The class is built without arguments. The engine takes a call that `write` wrote only if `parse` reads it back.
    """

    name: ClassVar[str] = ""
    """The value of `model.tool_calls` that selects it. Only built-in formats have one."""
    marks: ClassVar[tuple[str, ...]] = ()
    """Texts that begin and end calls. A stop string inside one of them would cut every call."""
    auto: ClassVar[bool] = False
    """`model.tool_calls: auto` may select this format, if it reads what the chat template writes."""
    checks_calls: ClassVar[bool] = False
    """`parse` gives only calls that can be stored (see `storable_call`), so the engine does not check them again."""

    @abstractmethod
    def parse(self, text: str, tools: Sequence[dict[str, Any]], prefix: str) -> ParsedCalls:
        """Read the calls of a reply.

        Args:
            text: The reply, without its reasoning and without the token that ended it.
            tools: The tools' schemas, in OpenAI's form.
            prefix: What ids begin with: the id of call number i is `<prefix>_<i>`.
        """

    @abstractmethod
    def write(self, text: str, calls: Sequence[Call]) -> str:
        """The reply of a model that says `text` and makes `calls`.

        Args:
            text: What it says before the calls; may be empty.
            calls: Names and arguments, in order; at least one.
        """


class TaggedFormat(ToolCallFormat):
    """Calls between an opening and a closing tag; a subclass sets `marks` to the two and reads and writes what is
    between.

    A call that is opened and not closed is malformed: its end may be missing, and the engine must not run a call that
    the model did not finish.
    """

    checks_calls = True

    @abstractmethod
    def read_body(self, body: str, tools: Sequence[dict[str, Any]]) -> Call:
        """The name and arguments of one call.

        Args:
            body: What is between the tags, without white space at its edges.
            tools: The tools' schemas, in OpenAI's form.

        Raises:
            UnreadableCall: The body is not a call.
        """

    def parse(self, text: str, tools: Sequence[dict[str, Any]], prefix: str) -> ParsedCalls:
        """See `ToolCallFormat.parse`."""
        opening, closing = self.marks
        if opening not in text:
            return ParsedCalls(content=text, attempts=[])
        attempts: list[ToolCall | MalformedCall] = []
        outside: list[str] = []
        at = 0
        while (start := text.find(opening, at)) >= 0:
            outside.append(text[at:start])
            inside = start + len(opening)
            end, again = text.find(closing, inside), text.find(opening, inside)
            closed = end >= 0 and not 0 <= again < end
            at = end + len(closing) if closed else (again if again >= 0 else len(text))
            body, raw = text[inside:end].strip(), text[start:at]
            try:
                if not closed:
                    raise UnreadableCall(unclosed(opening, closing))
                if len(body) > LONGEST_CALL:
                    raise UnreadableCall(f"It is longer than {LONGEST_CALL} characters.")
                name, arguments = self.read_body(body, tools)
                attempts.append(storable_call(f"{prefix}_{len(attempts)}", name, arguments, raw))
            except UnreadableCall as problem:
                attempts.append(MalformedCall(raw=raw, problem=str(problem)))
        outside.append(text[at:])
        return ParsedCalls(content="".join(outside).rstrip(), attempts=attempts)


def parse_calls(form: ToolCallFormat, text: str, tools: Sequence[dict[str, Any]], prefix: str) -> ParsedCalls:
    """`form.parse(text, tools, prefix)`. A call of a format of the spec's own that cannot be stored is malformed.

    Raises:
        RenderError: `parse` raised, or returned something other than `ParsedCalls`.
    """
    if form.checks_calls:
        return form.parse(text, tools, prefix)
    name = f"{type(form).__name__}.parse"
    try:
        parsed = form.parse(text, tools, prefix)
    except Exception as error:
        raise RenderError(f"{name} raised {words_of(error)}") from error
    if not isinstance(parsed, ParsedCalls) or not isinstance(parsed.content, str):
        raise RenderError(f"{name} returned {type(parsed).__name__}, not ParsedCalls(content, attempts)")
    attempts: list[ToolCall | MalformedCall] = []
    for attempt in parsed.attempts:
        if isinstance(attempt, MalformedCall):
            attempts.append(attempt)
        elif not isinstance(attempt, ToolCall):
            kind = type(attempt).__name__
            raise RenderError(f"{name} returned {kind} among its attempts, not ToolCall or MalformedCall")
        elif not isinstance(attempt.name, str) or not isinstance(attempt.arguments, dict):
            problem = "It has no name, or its arguments are not an object."
            attempts.append(MalformedCall(raw=text, problem=problem))
        else:
            attempts.append(storable_call(str(attempt.id), attempt.name, attempt.arguments, text))
    return replace(parsed, attempts=attempts)


def unclosed(opening: str, closing: str) -> str:
    """The problem of a call that is opened and not closed."""
    return f"It begins with {opening} but is never closed with {closing}."


def storable_call(id_: str, name: str, arguments: dict[str, Any], raw: str) -> ToolCall | MalformedCall:
    """A call, or a malformed one where its name or arguments cannot be stored; see `engine.storable`."""
    if (problem := call_refusal(name, arguments)) is not None:
        return MalformedCall(raw=raw, problem=brief(problem))
    return ToolCall(id=id_, name=name, arguments=arguments)


HERMES_FORM = 'Write {"name": "<tool>", "arguments": {...}}.'
_PLAIN_FORM = "Write name(argument=value)."
_LIST_FORM = "Write [name(argument=value)]."
_NAMED = re.compile(r"([A-Za-z_][\w.\-]*)\s*\((.*)\)\Z", re.DOTALL)
_JSON_WORDS = {"true": True, "false": False, "null": None, "none": None}


class HermesFormat(TaggedFormat):
    """The format that large models know: one JSON object in each pair of tags.

    <tool_call>
    {"name": "calculate", "arguments": {"expression": "3 * (4 + 5)"}}
    </tool_call>
    """

    name = "hermes"
    marks = ("<tool_call>", "</tool_call>")
    auto = True

    def read_body(self, body: str, tools: Sequence[dict[str, Any]]) -> Call:
        """See `TaggedFormat.read_body`."""
        try:
            value = json.loads(body)
        except json.JSONDecodeError as error:
            raise UnreadableCall(f"It is not valid JSON: {error.msg} at character {error.pos}. {HERMES_FORM}") from None
        except RecursionError:
            raise UnreadableCall(f"Its JSON is nested too deeply. {HERMES_FORM}") from None
        except ValueError:
            raise UnreadableCall(f"Its JSON holds a number of too many digits. {HERMES_FORM}") from None
        if not isinstance(value, dict):
            raise UnreadableCall(f"It is not a JSON object. {HERMES_FORM}")
        name = value.get("name")
        if not isinstance(name, str) or not name:
            raise UnreadableCall(f'It has no "name". {HERMES_FORM}')
        return name, as_arguments(value.get("arguments", value.get("parameters", {})))

    def write(self, text: str, calls: Sequence[Call]) -> str:
        """See `ToolCallFormat.write`."""
        written = (json.dumps({"name": name, "arguments": given}, ensure_ascii=False) for name, given in calls)
        return "\n".join([*([text] if text else []), *(f"<tool_call>\n{call}\n</tool_call>" for call in written)])


def as_arguments(value: Any) -> dict[str, Any]:
    """Arguments as an object: a dict, or the JSON text of one.

    Raises:
        UnreadableCall: The value is neither.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise UnreadableCall(f'Its "arguments" are text, not a JSON object. {HERMES_FORM}') from None
    if not isinstance(value, dict):
        raise UnreadableCall(f'Its "arguments" are not a JSON object. {HERMES_FORM}')
    return value


class PlainFormat(TaggedFormat):
    """One function call with Python literals in each pair of tags, which a small model learns from two examples.

    <call>calculate(expression="3 * (4 + 5)")</call>
    <call>calculate(3 * (4 + 5))</call>

    Arguments are given by keyword or in the order of the tool's parameters. For a parameter of type string, text that
    is not a literal is taken as it stands. A tool with one parameter, a string, takes everything in the parentheses.
    """

    name = "plain"
    marks = ("<call>", "</call>")

    def read_body(self, body: str, tools: Sequence[dict[str, Any]]) -> Call:
        """See `TaggedFormat.read_body`."""
        match = _NAMED.match(body)
        if match is None:
            raise UnreadableCall(f"{around(body, 0)!r} is not of the form name(...). {_PLAIN_FORM}")
        name, inside = match.group(1), match.group(2).strip()
        parameters = {key: str(schema.get("type", "")) for key, schema in properties_of(name, tools).items()}
        sole = next(iter(parameters)) if list(parameters.values()) == ["string"] else None
        if not inside:
            return name, {}
        source = f"f({inside}\n)"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # "3 (4)" and "\\d" are the model's mistakes; they do not belong in the log
                call = ast.parse(source, mode="eval").body
            if not isinstance(call, ast.Call) or call.func.end_col_offset != 1:
                raise SyntaxError
            return name, _bind(call, source, parameters, sole)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            if sole is not None:
                return name, {sole: inside}
            raise UnreadableCall(f"What is in the parentheses of {name}(...) cannot be read. {_PLAIN_FORM}") from None

    def write(self, text: str, calls: Sequence[Call]) -> str:
        """See `ToolCallFormat.write`."""
        written = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls)
        return "\n".join([*([text] if text else []), *(f"<call>{call}</call>" for call in written)])


def properties_of(name: str | None, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The schemas of a tool's parameters, in order; empty for an unknown tool."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return properties if isinstance(properties, dict) else {}
    return {}


def _bind(call: ast.Call, source: str, parameters: dict[str, str], sole: str | None) -> dict[str, Any]:
    """Arguments by name. Raises ValueError where the source is not a list of arguments."""
    if any(isinstance(argument, ast.Starred) for argument in call.args) or any(w.arg is None for w in call.keywords):
        raise ValueError
    names = list(parameters)
    if sole is not None and call.args:
        if len(call.args) > 1 or call.keywords or not _is_text(call.args[0]):
            raise ValueError
    elif len(call.args) > len(names):
        if not names:
            raise UnreadableCall(f"Its arguments have no names, and no tool that takes any is called so. {_PLAIN_FORM}")
        raise UnreadableCall(
            f"It has {len(call.args)} arguments without a name, but the tool takes {', '.join(names)}."
        )
    given = [*zip(names, call.args, strict=False), *((str(word.arg), word.value) for word in call.keywords)]
    arguments: dict[str, Any] = {}
    for key, node in given:
        if key in arguments:
            raise UnreadableCall(f"It gives {key} twice.")
        if parameters.get(key) == "string" and not _is_text(node):  # taken as it is written
            arguments[key] = ast.get_source_segment(source, node)
        elif isinstance(node, ast.Name) and node.id.lower() in _JSON_WORDS:
            arguments[key] = _JSON_WORDS[node.id.lower()]
        else:
            arguments[key] = _value_of(key, node)
    return arguments


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


class PythonicFormat(ToolCallFormat):
    """All calls of a reply in one Python list, as LFM2 writes them; values are Python literals, or JSON's true, false
    and null.

    <|tool_call_start|>[calculate(expression="3 * (4 + 5)"), now()]<|tool_call_end|>

    Args:
        escapes: The template escapes text. Where it does not, `\\n` could be one character or two: such a call is
            malformed.
    """

    name = "pythonic"
    marks = ("<|tool_call_start|>", "<|tool_call_end|>")
    auto = True

    def __init__(self, escapes: bool = True) -> None:
        self._escapes = escapes

    def parse(self, text: str, tools: Sequence[dict[str, Any]], prefix: str) -> ParsedCalls:
        """See `ToolCallFormat.parse`."""
        opening, closing = self.marks
        attempts: list[ToolCall | MalformedCall] = []
        outside: list[str] = []
        rest = text
        while opening in rest:
            before, _, rest = rest.partition(opening)
            body, closed, rest = rest.partition(closing)
            outside.append(before)
            raw = f"{opening}{body}{closed}"
            if not closed:
                attempts.append(MalformedCall(raw=raw, problem=unclosed(opening, closing)))
                break
            try:
                calls = self._read(body.strip())
            except UnreadableCall as problem:
                attempts.append(MalformedCall(raw=raw, problem=str(problem)))
                continue
            for name, arguments in calls:
                attempts.append(ToolCall(id=f"{prefix}_{len(attempts)}", name=name, arguments=arguments))
        outside.append(rest)
        return ParsedCalls(content="".join(outside).rstrip() if attempts else text, attempts=attempts)

    def write(self, text: str, calls: Sequence[Call]) -> str:
        """See `ToolCallFormat.write`."""
        written = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls)
        opening, closing = self.marks
        return f"{text}{opening}[{', '.join(written)}]{closing}"

    def _read(self, body: str) -> list[Call]:
        """Names and arguments of a list of calls."""
        if not self._escapes and "\\" in body:
            raise UnreadableCall("It holds a backslash, which this model's calls have no way to write: leave it out.")
        try:
            if len(body) > LONGEST_CALL:
                raise UnreadableCall(f"It is longer than {LONGEST_CALL} characters.")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                parsed = ast.parse(body, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise UnreadableCall(f"{around(body, 0)!r} is not a list of calls. {_LIST_FORM}") from None
        calls: list[Call] = []
        for call in parsed.elts if isinstance(parsed, ast.List) else [parsed]:
            if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
                raise UnreadableCall(f"{around(body, 0)!r} is not a list of calls with named arguments. {_LIST_FORM}")
            arguments = {
                str(word.arg): _value_of(str(word.arg), _JsonWords().visit(word.value)) for word in call.keywords
            }
            calls.append((ast.unparse(call.func), arguments))
        return calls


class _JsonWords(ast.NodeTransformer):
    """Puts their values in place of JSON's words."""

    def visit_Name(self, name: ast.Name) -> ast.AST:
        return ast.Constant(_JSON_WORDS[name.id]) if name.id in _JSON_WORDS else name


def _value_of(key: str, node: ast.expr) -> Any:
    """The value of a Python literal, an argument, as JSON holds it.

    Raises:
        UnreadableCall: It is not a literal, or JSON cannot hold it.
    """
    try:
        return _as_json(ast.literal_eval(node))
    except (ValueError, TypeError):
        raise UnreadableCall(f"The value of {key} is not a literal: put text in quotes.") from None


def _as_json(value: Any) -> Any:
    """A Python literal as JSON holds it: tuples become lists. Raises ValueError where it cannot."""
    if value is None or isinstance(value, (str, int, bool)) or (isinstance(value, float) and isfinite(value)):
        return value
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _as_json(item) for key, item in value.items()}
    raise ValueError


FORMATS: dict[str, type[ToolCallFormat]] = {kind.name: kind for kind in (HermesFormat, PlainFormat, PythonicFormat)}
"""Built-in formats, by the name that `model.tool_calls` has for them."""


def tool_call_format(name: str, base: Path | None = None) -> ToolCallFormat:
    """The format that `model.tool_calls` names: a built-in one, or `package.module:Class`.

    Args:
        name: The value of `model.tool_calls`; not `auto`.
        base: The spec's folder, where modules are looked for first.

    Raises:
        RenderError: There is no such format, or the class is not a `ToolCallFormat`.
        EntryError: It cannot be imported.
    """
    if name in FORMATS:
        return FORMATS[name]()
    if ":" not in name:
        raise RenderError(
            f"model.tool_calls: {name!r} is unknown; write auto, {', '.join(FORMATS)} or package.module:Class"
        )
    from engine.spec.code.entry import load_entry

    loaded = load_entry(name, base)
    fix = (
        "derive it from engine.tokens.toolcalls.ToolCallFormat and define parse(text, tools, prefix) and write(text, "
        "calls)"
    )
    if isinstance(loaded, type) and issubclass(loaded, ToolCallFormat):
        if missing := sorted(loaded.__abstractmethods__):
            raise RenderError(f"model.tool_calls: {name} does not define {' and '.join(missing)}; {fix}")
        try:
            return loaded()
        except Exception as error:
            raise RenderError(f"model.tool_calls: {name}() raised {words_of(error)}") from error
    if isinstance(loaded, ToolCallFormat):
        return loaded
    raise RenderError(f"model.tool_calls: {name} is not a ToolCallFormat; {fix}")
