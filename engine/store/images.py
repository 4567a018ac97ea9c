"""Storage of images by content: the same image is stored once, under the digest of its bytes.

Invariant: the bytes of an image are stored unchanged and never encoded again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.errors import StoreError
from engine.schemas.base import Struct
from engine.tokens.images import EncodedImage, digest_of
from engine.tokens.pixels import open_file

if TYPE_CHECKING:
    from engine.store.reader import RunReader


class StoredImage(Struct, frozen=True, kw_only=True):
    """An encoded image."""

    digest: str
    """`sha256:<hex>` of `data`."""
    mime: str
    width: int
    height: int
    data: bytes
    """The file's bytes."""


def measure(data: bytes, mime: str | None = None) -> StoredImage:
    """Read an image's media type and size from its header; the pixels are not decoded. See
    `engine.tokens.pixels.FORMATS`.

    Raises:
        StoreError: the bytes are not an image in one of the formats, or the header claims too many pixels.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with open_file(data) as image:
                width, height = image.size
                kind = mime or Image.MIME.get(image.format or "", "application/octet-stream")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise StoreError(f"an image of {len(data)} bytes is not stored: {error}") from error
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise StoreError(
            f"{len(data)} bytes are not an image that can be read: {error}; give the bytes of a PNG, JPEG, WebP, GIF "
            "or BMP file"
        ) from error
    return StoredImage(digest=digest_of(data), mime=kind, width=width, height=height, data=data)


def stored_images(store: RunReader) -> Callable[[str], EncodedImage | None]:
    """Return a function that reads an image of a run store by its digest."""

    def fetch(digest: str) -> EncodedImage | None:
        try:
            image = store.image(digest)
        except StoreError:
            return None
        return EncodedImage(data=image.data, mime=image.mime)

    return fetch
