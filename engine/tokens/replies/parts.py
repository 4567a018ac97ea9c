"""A part of a reply, a tool call or a text -> the sampled tokens that it is."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engine.schemas.message import MalformedCall, ToolCall
from engine.tokens.tape import IntVector

if TYPE_CHECKING:
    from engine.tokens.bridge.kinds import View
    from engine.tokens.template import ChatTemplate

Attempts = Sequence[ToolCall | MalformedCall]


def call_tokens(
    template: ChatTemplate, ids: IntVector, before: IntVector, tools: Sequence[View], call: int
) -> tuple[int, int] | None:
    """The tokens [start, end) of call number `call`, malformed ones counted; None if the reply has no such call.

    A call ends with the first token after which the parser reads it as it does in the whole reply. It begins with the opening
    mark of its format; if the format has none, after the previous call or the text.

    Args:
        template: The chat template.
        ids: The sampled ids of the reply, int32 [tokens].
        before: The ids that it was sampled from, int32 [tokens]; the last 64 are enough.
        tools: The tools' schemas.
        call: Number of the call, from 0.

    Raises:
        RenderError: the parser of replies failed.
    """

    def attempts(tokens: int) -> Attempts:
        return template.replies.parse(ids[:tokens], before=before, turn=0, tools=tools).attempts

    all_attempts = attempts(len(ids))
    if not 0 <= call < len(all_attempts):
        return None

    def read(tokens: int) -> bool:
        return list(attempts(tokens)[: call + 1]) == list(all_attempts[: call + 1])

    def opened(tokens: int) -> bool:
        return len(attempts(tokens)) > call

    end = _first(read, len(ids))
    start = _first(opened, end) - 1
    if start < end - 1:
        return _mark_start(template, ids, start), end
    if call:
        previous = call_tokens(template, ids, before, tools, call - 1)
        return (0 if previous is None else previous[1]), end
    content = template.replies.parse(ids, before=before, turn=0, tools=tools).content
    text = text_tokens(template, ids, content) if content else None
    return (0 if text is None else text[1]), end


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


def _mark_start(template: ChatTemplate, ids: IntVector, last: int) -> int:
    """The first token of the opening mark whose last token is `last`."""
    marks = template.call_format.marks if template.call_format is not None else ()
    text = template.decode(ids[: last + 1])
    at = max((text.rfind(mark) for mark in marks), default=-1)
    return last if at < 0 else _first(lambda tokens: len(template.decode(ids[:tokens])) > at, last + 1) - 1


def _first(holds: Callable[[int], bool], most: int) -> int:
    """The smallest number of tokens, 1 to `most`, for which `holds` is true; it is true for `most` and stays true."""
    return 1 + bisect_left(range(1, most), True, key=holds)
