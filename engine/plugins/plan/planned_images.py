"""The row of a planned step: token ids, and blank images of a given size."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from engine.errors import ImageError, TrainError
from engine.schemas.trajectory import ImageSpan
from engine.store.rows.row import TrainingRow

if TYPE_CHECKING:
    from engine.tokens.vision import Vision

_LARGEST_SIDE = 4096
"""Pixels of the longest side that `largest_images` tries; the processors of models that ship scale images to less."""


class PlannedImages(NamedTuple):
    """The images of a micro-batch, all of one size."""

    number: int
    width: int
    """Pixels of an image as it is shown; the model's processor scales it."""
    height: int

    def __str__(self) -> str:
        return f"{self.number} image{'s' if self.number > 1 else ''} of {self.width} x {self.height} pixels"


def image_tokens(vision: Vision, images: PlannedImages) -> int:
    """Number of tokens that the images take in a row, with one token after each.

    Raises:
        TrainError: kind `train_setup`: the model's processor refuses an image of this size.
    """
    try:
        one = vision.processing.tokens_of_size(images.width, images.height)
    except ImageError as error:
        raise TrainError(f"images of the plan ({images}): {error}", kind="train_setup") from error
    return images.number * (1 + (len(_shown(vision, 0, images).ids) if one is None else one))


def largest_images(vision: Vision, count: int, tokens: int) -> PlannedImages:
    """`count` square images that take as many of `tokens` tokens as they can; the smallest ones if none fit."""

    def of(side: int) -> int:
        return image_tokens(vision, PlannedImages(count, side, side))

    most = min(_LARGEST_SIDE, int(vision.most_pixels**0.5))
    side = _largest(lambda side: of(side) <= tokens, most)
    taken = of(side)
    if taken <= tokens and of(1) < taken:
        side = _largest(lambda side: of(side) < taken, side) + 1  # larger ones are scaled down to this
    return PlannedImages(count, side, side)


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` for which it holds, if it holds for all smaller ones; 1 if there is none."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def planned_row(vision: Vision | None, vocabulary: int, tokens: int, images: PlannedImages | None) -> TrainingRow:
    """A row of which all tokens are trained but the first and those of images, which come after it.

    Args:
        vision: The model's images; None for a text model.
        vocabulary: Number of ids.
        tokens: Tokens of the row.
        images: Its images.
    """
    text = np.arange(vocabulary)
    pieces, placed, length = [text[:1]], [], 1
    if vision is not None:
        text = np.setdiff1d(text, vision.banned)
        for number in range(0 if images is None else images.number):
            assert images is not None
            picture = _shown(vision, number, images)
            pieces += [picture.ids, text[:1]]  # a model finds the images of a row by what is between them
            start, length = length, length + len(picture.ids) + 1
            placed.append(ImageSpan(image=picture.digest, start=start, end=length - 1, grid=list(picture.grid)))
    pieces.append(text[np.arange(tokens - length) % len(text)])
    return TrainingRow.of_tokens(np.concatenate(pieces), np.arange(tokens) >= length, images=placed)


def _shown(vision: Vision, number: int, images: PlannedImages) -> Any:
    """A blank image after the model's processor. Each number has a digest of its own, as different images have."""
    digest = f"planned:{images.width}x{images.height}:{number}"
    vision.bank.put(digest, _blank(images.width, images.height), "image/png")
    try:
        return vision.bank.picture(digest)
    except ImageError as error:
        raise TrainError(f"images of the plan ({images}): {error}", kind="train_setup") from error


def _blank(width: int, height: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()
