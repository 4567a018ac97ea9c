"""The window of images: which images of a thread it counts, and what stands for those that slide out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt

from engine.schemas.condense import CondenseSpec, LeaveOutSpec, TextSpec, ThumbnailSpec, WindowSpec
from engine.schemas.message import ContentPart, ImagePart, Message, TextPart, image_part
from engine.tokens.images import open_pixels
from engine.tokens.pixels import to_rgb


def counted_images(spec: CondenseSpec, thread: Sequence[Message], opening: int) -> list[tuple[int, int]]:
    """The images that the window counts, oldest first: (number of the message in the thread, number of the part).

    Args:
        spec: Which messages may be condensed, and which images are thumbnails.
        thread: The messages that the model is shown.
        opening: How many of them precede the model's first reply.
    """
    older = spec.keep.older if spec.keep is not None else None
    most = older.pixels if isinstance(older, ThumbnailSpec) else 0
    return [
        (place, number)
        for place in range(0 if spec.opening else opening, len(thread))
        if thread[place].role in spec.roles and not isinstance(thread[place].content, str)
        for number, part in enumerate(thread[place].content)
        if isinstance(part, ImagePart) and (not part.width or not part.height or part.width * part.height > most)
    ]


def with_parts(message: Message, parts: Mapping[int, ContentPart | None]) -> Message:
    """A message with other parts, by their number; None leaves a part out."""
    content = [parts.get(number, part) for number, part in enumerate(message.content)]
    return replace(message, content=[part for part in content if part is not None] or "")


def part_for(keep: WindowSpec, data: bytes) -> ContentPart | None:
    """What stands for an older image; None for nothing.

    Args:
        keep: The window.
        data: The encoded image.

    Raises:
        ImageError: it cannot be decoded.
    """
    match keep.older:
        case LeaveOutSpec():
            return None
        case TextSpec(text=text):
            return TextPart(text=text)
        case ThumbnailSpec(pixels=most):
            image = to_rgb(open_pixels(data))
            scale = sqrt(most / (image.width * image.height))
            height = min(most, max(1, int(image.height * scale)))
            return image_part(image.resize((min(most // height, max(1, int(image.width * scale))), height)))
