"""The window of images: which images of a thread it counts, and what stands for those that slide out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt

from engine.schemas.condense import CondenseSpec
from engine.schemas.message import ContentPart, ImagePart, Message, TextPart, image_part
from engine.tokens.images import open_pixels
from engine.tokens.pixels import to_rgb


def counted_images(spec: CondenseSpec, thread: Sequence[Message], opening: int) -> list[tuple[int, int]]:
    """The images that the window counts, oldest first: (number of the message in the thread, number of the part).

    `opening` messages precede the model's first reply.
    """
    keep = spec.keep
    small = keep.pixels if keep is not None and keep.older == "thumbnail" else 0
    return [
        (place, number)
        for place in range(0 if spec.opening else opening, len(thread))
        if thread[place].role in spec.roles and not isinstance(thread[place].content, str)
        for number, part in enumerate(thread[place].content)
        if isinstance(part, ImagePart) and (not part.width or not part.height or part.width * part.height > small)
    ]


def slid(spec: CondenseSpec, thread: Sequence[Message], opening: int, data_of: Callable[[str], bytes]) -> list[Message]:
    """The thread in which only the newest images stay; messages without older ones are the same objects.

    `data_of` gives an image's bytes by its digest. Raises: ImageError: it has none, or they cannot be decoded.
    """
    keep, messages = spec.keep, list(thread)
    assert keep is not None
    older = set(counted_images(spec, thread, opening)[: -keep.newest])
    for place in {place for place, _ in older}:
        content, parts = thread[place].content, list[ContentPart]()
        assert not isinstance(content, str)
        for number, part in enumerate(content):
            if not isinstance(part, ImagePart) or (place, number) not in older:
                parts.append(part)
            elif keep.older == "text":
                parts.append(TextPart(text=keep.text))
            elif keep.older == "thumbnail":
                parts.append(_thumbnail(data_of(part.image), keep.pixels))
        messages[place] = replace(thread[place], content=parts or "")
    return messages


def _thumbnail(data: bytes, most: int) -> ImagePart:
    """An image in at most that many pixels."""
    image = to_rgb(open_pixels(data))
    scale = sqrt(most / (image.width * image.height))
    height = min(most, max(1, int(image.height * scale)))
    return image_part(image.resize((min(most // height, max(1, int(image.width * scale))), height)))
