"""Sampled ids -> content, reasoning and tool calls.

Invariant: every attempt at a tool call is kept, read or malformed. A reply is read by token where the format has a
`FamilyReader`, else as text, by its tool-call format.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from engine.schemas.message import MalformedCall, ToolCall
from engine.tokens.bridge.kinds import View
from engine.tokens.tape import IntVector
from engine.tokens.toolcalls import HermesFormat, parse_calls

if TYPE_CHECKING:
    from engine.tokens.bridge.kinds import View
    from engine.tokens.reply_readers import FamilyReader
    from engine.tokens.template import ChatTemplate


_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_TAIL = 48
"""Tokens before a reply that are decoded to see whether the prompt opened a reasoning block."""
_OPEN_AT_END = re.compile(r"<think>\s*\Z")
_ANY_NUMBER = 2
"""`ChatTemplate.calls_shown` of a template that shows any number of calls."""
_NO_IDS: IntVector = np.zeros(0, np.int32)


class ParsedReply(msgspec.Struct, frozen=True):
    """A reply after parsing."""

    content: str
    """Its text, without reasoning and without readable calls."""
    reasoning: str | None
    attempts: list[ToolCall | MalformedCall]
    """Tool calls and malformed calls, in order."""
    body: str
    """The reply as written after its reasoning. A template is given it where it cannot show the calls as calls."""
    thinking: bool
    """It ended inside its reasoning."""
    as_calls: bool
    """A template can show the calls as calls: all were read, and no text follows them."""
    only_content: bool = False
    """`content` is all that was sampled, except white space at its edges and the token that ended it."""
    sampled: str | None = None
    """All that was sampled, as text, where that was decoded at once."""
    bare: bool = False
    """It ends with its calls, which are shown as calls, and no text of it spells an added token or has anything that
    the template looks for."""


class ReplyParser:
    """Parses the replies of one chat format.

    Args:
        template: The chat template.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def parse(self, ids: IntVector, *, before: IntVector, turn: int, tools: Sequence[View] = ()) -> ParsedReply:
        """Parse a reply that was sampled.

        Args:
            ids: Its sampled ids, the one that ended it included; int32 [tokens].
            before: The ids that it was sampled from, int32 [tokens]; the last 64 are enough.
            turn: The assistant turn; the id of call number i is `call_<turn>_<i>`.
            tools: The tools' schemas.

        Raises:
            RenderError: The family's reader failed, or the spec's own tool-call format did.
        """
        template = self._template
        if template.call_format is None and template.reader is not None:
            return self._parse_by_token(template.reader, ids, before, turn, tools)
        closed = bool(len(ids)) and int(ids[-1]) in template.stop_set
        text = template.decode(ids[:-1] if closed else ids)
        opened = template.knows_reasoning and _OPEN_AT_END.search(template.decode(before[-_TAIL:])) is not None
        return self._parse_text(text, turn, tools, opened)

    def parse_text(self, text: str, *, turn: int, tools: Sequence[View] = ()) -> ParsedReply:
        """Parse a reply of a backend that gives text and no ids.

        Args:
            text: The reply.
            turn: The assistant turn.
            tools: The tools' schemas.

        Raises:
            RenderError: The family's reader failed, or the spec's own tool-call format did.
        """
        template = self._template
        if template.call_format is None and template.reader is not None:
            ids = np.asarray([*template.encode(text), *template.stop_token_ids[:1]], np.int32)
            return self._parse_by_token(template.reader, ids, _NO_IDS, turn, tools)
        return self._parse_text(text, turn, tools, opened=False)

    def given(
        self, text: str, reasoning: str | None, attempts: list[ToolCall | MalformedCall]
    ) -> tuple[ParsedReply, str]:
        """A reply that came in parts: text, reasoning and calls. Nothing is parsed.

        Returns:
            The reply, and its text with the calls as the model of this chat format would write them.
        """
        if not attempts:
            return ParsedReply(text, reasoning, [], text, False, True), text
        form = self._template.call_format
        writer = form if form is not None and form.name else HermesFormat()  # a format of the spec's own may raise
        calls = [
            attempt.raw if isinstance(attempt, MalformedCall) else writer.write("", [(attempt.name, attempt.arguments)])
            for attempt in attempts
        ]
        written = "\n".join([*([text] if text else []), *calls])
        malformed = [attempt.raw for attempt in attempts if isinstance(attempt, MalformedCall)]
        as_calls = not malformed and self._can_show(len(attempts))
        content = "\n".join([*([text] if text else []), *malformed])
        return ParsedReply(content, reasoning, attempts, content if as_calls else written, False, as_calls), written

    def is_plain(self, parsed: ParsedReply) -> bool:
        """Whether a reply is text in which the template looks for nothing, so that the checks of probes hold for it."""
        if not parsed.only_content:
            return False
        special, body = self._template.inspected, parsed.body
        return (special is None or special.search(body) is None) and bool(body) and not body.isspace()

    def _parse_by_token(
        self, reader: FamilyReader, ids: IntVector, before: IntVector, turn: int, tools: Sequence[View]
    ) -> ParsedReply:
        parse = reader.read(ids, before, f"call_{turn}", tools, self._template.knows_reasoning)
        if not parse.attempts:
            return ParsedReply(
                parse.content, parse.reasoning, [], parse.content, parse.thinking, True, parse.only_content
            )
        read = MalformedCall not in map(type, parse.attempts)
        as_calls = read and self._can_show(len(parse.attempts)) and parse.calls_end_it
        body = parse.content if as_calls else parse.after
        sought = self._template.sought
        bare = as_calls and parse.sampled is not None and (sought is None or sought.search(parse.texts) is None)
        content = parse.content if read else body
        return ParsedReply(
            content, parse.reasoning, parse.attempts, body, parse.thinking, as_calls, False, parse.sampled, bare
        )

    def _parse_text(self, text: str, turn: int, tools: Sequence[View], opened: bool) -> ParsedReply:
        """`opened`: the prompt ended inside a reasoning block."""
        call_format = self._template.call_format
        reasoning, body, thinking = None, text, False
        start = text.lstrip()
        if self._template.knows_reasoning and (opened or start.startswith(_THINK_OPEN)):
            reasoning, closing, body = start.removeprefix(_THINK_OPEN).partition(_THINK_CLOSE)
            reasoning, body, thinking = reasoning.strip("\n"), body.lstrip("\n"), not closing
        only_content = reasoning is None
        if thinking or call_format is None:
            return ParsedReply(body, reasoning, [], body, thinking, True, only_content)
        parsed = parse_calls(call_format, body, tools, f"call_{turn}")
        content, attempts = parsed.content, parsed.attempts
        if not attempts:
            return ParsedReply(body, reasoning, [], body, False, True, only_content)
        read = all(isinstance(attempt, ToolCall) for attempt in attempts)
        as_calls = read and self._can_show(len(attempts)) and body.startswith(content)
        return ParsedReply(
            content if read else body, reasoning, attempts, body, False, as_calls, only_content and not as_calls
        )

    def _can_show(self, calls: int) -> bool:
        """Whether so many calls of a reply can be shown as calls."""
        template = self._template
        return template.reads_calls and (calls <= template.calls_shown or template.calls_shown >= _ANY_NUMBER)


def call_tokens(
    template: ChatTemplate, ids: IntVector, before: IntVector, tools: Sequence[View], call: int
) -> tuple[int, int] | None:
    """The tokens [start, end) of call number `call`, malformed ones counted; None if the reply has no such call.

    A call ends with the first token after which the parser reads it as it does in the whole reply. It begins with the
    opening mark of its format; if the format has none, after the previous call or the text.

    Args:
        template: The chat template.
        ids: The sampled ids of the reply, int32 [tokens].
        before: The ids that it was sampled from, int32 [tokens]; the last 64 are enough.
        tools: The tools' schemas.
        call: Number of the call, from 0.

    Raises:
        RenderError: the parser of replies failed.
    """

    def attempts(tokens: int) -> list[ToolCall | MalformedCall]:
        return template.replies.parse(ids[:tokens], before=before, turn=0, tools=tools).attempts

    all_attempts = attempts(len(ids))
    if not 0 <= call < len(all_attempts):
        return None

    def read(tokens: int) -> bool:
        return attempts(tokens)[: call + 1] == all_attempts[: call + 1]

    def opened(tokens: int) -> bool:
        return len(attempts(tokens)) > call

    end = _first(read, len(ids))
    start = _first(opened, end) - 1
    if start < end - 1:  # `start` is the last token of the opening mark
        marks = template.call_format.marks if template.call_format is not None else ()
        text = template.decode(ids[: start + 1])
        at = max((text.rfind(mark) for mark in marks), default=-1)
        if at >= 0:
            start = _first(lambda tokens: len(template.decode(ids[:tokens])) > at, start + 1) - 1
        return start, end
    if call:
        previous = call_tokens(template, ids, before, tools, call - 1)
        return (0 if previous is None else previous[1]), end
    content = template.replies.parse(ids, before=before, turn=0, tools=tools).content
    said = text_tokens(template, ids, content) if content else None
    return (0 if said is None else said[1]), end


def text_tokens(template: ChatTemplate, ids: IntVector, text: str) -> tuple[int, int] | None:
    """The tokens [start, end) that hold the first occurrence of a text; None if the reply does not contain it.

    Args:
        template: The chat template.
        ids: The sampled ids of the reply, int32 [tokens].
        text: The text.
    """
    at = template.decode(ids).find(text)
    if at < 0:
        return None
    start = _first(lambda tokens: len(template.decode(ids[:tokens])) > at, len(ids)) - 1
    end = _first(lambda tokens: len(template.decode(ids[:tokens])) >= at + len(text), len(ids))
    return start, end


def _first(holds: Callable[[int], bool], most: int) -> int:
    """The smallest number of tokens, 1 to `most`, for which `holds` is true; it is true for `most` and stays true."""
    return 1 + bisect_left(range(1, most), True, key=holds)
