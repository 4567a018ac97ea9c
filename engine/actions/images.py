"""Stores the images of records in the run store and replaces them by digests, before the record is stored.

Invariant: journals and conversations have only digests. An image that cannot be used fails the action that returned
it, with a kind and a blame, before the record has any effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from engine.actions.room import rooms_of
from engine.errors import ImageError, RenderError, SpecCodeError
from engine.schemas.journal import (
    Record,
    ResetRecord,
    StepRecord,
    ToolsRecord,
    UserRecord,
)
from engine.schemas.message import ContentPart, ImagePart, Message, TextPart, ToolResult
from engine.store.images import measure
from engine.tokens.images import DIGEST, Source, digest_of, measure_pixels, read_reference

if TYPE_CHECKING:
    from engine.episode.episode import Episode
    from engine.schemas.episode import EpisodeSpec
    from engine.schemas.trajectory import Blame
    from engine.tokens.template import ChatTemplate
    from engine.tokens.vision import Vision
Content = str | list[ContentPart]


def _in_parts(record: Record) -> bool:
    """Return whether a record has content that is not only text."""
    if isinstance(record, UserRecord):
        return not isinstance(record.turn.content, str)
    texts: Sequence[ToolResult | Message]
    if isinstance(record, ToolsRecord):
        texts = record.results
    elif isinstance(record, ResetRecord):
        texts = [*(record.prompt or ()), *record.reset.messages]
    elif isinstance(record, StepRecord):
        texts = record.step.messages
    else:
        texts = record.said()
    for text in texts:  # noqa: SIM110  (`any` over one result costs two calls at each turn)
        if not isinstance(text.content, str):
            return True
    return False


class ImageStore(Protocol):
    """The part of a run store that is needed here."""

    async def put_image(self, data: bytes, mime: str | None = None) -> ImagePart: ...


class MemoryImages:
    """Keeps images in memory, for use without a run store."""

    def __init__(self) -> None:
        self._kept: dict[str, Source] = {}

    async def put_image(self, data: bytes, mime: str | None = None) -> ImagePart:
        """See `RunStore.put_image`."""
        image = measure(data, mime)
        self._kept[image.digest] = Source(data=data, mime=image.mime)
        return ImagePart(image=image.digest, mime=image.mime, width=image.width, height=image.height)

    def fetch(self, digest: str) -> Source | None:
        """Return an image by its digest."""
        return self._kept.get(digest)


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
    data = read_reference(part, "environment")
    measure_pixels(data, vision.most_pixels, "environment")
    digest = digest_of(data)
    vision.bank.put(digest, data, part.mime or "application/octet-stream")
    return ImagePart(image=digest, mime=part.mime)


class ImageStorer:
    """Stores the images of one run's records and puts their digests in the records.

    Args:
        template: The run's chat format: whether it has images, and their maximum size.
        store: The store for images.
        fetch: Returns a stored image by its digest.
        spec: The spec: whether an action makes room before a prompt.
    """

    def __init__(
        self, template: ChatTemplate, store: ImageStore, fetch: Callable[[str], Source | None], spec: EpisodeSpec
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
        return record if self._vision is None and not _in_parts(record) else self._with_digests(episode, record)

    async def _with_digests(self, episode: Episode, record: Record) -> Record:
        if isinstance(record, ResetRecord):
            spec = await self._messages(record.prompt or (), "spec", episode)
            own = await self._messages(record.reset.messages, "environment", episode)
            if spec is None and own is None:
                return self._counted(record, episode, record.prompt or (), record.reset.messages)
            reset = record.reset if own is None else record.reset.model_copy(update={"messages": own})
            stored = replace(record, prompt=record.prompt if spec is None else spec, reset=reset)
            return self._counted(stored, episode, stored.prompt or (), stored.reset.messages)
        if isinstance(record, StepRecord):
            messages = await self._messages(record.step.messages, "environment", episode)
            if messages is None:
                return record
            stored_step = record.step.model_copy(update={"messages": messages})
            return self._counted(replace(record, step=stored_step), episode, messages)
        if isinstance(record, ToolsRecord):
            contents = [await self._content(result.content, "tool", episode) for result in record.results]
            if all(content is None for content in contents):
                return record
            results = [
                result if content is None else replace(result, content=content)
                for result, content in zip(record.results, contents, strict=True)
            ]
            said = [Message(role="tool", content=result.content) for result in results]
            return self._counted(replace(record, results=results), episode, said)
        if isinstance(record, UserRecord) and record.turn.content is not None:
            content = await self._content(record.turn.content, "user", episode)
            if content is None:
                return record
            stored_turn = record.turn.model_copy(update={"content": content})
            said = [Message(role="user", content=content)]
            return self._counted(replace(record, turn=stored_turn), episode, said)
        own = await self._messages(record.said(), "environment", episode)
        return record if own is None else record.with_said(own)

    def _counted(self, record: Record, episode: Episode, *said: Sequence[Message]) -> Record:
        """Check that there are not more images than the model takes, without those that go before the next prompt."""
        most = self._vision.most_images if self._vision is not None else None
        if most is None:
            return record
        conversation = episode.conversation
        thread = [*conversation.shown, *(message for part in said for message in part)]
        opening = len(thread) if episode.turn < 0 else conversation.opening
        count = sum(len(message.images) for message in thread)
        count -= sum(room.leaving(thread, opening) for room in self._rooms)
        if count > most:
            raise ImageError(
                f"the conversation would hold {count} images; the model takes {most} (model.max_images): show fewer",
                kind="too_many_images",
                blame=_BLAMES.get(record.kind, "environment"),
            )
        return record

    async def _messages(self, messages: Sequence[Message], blame: Blame, episode: Episode) -> list[Message] | None:
        """Return the messages with digests; None if nothing changes."""
        contents = [await self._content(message.content, blame, episode) for message in messages]
        if all(content is None for content in contents):
            return None
        return [
            message if content is None else replace(message, content=content)
            for message, content in zip(messages, contents, strict=True)
        ]

    async def _content(self, content: Content, blame: Blame, episode: Episode) -> list[ContentPart] | None:
        """Return the parts with digests; None if there is no image."""
        if isinstance(content, str):
            if self._vision is not None and self._allow_special:
                self._vision.check_text(content, blame)
            return None
        if not isinstance(content, list) or not all(isinstance(part, TextPart | ImagePart) for part in content):
            raise SpecCodeError("content must be a string or a list of parts", blame=blame, kind="not_json")
        if self._vision is not None and self._allow_special:
            for part in content:
                if not isinstance(part, ImagePart):
                    self._vision.check_text(part.text, blame)
        if not any(isinstance(part, ImagePart) for part in content):
            return None
        return [await self._part(part, blame) if isinstance(part, ImagePart) else part for part in content]

    async def _part(self, part: ImagePart, blame: Blame) -> ImagePart:
        vision = self._vision
        if vision is None:
            raise RenderError(self._refusal)
        try:
            if part.image.startswith(DIGEST):
                known = self._taken.get(part.image) or await self._known(vision, part.image)
            else:
                data = await asyncio.to_thread(self._read, vision, part, blame)
                known = await self._store.put_image(data, part.mime)
                vision.bank.put(known.image, data, known.mime or "application/octet-stream")
            if known.image not in self._taken:
                await asyncio.to_thread(
                    vision.bank.picture, known.image
                )  # processed here, so that `apply` finds the result
        except ImageError as error:
            if error.blame == "environment":
                error.blame = blame
            raise
        self._taken[known.image] = known
        return known

    @staticmethod
    async def _known(vision: Vision, digest: str) -> ImagePart:
        source = await asyncio.to_thread(vision.bank.source, digest)
        width, height = measure_pixels(source.data, vision.most_pixels, "environment")
        return ImagePart(image=digest, mime=source.mime, width=width, height=height)

    @staticmethod
    def _read(vision: Vision, part: ImagePart, blame: Blame) -> bytes:
        data = read_reference(part, blame)
        measure_pixels(data, vision.most_pixels, blame)
        return data


_BLAMES: dict[str, Blame] = {"reset": "environment", "step": "environment", "tools": "tool", "user": "user"}
