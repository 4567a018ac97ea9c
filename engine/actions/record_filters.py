"""What records pass before they are stored: long texts are cut, services filter, and digests replace images.

Invariant: journals and conversations have only digests, and texts as the model is shown them, so resume and replay cut
nothing and store nothing. An image that cannot be used fails the action that returned it, with a kind and a blame,
before the record has any effect.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from typing import TYPE_CHECKING

from engine.actions.action_facts import rooms_of
from engine.actions.services import EpisodeService
from engine.errors import EngineError, ImageError, RenderError, SpecCodeError
from engine.schemas.journal import Record, ResetRecord, StepRecord, ToolsRecord, UserRecord
from engine.schemas.message import ContentPart, ImagePart, Message, TextPart
from engine.store.images import measure
from engine.tokens.images import DIGEST, EncodedImage, digest_of, measure_pixels, read_reference

if TYPE_CHECKING:
    from engine.episode.episode import Episode
    from engine.schemas.episode import EpisodeSpec
    from engine.schemas.limits import LimitsSpec
    from engine.schemas.trajectory import Blame
    from engine.store.store import RunStore
    from engine.tokens.template import ChatTemplate
    from engine.tokens.vision import Vision


CHARACTERS = "{{characters}}"
"""In the mark: how many characters are left out."""

Content = str | list[ContentPart]
_ANSWERS = (ResetRecord, StepRecord, ToolsRecord, UserRecord)
"""Records of the core that have messages."""


class TextCutter:
    """Cuts the texts of records to `limits.tool_result_tokens`: of a longer text, at most that many tokens are shown,
    the mark included.

    A text is tokenised only up to the length that the limit can hold, so a text of 100 MB costs no more than a short
    one.

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
            words = (
                f"`limits.tool_result_mark` has more than `limits.tool_result_tokens: {self._most}` tokens; shorten it"
            )
            raise EngineError(words, kind="bad_limit", blame="spec")

    def cut(self, record: Record) -> Record:
        """The record with its texts cut; the same object if none is too long."""
        if not isinstance(record, _ANSWERS):
            return record
        said, first = record.said(), _of_spec(record)
        cut = [*said[:first], *map(self._message, said[first:])]
        return record if all(map(is_, cut, said)) else record.with_said(cut)

    def _message(self, message: Message) -> Message:
        content = self.content(message.content)
        return message if content is message.content else replace(message, content=content)

    def content(self, content: Content) -> Content:
        """A content with at most the limit's tokens of text; images stay."""
        if not isinstance(content, str | list):
            return content  # refused later, as any content that is no text
        text = content if isinstance(content, str) else "".join(p.text for p in content if isinstance(p, TextPart))
        head, tail = self._kept(text)
        if head + tail >= len(text):
            return content
        if isinstance(content, str):
            return self._shown(text, head, tail)
        parts: list[ContentPart] = []
        at, marked = 0, False
        for part in content:
            if not isinstance(part, TextPart):
                parts.append(part)
                continue
            end = at + len(part.text)
            first = part.text[: max(0, head - at)]
            last = part.text[max(0, len(text) - tail - at) :] if end > len(text) - tail else ""
            mark = "" if marked or end <= head else self._marked(len(text) - head - tail)
            marked = marked or bool(mark)
            if first + mark + last:
                parts.append(part.model_copy(update={"text": first + mark + last}))
            at = end
        return parts

    def _kept(self, text: str) -> tuple[int, int]:
        """How many characters of the beginning and of the end are shown; together all of them if the text is short
        enough."""
        try:
            if len(text) * 4 <= self._most or len(text.encode()) <= self._most:  # a token is at least one byte
                return len(text), 0
        except UnicodeEncodeError:  # no text: refused when it is recorded
            return len(text), 0
        if len(text) <= self._most * self._template.fast.longest and self._count(text) <= self._most:
            return len(text), 0
        longest = min(len(text) - 1, self._most * self._template.fast.longest)
        fitting = bisect_left(range(1, longest + 1), True, key=lambda characters: not self._fits(text, characters))
        while fitting and not self._fits(text, fitting):  # more characters may have fewer tokens
            fitting -= 1
        return self._split(fitting)

    def _split(self, characters: int) -> tuple[int, int]:
        head = {"start": characters, "end": 0, "both": (characters + 1) // 2}[self._keep]
        return head, characters - head

    def _fits(self, text: str, characters: int) -> bool:
        head, tail = self._split(characters)
        return self._count(self._shown(text, head, tail)) <= self._most

    def _shown(self, text: str, head: int, tail: int) -> str:
        return text[:head] + self._marked(len(text) - head - tail) + text[len(text) - tail :]

    def _marked(self, characters: int) -> str:
        return self._mark.replace(CHARACTERS, f"{characters:,}")

    def _count(self, text: str) -> int:
        """Tokens of a text as a conversation has it: special tokens that it spells are plain text."""
        return len(
            self._template.encode(text if self._template.allow_special else self._template.fast.quoting.quote(text))
        )


def _of_spec(record: Record) -> int:
    """How many of the messages of a record, the first ones, are the spec's."""
    return len(record.prompt or ()) if isinstance(record, ResetRecord) else 0


@dataclass(eq=False)
class MemoryImages:
    """Keeps images in memory, for use without a run store."""

    sources: dict[str, EncodedImage] = field(default_factory=dict)
    """By digest."""

    async def put_image(self, data: bytes, mime: str | None = None) -> ImagePart:
        """See `RunStore.put_image`."""
        image = measure(data, mime)
        self.sources[image.digest] = EncodedImage(data=data, mime=image.mime)
        return ImagePart(image=image.digest, mime=image.mime, width=image.width, height=image.height)


def in_memory(messages: Sequence[Message], vision: Vision) -> list[Message]:
    """Messages with digests instead of images, whose bytes are kept in memory only: for prompts that are not recorded.

    Raises:
        ImageError: An image cannot be read or is too large.
    """
    return [
        replace(message, content=[_in_memory(part, vision) for part in message.content])
        if isinstance(message.content, list) and not all(part.image.startswith(DIGEST) for part in message.images)
        else message
        for message in messages
    ]


def _in_memory(part: ContentPart, vision: Vision) -> ContentPart:
    if not isinstance(part, ImagePart) or part.image.startswith(DIGEST):
        return part
    data = _read(part, vision, "environment")
    digest = digest_of(data)
    vision.bank.put(digest, data, part.mime or "application/octet-stream")
    return ImagePart(image=digest, mime=part.mime)


def _read(part: ImagePart, vision: Vision, blame: Blame) -> bytes:
    data = read_reference(part, blame)
    measure_pixels(data, vision.most_pixels, blame)
    return data


class ImageStorer:
    """Stores the images of one run's records in `store` and puts their digests in the records; `fetch` returns a stored
    image."""

    def __init__(
        self,
        template: ChatTemplate,
        store: RunStore | MemoryImages,
        fetch: Callable[[str], EncodedImage | None],
        spec: EpisodeSpec,
    ) -> None:
        self._rooms = rooms_of(spec, template)
        self._refusal = f"the chat format {template.name!r} shows no images; {template.no_vision_fix}"
        self._vision = template.vision
        self._allow_special = template.allow_special
        self._store = store
        self._taken: dict[str, ImagePart] = {}
        if self._vision is not None:
            self._vision.bank.read_from(fetch)

    def filter(self, episode: Episode, record: Record) -> Record | Awaitable[Record]:
        """Return the record with digests instead of images; see `EpisodeService.filter`.

        Raises:
            ImageError: An image cannot be used, there are too many, or a text contains a placeholder.
            RenderError: The model has no vision.
        """
        if self._vision is None and all(isinstance(message.content, str) for message in record.said()):
            return record
        return self._with_digests(episode, record)

    async def _with_digests(self, episode: Episode, record: Record) -> Record:
        said, first = record.said(), _of_spec(record)
        stored = [
            await self._message(message, "spec" if at < first else record.blame) for at, message in enumerate(said)
        ]
        if all(map(is_, stored, said)):
            return record
        most = self._vision.most_images if self._vision is not None else None
        if most is not None and isinstance(record, _ANSWERS):
            conversation = episode.conversation
            thread = [*conversation.thread.messages, *stored]
            opening = len(thread) if episode.turn < 0 else conversation.opening
            count = sum(len(message.images) for message in thread)
            count -= sum(room.leaving(thread, opening) for room in self._rooms)  # they go before the next prompt
            if count > most:
                raise ImageError(
                    f"the conversation would hold {count} images; the model takes {most} (model.max_images): "
                    "show fewer",
                    kind="too_many_images",
                    blame=record.blame,
                )
        return record.with_said(stored)

    async def _message(self, message: Message, blame: Blame) -> Message:
        """The message with digests in place of images; the same object if it has no image."""
        content = message.content
        checked = self._vision if self._allow_special else None
        if isinstance(content, str):
            if checked is not None:
                checked.check_text(content, blame)
            return message
        if not isinstance(content, list) or not all(isinstance(part, TextPart | ImagePart) for part in content):
            raise SpecCodeError("content must be a string or a list of parts", blame=blame, kind="not_json")
        if checked is not None:
            for part in content:
                if isinstance(part, TextPart):
                    checked.check_text(part.text, blame)
        if not any(isinstance(part, ImagePart) for part in content):
            return message
        parts = [await self._part(part, blame) if isinstance(part, ImagePart) else part for part in content]
        return replace(message, content=parts)

    async def _part(self, part: ImagePart, blame: Blame) -> ImagePart:
        vision = self._vision
        if vision is None:
            raise RenderError(self._refusal)
        try:
            if not part.image.startswith(DIGEST):
                data = await asyncio.to_thread(_read, part, vision, blame)
                stored = await self._store.put_image(data, part.mime)
                vision.bank.put(stored.image, data, stored.mime or "application/octet-stream")
            elif (taken := self._taken.get(part.image)) is not None:
                stored = taken
            else:
                source = await asyncio.to_thread(vision.bank.source, part.image)
                width, height = measure_pixels(source.data, vision.most_pixels, "environment")
                stored = ImagePart(image=part.image, mime=source.mime, width=width, height=height)
            if stored.image not in self._taken:  # processed here, so that `apply` finds the result
                await asyncio.to_thread(vision.bank.picture, stored.image)
        except ImageError as error:
            if error.blame == "environment":
                error.blame = blame
            raise
        self._taken[stored.image] = stored
        return stored


Filter = Callable[["Episode", "Record"], "Record | Awaitable[Record]"]
"""See `EpisodeService.filter`."""


def record_filters(
    spec: EpisodeSpec, template: ChatTemplate, services: Sequence[EpisodeService], images: ImageStorer
) -> tuple[list[Filter], bool]:
    """What records pass before they are stored: filters, of which each gets what the one before it returned, and
    whether one of them may change or refuse a plain text."""
    filters: list[Filter] = []
    if spec.limits.tool_result_tokens is not None:
        cutter = TextCutter(spec.limits, template)
        filters.append(lambda _, record: cutter.cut(record))
    filters += [service.filter for service in services if type(service).filter is not EpisodeService.filter]
    texts = bool(filters) or (template.vision is not None and template.allow_special)
    return [*filters, images.filter], texts
