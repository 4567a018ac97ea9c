"""The window of images: which images of a thread it counts, and what stands for those that slide out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

from engine.plugins.condense.spec import CondenseSpec, WindowSpec
from engine.schemas.message import ImagePart, Message, TextPart, image_part
from engine.tokens.image_bank import ImageBank
from engine.tokens.images import open_pixels
from engine.tokens.pixels import to_rgb


def older_images(spec: CondenseSpec | None, thread: Sequence[Message], opening: int) -> list[tuple[int, int]]:
    """The images that go when the window slides, oldest first: (number of the message in the thread, number of the part).

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
    """The thread without its older images; the other messages are the same objects. Raises: ImageError: the bank lacks one."""
    messages = list(thread)
    for place, number in reversed(older):
        content: list[Any] = list(messages[place].content)
        shown = content.pop(number)
        if keep.older == "text":
            content.insert(number, TextPart(text=keep.text))
        elif keep.older == "thumbnail":
            content.insert(number, _thumbnail(bank.source(shown.image).data, keep.pixels))
        messages[place] = replace(messages[place], content=content or "")
    return messages


def _thumbnail(data: bytes, most: int) -> ImagePart:
    """An image in at most that many pixels."""
    image = to_rgb(open_pixels(data))
    scale = sqrt(most / (image.width * image.height))
    height = min(most, max(1, int(image.height * scale)))
    return image_part(image.resize((min(most // height, max(1, int(image.width * scale))), height)))
