"""`limits.tool_result_tokens`: long results of tools, and texts of environments and users, are cut before they are recorded.

Invariant: a text of at most that many tokens is unchanged; of any other, at most that many are shown, the mark included. A
journal holds what the model is shown, so resume and replay cut nothing. A text is tokenised only up to the length that the limit
can hold, so a text of 100 MB costs no more than a short one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.errors import EngineError
from engine.schemas.journal import Record, ResetRecord, StepRecord, ToolsRecord, UserRecord
from engine.schemas.message import ContentPart, Message, TextPart

if TYPE_CHECKING:
    from engine.schemas.limits import LimitsSpec
    from engine.tokens.template import ChatTemplate

CHARACTERS = "{{characters}}"
"""In the mark: how many characters are left out."""

Content = str | list[ContentPart]


class TextCutter:
    """Cuts the texts of records.

    Args:
        limits: The spec's limits.
        template: Counts tokens.

    Raises:
        EngineError: the mark alone has more tokens than the limit.
    """

    def __init__(self, limits: LimitsSpec, template: ChatTemplate) -> None:
        assert limits.tool_result_tokens is not None
        self._most = limits.tool_result_tokens
        self._keep = limits.tool_result_keep
        self._mark = limits.tool_result_mark
        self._template = template
        if self._count(self._marked(10**12)) > self._most:
            fault = EngineError(
                f"`limits.tool_result_mark` has more than `limits.tool_result_tokens: {self._most}` tokens; shorten it"
            )
            fault.kind, fault.blame = "bad_limit", "spec"
            raise fault

    def cut(self, record: Record) -> Record:
        """The record with its texts cut; the same object if none is too long."""
        if isinstance(record, ToolsRecord):
            results = [
                result
                if (content := self._content(result.content)) is result.content
                else replace(result, content=content)
                for result in record.results
            ]
            return record if _same(results, record.results) else replace(record, results=results)
        if isinstance(record, UserRecord):
            content = self._content(record.turn.content)
            if content is record.turn.content:
                return record
            return replace(record, turn=record.turn.model_copy(update={"content": content}))
        if isinstance(record, StepRecord):
            said = self._messages(record.step.messages)
            if said is record.step.messages:
                return record
            return replace(record, step=record.step.model_copy(update={"messages": said}))
        if isinstance(record, ResetRecord):
            said = self._messages(record.reset.messages)
            if said is record.reset.messages:
                return record
            return replace(record, reset=record.reset.model_copy(update={"messages": said}))
        return record

    def _messages(self, messages: list[Message]) -> list[Message]:
        cut = [
            message
            if (content := self._content(message.content)) is message.content
            else replace(message, content=content)
            for message in messages
        ]
        return messages if _same(cut, messages) else cut

    def _content(self, content: Content) -> Content:
        """A content with at most the limit's tokens of text; images stay."""
        if isinstance(content, str):
            return self.text(content)
        if not isinstance(content, list):
            return content  # refused later, as any content that is no text
        texts = [part.text for part in content if isinstance(part, TextPart)]
        whole = "".join(texts)
        head, tail = self._kept(whole)
        if head + tail >= len(whole):
            return content
        parts: list[ContentPart] = []
        at, marked = 0, False
        for part in content:
            if not isinstance(part, TextPart):
                parts.append(part)
                continue
            end = at + len(part.text)
            first = part.text[: max(0, head - at)]
            last = part.text[max(0, len(whole) - tail - at) :] if end > len(whole) - tail else ""
            mark = "" if marked or end <= head else self._marked(len(whole) - head - tail)
            marked = marked or bool(mark)
            if first + mark + last:
                parts.append(part.model_copy(update={"text": first + mark + last}))
            at = end
        return parts

    def text(self, text: str) -> str:
        """A text of at most the limit's tokens."""
        head, tail = self._kept(text)
        if head + tail >= len(text):
            return text
        return text[:head] + self._marked(len(text) - head - tail) + text[len(text) - tail :]

    def _kept(self, text: str) -> tuple[int, int]:
        """How many characters of the beginning and of the end are shown; together all of them if the text is short enough."""
        try:
            if len(text) * 4 <= self._most or len(text.encode()) <= self._most:  # a token is at least one byte
                return len(text), 0
        except UnicodeEncodeError:  # no text: refused when it is recorded
            return len(text), 0
        if len(text) <= self._most * self._template.fast.longest and self._count(text) <= self._most:
            return len(text), 0
        low, high = 0, min(len(text) - 1, self._most * self._template.fast.longest)  # characters that fit, and that may
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(text, middle):
                low = middle
            else:
                high = middle - 1
        while low and not self._fits(text, low):  # more characters may have fewer tokens
            low -= 1
        return self._split(low)

    def _split(self, characters: int) -> tuple[int, int]:
        head = {"start": characters, "end": 0, "both": (characters + 1) // 2}[self._keep]
        return head, characters - head

    def _fits(self, text: str, characters: int) -> bool:
        head, tail = self._split(characters)
        shown = text[:head] + self._marked(len(text) - characters) + text[len(text) - tail :]
        return self._count(shown) <= self._most

    def _marked(self, characters: int) -> str:
        return self._mark.replace(CHARACTERS, f"{characters:,}")

    def _count(self, text: str) -> int:
        """Tokens of a text as a conversation has it: special tokens that it spells are plain text."""
        return len(
            self._template.encode(text if self._template.allow_special else self._template.fast.quoting.quote(text))
        )


def _same(these: Sequence[object], those: Sequence[object]) -> bool:
    return all(one is other for one, other in zip(these, those, strict=True))
