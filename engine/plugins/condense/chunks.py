"""Cuts the messages of a thread into chunks, finds their keywords, and puts other texts in the place of chunks; when a
conversation must be condensed before the model is asked, and the window of images that slides then.

Invariant: the chunks of a text are disjoint and in order. `replaced` changes the characters of its chunks and nothing
else. A text that is already a condensed block is in no chunk, so nothing is condensed twice (except as part of the
history).

Keywords are found by YAKE: statistical, without a model and without a download (Campos et al., 2020). It separates
words at white space. Chinese, Japanese and Thai have none, so BudouX splits their text into phrases first, and a
keyword is one phrase.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.actions.action_facts import Room
from engine.errors import EngineError, RenderError
from engine.plugins.condense.spec import (
    ByPassage,
    ByTokens,
    CondenseSpec,
    KeywordsSpec,
    PolicySummarySpec,
    WindowSpec,
)
from engine.schemas.message import ContentPart, ImagePart, Message, TextPart, image_part
from engine.tokens.images import open_pixels
from engine.tokens.pixels import to_rgb

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec
    from engine.tokens.conversation import Conversation
    from engine.tokens.image_bank import ImageBank
    from engine.tokens.template import ChatTemplate

Count = Callable[[str], int]
"""Tokens of a text."""

_BLOCK = re.compile(r"<block_(\d+)>\n.*?\n</block_\1>", re.DOTALL)
_MOST = 200
"""Maximum number of keywords that are ranked."""


class ConversationChunk(NamedTuple):
    """A part of a thread that may be condensed."""

    place: int
    """The message's number in the thread."""
    part: int
    """The number of the message's text part; -1 for all of its content, images included."""
    start: int
    """Its first character in the part."""
    end: int
    """One past its last character."""
    text: str
    tokens: int


def block_text(number: int, text: str) -> str:
    """What the model sees of a condensed chunk."""
    return f"<block_{number}>\n{text}\n</block_{number}>"


def chunks_of(spec: CondenseSpec, thread: Sequence[Message], opening: int, count: Count) -> list[ConversationChunk]:
    """The chunks of a thread, oldest first.

    Args:
        spec: Which messages may be condensed, and how they are cut.
        thread: The messages that the model is shown.
        opening: How many of them precede the model's first reply.
        count: Counts tokens.

    Raises:
        EngineError: the package that cuts texts by tokens is not installed (kind `no_package`).
    """
    first = 0 if spec.opening else opening
    cut = _cutter(spec, count)
    chunks: list[ConversationChunk] = []
    for place in range(first, max(first, len(thread) - spec.keep_last)):
        message = thread[place]
        if message.role not in spec.roles:
            continue
        if spec.condenser.kind == "drop" and spec.chunks.by == "message":
            if not _BLOCK.fullmatch(message.text) and (message.text or message.images):
                chunks.append(ConversationChunk(place, -1, 0, 0, message.text, count(message.text)))
            continue
        content = message.content
        texts = [content] if isinstance(content, str) else [item.text for item in content if isinstance(item, TextPart)]
        for part, text in enumerate(texts):
            edges = [0, *(edge for block in _BLOCK.finditer(text) for edge in block.span()), len(text)]
            for start, end in zip(edges[::2], edges[1::2], strict=True):  # what is outside of blocks
                for low, high in cut(text[start:end]):
                    words = text[start + low : start + high]
                    if words.strip():
                        chunks.append(ConversationChunk(place, part, start + low, start + high, words, count(words)))
    return chunks


def history_of(thread: Sequence[Message], opening: int, keep_last: int) -> tuple[int, int]:
    """The messages [start, end) between the opening and the newest `keep_last`; a tool's result stays with its call."""
    end = max(opening, len(thread) - keep_last)
    while end > opening and end < len(thread) and thread[end].role == "tool":
        end -= 1
    return opening, end


def history_text(messages: Sequence[Message]) -> str:
    """Messages as one text, for a model that summarises them and for the tool `expand`."""
    lines = []
    for message in messages:
        calls = [f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})" for call in message.tool_calls]
        lines.append(f"{message.role}: " + "\n".join(filter(None, [message.text, *calls])))
    return "\n\n".join(lines)


def replaced(message: Message, texts: Sequence[tuple[ConversationChunk, str]]) -> Message:
    """A message with other texts in the place of its chunks.

    Args:
        message: The message.
        texts: Its chunks, in order, each with the text that stands for it.
    """
    if texts[0][0].part < 0:
        return replace(message, content=texts[0][1])
    by_part: dict[int, list[tuple[ConversationChunk, str]]] = {}
    for chunk, text in texts:
        by_part.setdefault(chunk.part, []).append((chunk, text))
    if isinstance(message.content, str):
        return replace(message, content=_spliced(message.content, by_part[0]))
    parts: list[ContentPart] = []
    number = 0
    for part in message.content:
        if isinstance(part, TextPart):
            if number in by_part:
                part = part.model_copy(update={"text": _spliced(part.text, by_part[number])})
            number += 1
        parts.append(part)
    return replace(message, content=parts)


def _spliced(text: str, texts: Sequence[tuple[ConversationChunk, str]]) -> str:
    pieces, at = [], 0
    for chunk, new in texts:
        pieces += [text[at : chunk.start], new]
        at = chunk.end
    return "".join([*pieces, text[at:]])


def _cutter(spec: CondenseSpec, count: Count) -> Callable[[str], list[tuple[int, int]]]:
    """The function that cuts a text: [start, end) of each chunk."""
    if isinstance(spec.chunks, ByTokens):
        try:
            from semantic_text_splitter import TextSplitter
        except ImportError as error:
            raise _missing_package("condense.chunks: {by: tokens}", error) from error
        splitter = TextSplitter.from_callback(count, spec.chunks.size, trim=False)
        return lambda text: [(start, start + len(words)) for start, words in splitter.chunk_indices(text)]
    if isinstance(spec.chunks, ByPassage):
        starts = re.compile(spec.chunks.pattern, re.MULTILINE).finditer
        return lambda text: [*pairwise(sorted({0, *(match.start() for match in starts(text)), len(text)}))]
    return lambda text: [(0, len(text))]


def _missing_package(key: str, error: ImportError) -> EngineError:
    """The error of a setting whose package is not installed."""
    message = f"`{key}` needs a package ({error}): pip install 'episode-engine[condense]'"
    return EngineError(message, kind="no_package", blame="spec")


def keywords(text: str, spec: KeywordsSpec, count: Count) -> str:
    """The best keywords of a text, in the order in which they first occur, as many as the budget holds.

    Args:
        text: The text.
        spec: Language, length of a keyword, budget in tokens.
        count: Counts tokens.

    Raises:
        EngineError: a package is not installed (kind `no_package`).
    """
    extractor, phrases = _tools(spec.language, spec.ngram)
    words = text if phrases is None else " ".join(phrases(text))
    try:
        weighted: list[tuple[str, float]] = extractor.extract_keywords(words)
    except ValueError:  # of a text without words, such as digits only
        weighted = []
    chosen: list[str] = []
    for keyword, _ in sorted(weighted, key=lambda item: (float(item[1]), item[0])):
        if not any(keyword.lower() in other.lower() for other in chosen) and (
            count("; ".join([*chosen, keyword])) <= spec.tokens
        ):
            chosen.append(keyword)
    lowered = text.lower()
    return "; ".join(sorted(chosen, key=lambda keyword: lowered.find(keyword.lower())))


@lru_cache(16)
def _tools(language: str, ngram: int) -> tuple[Any, Callable[[str], list[str]] | None]:
    try:
        import budoux
        import yake
    except ImportError as error:
        raise _missing_package("condense.condenser: {kind: keywords}", error) from error
    parsers = {
        "zh": budoux.load_default_simplified_chinese_parser,
        "ja": budoux.load_default_japanese_parser,
        "th": budoux.load_default_thai_parser,
    }
    if language not in parsers:
        return yake.KeywordExtractor(lan=language, n=ngram, top=_MOST), None
    return yake.KeywordExtractor(lan=language, n=1, top=_MOST), parsers[language]().parse


_ASKED, _REPLIED = Message(role="user", content="Q"), Message(role="assistant", content="A")


class CondenseRoom(Room):
    """The room that `condense` and `limits.on_overflow` ask for."""

    def __init__(self, spec: EpisodeSpec, template: ChatTemplate) -> None:
        self._condense = CondenseSpec.or_default(spec)
        self._before_prompts = spec.limits.value_of("on_overflow") == "condense"
        condenser = self._condense.condenser
        self._more = 0
        if isinstance(condenser, PolicySummarySpec):
            follows = spec.limits.tool_result_tokens or 0
            request = Message(role="user", content=condenser.prompt)
            try:  # what the request adds to a prompt that already has one of a user
                asked = len(template.render([_ASKED, _REPLIED, request])) - len(template.render([_ASKED]))
            except RenderError:  # a template that refuses such a conversation
                asked = len(template.encode(condenser.prompt))
            self._more = follows + condenser.tokens + asked

    def reserve(self, free: int) -> int:
        """Tokens that must be free: for a reply; if the policy summarises, also for what follows the reply, and for the
        summary."""
        fixed = self._condense.reserve_tokens
        return free + self._more if fixed is None else fixed

    def images(self, conversation: Conversation, most: float) -> int | None:
        """The number of images, if the window of `condense.keep` slides."""
        keep = self._condense.keep
        if keep is None:
            return None
        older = len(older_images(self._condense, conversation.thread.messages, conversation.opening))
        slides = older >= keep.further or (older and len(conversation.thread.images) > most)
        return older + keep.newest if slides else None

    def leaving(self, messages: Sequence[Message], opening: int) -> int:
        """The images outside of the window, where it slides by itself before a prompt."""
        return len(older_images(self._condense, messages, opening)) if self._before_prompts else 0


def older_images(spec: CondenseSpec | None, thread: Sequence[Message], opening: int) -> list[tuple[int, int]]:
    """The images that go when the window slides, oldest first: (number of the message in the thread, number of the
    part).

    `opening` messages precede the model's first reply.
    """
    if spec is None or spec.keep is None:
        return []
    small = spec.keep.pixels if spec.keep.older == "thumbnail" else 0
    counted = [
        (place, number)
        for place in range(0 if spec.opening else opening, len(thread))
        if thread[place].role in spec.roles and not isinstance(thread[place].content, str)
        for number, part in enumerate(thread[place].content)
        if isinstance(part, ImagePart) and (not part.width or not part.height or part.width * part.height > small)
    ]
    return counted[: -spec.keep.newest]


def slid(
    keep: WindowSpec, thread: Sequence[Message], older: Sequence[tuple[int, int]], bank: ImageBank
) -> list[Message]:
    """The thread without its older images; the other messages are the same objects. Raises: ImageError: the bank lacks
    one."""
    messages = list(thread)
    for place, number in reversed(older):
        content: list[Any] = list(messages[place].content)
        shown = content.pop(number)
        if keep.older == "text":
            content.insert(number, TextPart(text=keep.text))
        elif keep.older == "thumbnail":
            image = to_rgb(open_pixels(bank.source(shown.image).data))
            scale = sqrt(keep.pixels / (image.width * image.height))
            height = min(keep.pixels, max(1, int(image.height * scale)))
            width = min(keep.pixels // height, max(1, int(image.width * scale)))
            content.insert(number, image_part(image.resize((width, height))))
        messages[place] = replace(messages[place], content=content or "")
    return messages
