"""The format `pythonic`, which LFM2 writes: all calls of a reply in one Python list.

<|tool_call_start|>[calculate(expression="3 * (4 + 5)"), now()]<|tool_call_end|>
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Sequence
from typing import Any

from engine.schemas.message import MalformedCall, ToolCall
from engine.terminal import around
from engine.tokens.toolcalls.base import (
    JSON_WORDS,
    LONGEST_CALL,
    Call,
    ParsedCalls,
    ToolCallFormat,
    UnreadableCall,
    as_json,
    unclosed,
)

_FORM = "Write [name(argument=value)]."


class PythonicFormat(ToolCallFormat):
    """Calls as a Python list between LFM2's tokens; values are Python literals, or JSON's true, false and null.

    Args:
        escapes: The template escapes text. Where it does not, `\\n` could be one character or two: such a call is malformed.
    """

    name = "pythonic"
    marks = ("<|tool_call_start|>", "<|tool_call_end|>")
    auto = True

    def __init__(self, escapes: bool = True) -> None:
        self._escapes = escapes

    def unescaped(self) -> PythonicFormat:
        """See `ToolCallFormat.unescaped`."""
        return PythonicFormat(escapes=False)

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
            raise UnreadableCall(f"{around(body, 0)!r} is not a list of calls. {_FORM}") from None
        calls: list[Call] = []
        for call in parsed.elts if isinstance(parsed, ast.List) else [parsed]:
            if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
                raise UnreadableCall(f"{around(body, 0)!r} is not a list of calls with named arguments. {_FORM}")
            arguments = {str(word.arg): _literal(str(word.arg), word.value) for word in call.keywords}
            calls.append((ast.unparse(call.func), arguments))
        return calls


def _literal(key: str, node: ast.expr) -> Any:
    """A Python literal in which JSON's words stand for their values."""

    class Words(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.AST:
            return ast.Constant(JSON_WORDS[name.id]) if name.id in JSON_WORDS else name

    try:
        return as_json(ast.literal_eval(Words().visit(node)))
    except (ValueError, TypeError):
        raise UnreadableCall(f"The value of {key} is not a literal: put text in quotes.") from None
