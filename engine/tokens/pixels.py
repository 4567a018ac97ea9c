"""Scaling of images to uint8 pixels, with Pillow alone: in this process, or as a worker process that imports nothing else.

Invariant: the pixels are those that the image processors of transformers scale an image to (`convert_to_rgb`, `resize`), before they
rescale and normalise them. `vision_families.py` compares them with the model's own processor before it relies on them.

As a program, this module reads jobs from its input and writes pixels to its output until the input ends. A job is a line of JSON,
`{"bytes": …, "recipe": …}`, and the image's bytes; its answer is a line, `{"shape": …}` or `{"error": …}`, and the pixels.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are read, by Pillow's names. Others are refused before they are opened: Pillow gives EPS to Ghostscript."""
MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"})
"""Pillow's modes of pixels that `to_rgb` converts as transformers does."""


class Recipe(NamedTuple):
    """How an image becomes pixels."""

    sizes: tuple[tuple[int, int], ...]
    """(width, height) of each scaling, in order."""
    tile: int
    """0: one image. Else the side of the square tiles that a larger image is cut into; the whole image, scaled to one tile, follows."""
    resample: int
    """Pillow's filter."""


def open_file(data: bytes) -> Any:
    """The image as a `PIL.Image` that the caller closes: its header is read, its pixels are not decoded.

    Raises:
        Exception: Whatever Pillow raises; `PIL.UnidentifiedImageError` for a format that is not in `FORMATS`.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise UnidentifiedImageError(f"neither {', '.join(FORMATS[:-1])} nor {FORMATS[-1]}") from None


def decode(data: bytes) -> Any:
    """The image as a `PIL.Image`, decoded. Raises: Exception: whatever Pillow raises."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        image = open_file(data)
        image.load()
    return image


def to_rgb(image: Any) -> Any:
    """The image in RGB; transparent pixels are shown on white, as transformers does."""
    from PIL import Image

    if image.mode == "RGB" and image.info.get("transparency") is None:
        return image
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, (255, 255, 255, 255)), rgba).convert("RGB")
    return image.convert("RGB")


def scaled_pixels(image: Any, recipe: Recipe) -> np.ndarray:
    """The pixels of a decoded image, uint8 [tiles, height, width, 3]."""
    import numpy as np

    image = to_rgb(image)
    for size in recipe.sizes:
        image = image.resize(size, resample=recipe.resample)
    tile = recipe.tile
    if not tile or (image.width <= tile and image.height <= tile):
        return np.asarray(image)[None]
    pieces = [
        image.crop((left, top, left + tile, top + tile))
        for top in range(0, image.height, tile)
        for left in range(0, image.width, tile)
    ]
    return np.stack([np.asarray(piece) for piece in (*pieces, image.resize((tile, tile), resample=recipe.resample))])


def main() -> None:
    """Answer jobs until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides when it ends
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while line := sys.stdin.buffer.readline():
        job = json.loads(line)
        data = sys.stdin.buffer.read(job["bytes"])
        sizes, tile, resample = job["recipe"]
        try:
            pixels = scaled_pixels(decode(data), Recipe(sizes=tuple(map(tuple, sizes)), tile=tile, resample=resample))
        except Exception as error:  # noqa: BLE001 - the process that asked makes these pixels itself, and raises it
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        else:
            answers.write(json.dumps({"shape": pixels.shape}).encode() + b"\n")
            answers.write(pixels.data.cast("B") if pixels.flags.c_contiguous else pixels.tobytes())
        answers.flush()


if __name__ == "__main__":
    main()
