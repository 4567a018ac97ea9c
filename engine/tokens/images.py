"""A reference to an image -> its bytes, its size, and what the image processor makes of it.

Only images of prompts are downloaded, once an episode, when it begins: their URLs are the spec's and its rows'. What a
tool, an environment or a user says may repeat the policy's words, so its URLs are never requested.
"""

from __future__ import annotations

import binascii
import os
import stat
import time
import warnings
from base64 import b64decode
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit
from urllib.request import url2pathname

import numpy as np

from engine.errors import ImageError
from engine.schemas.base import Struct
from engine.tokens.pixels import decode, open_file

if TYPE_CHECKING:
    from engine.schemas.message import ImagePart
    from engine.schemas.trajectory import Blame
    from engine.tokens.tape import IntVector

DIGEST = "sha256:"
"""Beginning of a reference to a stored image."""
MAX_BYTES = 1 << 28
"""Largest size of one encoded image, in bytes."""
_NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)

Tensors = dict[str, np.ndarray]
"""Inputs of the model's forward pass for one image, by name."""


class ProcessedImage(Struct, frozen=True, kw_only=True):
    """One image after the image processor: the tokens that the tape holds for it."""

    digest: str
    ids: IntVector
    """Its tokens: placeholders, and the tokens that the family puts around them. int32 [tokens]"""
    placeholders: int
    """How many of `ids` are replaced by features of the vision tower."""
    grid: tuple[int, ...]
    """See `ImageSpan.grid`."""


class EncodedImage(Struct, frozen=True, kw_only=True):
    """An encoded image."""

    data: bytes
    mime: str


def digest_of(data: bytes) -> str:
    """`sha256:<hex>` of an image's bytes: its name in the store."""
    return f"{DIGEST}{sha256(data).hexdigest()}"


def read_reference(part: ImagePart, blame: Blame) -> bytes:
    """The bytes that an image part refers to by path, `file://` or `data:` URI; in a prompt (blame `spec`) also by URL.

    Raises:
        ImageError: It cannot be read (kind `image_unreadable`), or it is empty (`image_empty`).
    """
    reference = part.image
    try:
        if reference.startswith("data:"):
            head, comma, body = reference[5:].partition(",")
            if not comma:
                raise ValueError("a data: URI needs a comma between its media type and its data")
            if len(body) > MAX_BYTES // 3 * 4:
                raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB")
            data = b64decode(body, validate=True) if head.endswith(";base64") else unquote_to_bytes(body)
        elif blame == "spec" and reference.startswith(("http://", "https://")):
            data = _downloaded(reference)
        elif "://" in reference and not reference.startswith("file://"):
            raise ValueError("images are given by path, file:// or data: URI; download it, and give its bytes")
        else:
            path = Path(url2pathname(unquote(urlsplit(reference).path)) if "://" in reference else reference)
            data = _read_file(path)
    except (OSError, ValueError, binascii.Error) as error:
        shown = reference if len(reference) <= 120 else f"{reference[:100]}…"
        raise ImageError(f"the image {shown} cannot be read: {error}", kind="image_unreadable", blame=blame) from error
    if not data:
        raise ImageError("an image of no bytes was shown", kind="image_empty", blame=blame)
    return data


def _read_file(path: Path) -> bytes:
    """A regular file's bytes. A device or a pipe may have no end, and opening one may block forever.

    Raises:
        OSError: It cannot be opened.
        ValueError: It is not a regular file, or too large.
    """
    with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | _NO_WAIT)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        pieces, room = [], MAX_BYTES
        while piece := file.read(min(room + 1, 1 << 20)):  # the reported size is not used: it is 0 for files in /proc
            room -= len(piece)
            if room < 0:
                raise ValueError(f"the file is larger than {MAX_BYTES >> 20} MiB")
            pieces.append(piece)
    return b"".join(pieces)


def measure_pixels(data: bytes, most: int, blame: Blame) -> tuple[int, int]:
    """Width and height in pixels, read from the image's header.

    Raises:
        ImageError: It is not a readable image (kind `image_unreadable`), has no pixels (`image_empty`) or more than
            `most` (`image_too_large`).
    """
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with open_file(data) as image:
                width, height = image.size
    except Image.DecompressionBombError as error:
        raise ImageError(f"an image is too large: {error}", kind="image_too_large", blame=blame) from error
    except Exception as error:
        raise ImageError(
            f"{len(data)} bytes cannot be read as an image: {error}", kind="image_unreadable", blame=blame
        ) from error
    if width < 1 or height < 1:
        raise ImageError(f"an image of {width} x {height} pixels was shown", kind="image_empty", blame=blame)
    if width * height > most:
        raise ImageError(
            f"an image of {width} x {height} pixels was shown; the spec takes at most {most} "
            "(model.max_image_pixels): scale it down, or raise that",
            kind="image_too_large",
            blame=blame,
        )
    return width, height


def open_pixels(data: bytes) -> Any:
    """The decoded image, as a `PIL.Image`.

    Raises:
        ImageError: It cannot be decoded (kind `image_unreadable`), for example because it is truncated.
    """
    try:
        return decode(data)
    except Exception as error:
        raise ImageError(f"an image cannot be decoded: {error}", kind="image_unreadable") from error


_SECONDS = 30.0
"""Time to connect, and time between two pieces of the body."""
_ATTEMPTS = 3
"""How often an image is requested, if the server fails (5xx, 429) or the connection breaks."""
_REDIRECTS = 5


def _downloaded(url: str) -> bytes:
    """The body of a URL. Raises: ValueError: the server refuses, fails `_ATTEMPTS` times, or sends too much."""
    import httpx

    problem = ""
    with httpx.Client(timeout=_SECONDS, follow_redirects=True, max_redirects=_REDIRECTS) as client:
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(0.25 * 2**attempt)
            try:
                with client.stream("GET", url) as reply:
                    if reply.status_code == 200:
                        body = bytearray()
                        for piece in reply.iter_bytes():
                            body += piece
                            if len(body) > MAX_BYTES:
                                raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB")
                        return bytes(body)
                    problem = f"the server replies {reply.status_code} {reply.reason_phrase}".rstrip()
                    if reply.status_code < 500 and reply.status_code != 429:
                        break
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problem = f"{type(error).__name__}: {error}"
    raise ValueError(problem)
