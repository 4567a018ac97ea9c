"""Scaling of images to uint8 pixels, with Pillow alone: in this process, or in a worker process (`scale`), which
imports nothing else.

Invariant: the pixels are those that the image processors of transformers scale an image to (`convert_to_rgb`,
`resize`), before they rescale and normalise them. `vision_families.py` compares them with the model's own processor
before it relies on them.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.processes.worker import WithBytes

if TYPE_CHECKING:
    import numpy as np

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are read, by Pillow's names. Others are refused before they are opened: Pillow gives EPS to
Ghostscript."""
MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"})
"""Pillow's modes of pixels that `to_rgb` converts as transformers does."""


class Recipe(NamedTuple):
    """How an image becomes pixels."""

    sizes: tuple[tuple[int, int], ...]
    """(width, height) of each scaling, in order."""
    tile: int
    """0: one image. Else the side of the square tiles that a larger image is cut into; the whole image, scaled to one
    tile, follows."""
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


def scale(_: None, recipe: list[Any], image: bytes) -> WithBytes:
    """A job of a worker: the shape of an image's pixels, and the pixels."""
    sizes, tile, resample = recipe
    pixels = scaled_pixels(decode(image), Recipe(sizes=tuple(map(tuple, sizes)), tile=tile, resample=resample))
    return WithBytes(pixels.shape, pixels.tobytes())
