"""A tool-call format: the text of a reply <-> its tool calls, each read or malformed, in order.

Invariant: every call that a reply opens gives exactly one attempt, in order, read or malformed. None is left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from msgspec.structs import replace

from engine.errors import RenderError
from engine.schemas.base import Struct
from engine.schemas.message import MalformedCall, ToolCall
from engine.storable import call_refusal, words_of
from engine.terminal import brief

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
            body = text[inside:end].strip() if closed else None
            attempts.append(self._attempt(body, text[start:at], tools, f"{prefix}_{len(attempts)}"))
        outside.append(text[at:])
        return ParsedCalls(content="".join(outside).rstrip(), attempts=attempts)

    def _attempt(
        self, body: str | None, raw: str, tools: Sequence[dict[str, Any]], id_: str
    ) -> ToolCall | MalformedCall:
        """One attempt at a call. `body` is None where it is not closed."""
        if body is None:
            return MalformedCall(raw=raw, problem=unclosed(*self.marks))
        try:
            if len(body) > LONGEST_CALL:
                raise UnreadableCall(f"It is longer than {LONGEST_CALL} characters.")
            name, arguments = self.read_body(body, tools)
        except UnreadableCall as problem:
            return MalformedCall(raw=raw, problem=str(problem))
        return storable_call(id_, name, arguments, raw)


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
    for attempt in parsed.attempts:
        if not isinstance(attempt, ToolCall | MalformedCall):
            kind = type(attempt).__name__
            raise RenderError(f"{name} returned {kind} among its attempts, not ToolCall or MalformedCall")
    return replace(parsed, attempts=[_storable(attempt, text) for attempt in parsed.attempts])


def _storable(attempt: ToolCall | MalformedCall, text: str) -> ToolCall | MalformedCall:
    """A call as it is where it can be stored, else as malformed."""
    if isinstance(attempt, MalformedCall):
        return attempt
    if not isinstance(attempt.name, str) or not isinstance(attempt.arguments, dict):
        return MalformedCall(raw=text, problem="It has no name, or its arguments are not an object.")
    return storable_call(str(attempt.id), attempt.name, attempt.arguments, text)


def unclosed(opening: str, closing: str) -> str:
    """The problem of a call that is opened and not closed."""
    return f"It begins with {opening} but is never closed with {closing}."


def storable_call(id_: str, name: str, arguments: dict[str, Any], raw: str) -> ToolCall | MalformedCall:
    """A call, or a malformed one where its name or arguments cannot be stored; see `engine.storable`."""
    if (problem := call_refusal(name, arguments)) is not None:
        return MalformedCall(raw=raw, problem=brief(problem))
    return ToolCall(id=id_, name=name, arguments=arguments)
