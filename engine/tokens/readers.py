"""Replies parsed by token, by the parser that the library `renderers` has for a family.

Invariant: every attempt at a call is kept, read or malformed. Where the template shows no reasoning, a reader reports none:
a reply's reasoning is then part of its content, so that no prompt loses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.errors import RenderError
from engine.fast.qwen_replies import QwenReply, qwen_reader
from engine.schemas.message import MalformedCall, ToolCall
from engine.tokens.arguments import restored
from engine.tokens.tape import IntVector
from engine.tokens.tokenizer import FastTokenizer
from engine.tokens.toolcalls import UnreadableCall
from engine.tokens.toolcalls.base import as_arguments, storable_call
from engine.tokens.toolcalls.hermes import HERMES_FORM

if TYPE_CHECKING:
    from engine.tokens.proof import View

_PROBLEMS = {
    "invalid_json": "Its arguments are not valid JSON.",
    "unclosed_block": "It was begun but never finished: its closing tag is missing.",
    "missing_name": "It does not say which tool to call.",
    "malformed_structure": "It is not in the form that tool calls have.",
}


class TokenParse:
    """The parts of one reply, as a family's parser found them."""

    __slots__ = ("after", "attempts", "calls_end_it", "content", "reasoning", "thinking", "whole")

    def __init__(self, content: str, reasoning: str | None, attempts: list[ToolCall | MalformedCall]) -> None:
        self.content = content
        self.reasoning = reasoning
        self.attempts = attempts
        self.thinking = False
        """It ended inside its reasoning."""
        self.whole = False
        """`content` is the whole reply."""
        self.calls_end_it = True
        """There is no text between the calls or after them."""
        self.after = ""
        """The text after the reasoning, calls included. Only set where there are calls."""


class Harmony:
    """The library's parser of gpt-oss replies, without the vocabulary file that the family's renderer downloads.

    Raises:
        KeyError: The tokenizer lacks one of the tokens.
    """

    has_reasoning_channel = True
    """Replies have reasoning in a channel of its own, whether or not the template shows it."""
    _TOKENS = ("return", "call", "start", "end", "channel", "message", "constrain")

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = {f"{name}_id": tokenizer.added[f"<|{name}|>"] for name in self._TOKENS}
        self._opening = tokenizer.encode("<|start|>assistant")

    def get_stop_token_ids(self) -> list[int]:
        """See the library's `Renderer.get_stop_token_ids`."""
        return [self._ids[name] for name in ("return_id", "call_id", "end_id")]

    def parse_response(self, ids: list[int], **_: Any) -> Any:
        """See the library's `Renderer.parse_response`. The prompt has begun the first message."""
        from renderers.parsing import parse_gpt_oss

        read = parse_gpt_oss(self._tokenizer, [*self._opening, *ids], **self._ids)
        for call in read.tool_calls:
            if call.token_span is not None:
                start, end = (max(0, at - len(self._opening)) for at in call.token_span)
                call.token_span = (start, end)
        return read


class FamilyReader:
    """Reads replies as one family writes them.

    Args:
        name: The family.
        library: Its renderer in the library.
        tokenizer: The tokenizer.
        stops: Ids that end a reply.
    """

    def __init__(self, name: str, library: Any, tokenizer: FastTokenizer, stops: frozenset[int]) -> None:
        self.name = name
        self.has_reasoning_channel: bool = getattr(library, "has_reasoning_channel", False)
        """Replies have reasoning in a channel of its own, whether or not the template shows it."""
        self._library = library
        self._decode = tokenizer.decode
        self._stops = stops
        self._special = {id_ for text, id_ in tokenizer.added.items() if text != "</think>"}
        self._foreign = stops - set(library.get_stop_token_ids())
        """Tokens that end replies and that the library does not know as such."""
        self._qwen = qwen_reader(library, tokenizer)

    def read(self, ids: IntVector, before: IntVector, prefix: str, tools: Sequence[View], reasons: bool) -> TokenParse:
        """Parse a reply.

        Args:
            ids: Its sampled ids, the one that ended it included; int32 [tokens].
            before: The ids that it was sampled from, int32 [tokens]; the last few are enough.
            prefix: What the ids of its calls begin with.
            tools: The tools' schemas.
            reasons: The template shows reasoning; else it is left in the content.

        Raises:
            RenderError: The library's parser failed.
        """
        if len(ids) and int(ids[-1]) in self._foreign:
            ids = ids[:-1]
        read = self._read(ids, before.tolist(), tools)
        attempts = [_attempt(call, f"{prefix}_{index}", tools) for index, call in enumerate(read.tool_calls)]
        found = TokenParse(read.content, read.reasoning_content, attempts)
        if read.reasoning_complete is False:
            found.thinking, found.reasoning = True, (found.reasoning or "").strip("\n")
        if not attempts and type(read) is QwenReply:
            found.whole = True
            return found
        said: list[int] = ids.tolist()
        if said and said[-1] in self._stops:
            said.pop()
        spans = [call.token_span for call in read.tool_calls]
        text = self._decode(said)
        if not reasons:
            if not spans or None in spans:
                found.content = text.strip()
            elif found.reasoning is not None:
                found.content = self._decode(self._without_markers(said[: spans[0][0]])).strip()
            found.reasoning, found.thinking = None, False
        if attempts:
            found.calls_end_it = not self._said_more(said, spans)
            found.after = text if found.reasoning is None else _after_reasoning(text, found.content, read.tool_calls)
        found.whole = not attempts and found.reasoning is None and found.content.strip() == text.strip()
        return found

    def _read(self, ids: IntVector, before: list[int], tools: Sequence[View]) -> QwenReply | Any:
        """A reply as the library parses it."""
        found = self._qwen.read(ids, before) if self._qwen is not None else None
        if found is not None:
            return found
        try:
            return self._library.parse_response(ids.tolist(), tools=list(tools) or None, prompt_ids=before)
        except Exception as error:
            raise RenderError(f"the renderer {self.name!r} cannot read a reply: {error}") from error

    def _without_markers(self, ids: list[int]) -> list[int]:
        """The ids without the markers at their end that begin a section of calls."""
        while ids and ids[-1] in self._special:
            ids.pop()
        return ids

    def _said_more(self, said: list[int], spans: list[Any]) -> bool:
        """Whether there is text between or after the calls, which the parser leaves out."""
        if None in spans:
            return False
        after = spans[0][1]
        for start, end in [*spans[1:], (len(said), 0)]:
            if after < start and self._decode(said[after:start]).strip():
                return True
            after = end
        return False


def _after_reasoning(text: str, content: str, calls: list[Any]) -> str:
    """The text after the reasoning, calls included."""
    _, closing, body = text.partition("</think>")
    if closing:
        return body.lstrip("\n")
    return "\n".join([content, *(call.raw for call in calls)]).strip()


def _attempt(call: Any, id_: str, tools: Sequence[View]) -> ToolCall | MalformedCall:
    status = str(call.status)
    arguments = call.arguments
    try:
        if isinstance(call.name, str) and isinstance(arguments, dict):
            arguments, permitted = restored(call.name, arguments, call.raw, tools)
            if status == "invalid_json" and permitted:
                status = "ok"
        if not isinstance(call.name, str | None):
            status = "missing_name"
        if status in ("ok", "unknown_tool") and call.name:
            return storable_call(id_, call.name, as_arguments(arguments or {}, HERMES_FORM))
    except UnreadableCall as problem:
        return MalformedCall(raw=call.raw, problem=str(problem))
    return MalformedCall(raw=call.raw, problem=_PROBLEMS.get(status, f"It could not be read ({status})."))
