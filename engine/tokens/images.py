"""Images of a run, by digest: their bytes, and the result of the model's image processor.

Invariant: the processor runs once per image, however many turns and episodes show it: the result is kept under the digest of
the image's bytes. The tensors are large, so the oldest are dropped when they exceed their memory limit. They are then, and in
other processes, computed again from the stored bytes, and must have the same shape.
"""

from __future__ import annotations

import binascii
import io
import os
import stat
import threading
import warnings
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from urllib.parse import unquote, unquote_to_bytes, urlsplit
from urllib.request import url2pathname

import numpy as np

from engine.errors import ImageError
from engine.tokens.download import download

if TYPE_CHECKING:
    from engine.schemas.message import ImagePart
    from engine.schemas.trajectory import Blame
    from engine.tokens.tape import IntVector

DIGEST = "sha256:"
"""Beginning of a reference to a stored image."""
MAX_BYTES = 1 << 28
"""Largest size of one encoded image, in bytes."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are read, by Pillow's names. Others are refused before they are opened: Pillow gives EPS to Ghostscript."""

_NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)

T = TypeVar("T")
Tensors = dict[str, np.ndarray]
"""Inputs of the model's forward pass for one image, by name."""


class ProcessedImage(NamedTuple):
    """One image after the image processor: the tokens that the tape holds for it."""

    digest: str
    ids: IntVector
    """Its tokens: placeholders, and the tokens that the family puts around them. int32 [tokens]"""
    placeholders: int
    """How many of `ids` are replaced by features of the vision tower."""
    grid: tuple[int, ...]
    """See `ImageSpan.grid`."""


class Source(NamedTuple):
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
            data = download(reference, MAX_BYTES)
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


def open_image(data: bytes) -> Any:
    """The image as a `PIL.Image` that the caller closes: its header is read, its pixels are not decoded.

    Raises:
        Exception: Whatever Pillow raises; `PIL.UnidentifiedImageError` for a format that is not in `FORMATS`.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise UnidentifiedImageError(f"neither {', '.join(FORMATS[:-1])} nor {FORMATS[-1]}") from None


def measure_pixels(data: bytes, most: int, blame: Blame) -> tuple[int, int]:
    """Width and height in pixels, read from the image's header.

    Raises:
        ImageError: It is not a readable image (kind `image_unreadable`), has no pixels (`image_empty`) or more than `most`
            (`image_too_large`).
    """
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with open_image(data) as image:
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
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = open_image(data)
            image.load()
    except Exception as error:
        raise ImageError(f"an image cannot be decoded: {error}", kind="image_unreadable") from error
    return image


class ImageBank:
    """The images of a run and the results of their processing. Shared by all episodes; safe to call from several threads.

    Args:
        process: (digest, bytes) -> the processed image and its tensors.
        scale: Digest -> a PNG of the pixels that the processor scales the image to.
        tensor_bytes: Memory limit for tensors, in bytes.
        source_bytes: Memory limit for encoded images, in bytes.
    """

    def __init__(
        self,
        process: Callable[[str, bytes], tuple[ProcessedImage, Tensors]],
        *,
        scale: Callable[[str], bytes] | None = None,
        tensor_bytes: int = 1 << 30,
        source_bytes: int = 1 << 28,
    ) -> None:
        self._process = process
        self._scale = scale
        self._pictures: dict[str, ProcessedImage] = {}
        self._tensors: _RecentlyUsed[Tensors] = _RecentlyUsed(tensor_bytes)
        self._sources: _RecentlyUsed[Source] = _RecentlyUsed(source_bytes)
        self._uris: _RecentlyUsed[str] = _RecentlyUsed(source_bytes)
        self._scaled: _RecentlyUsed[str] = _RecentlyUsed(source_bytes)
        self._fetch: Callable[[str], Source | None] | None = None
        self._made: Callable[[str], Tensors | None] | None = None
        self._lock = threading.Lock()
        self._busy: dict[str, threading.Lock] = {}
        self.processed = 0
        """How many times the processor was called."""

    def read_from(self, fetch: Callable[[str], Source | None]) -> None:
        """Set where images that are not in memory are read from: a run store, by digest."""
        self._fetch = fetch

    def read_tensors_from(self, made: Callable[[str], Tensors | None]) -> None:
        """Set where tensors that were computed before are read from: the files beside exported rows, by digest.

        The tensors have the shapes that `VisionFamily.process` gave them.
        """
        self._made = made

    def put(self, digest: str, data: bytes, mime: str) -> None:
        """Keep an image's bytes in memory."""
        with self._lock:
            self._sources.put(digest, Source(data, mime), len(data))

    def source(self, digest: str) -> Source:
        """An image's bytes.

        Raises:
            ImageError: It is neither in memory nor in the store (kind `image_missing`).
        """
        with self._lock:
            found = self._sources.get(digest)
        if found is None and self._fetch is not None:
            found = self._fetch(digest)
        if found is None:
            raise ImageError(f"the image {digest} is not in the run store", kind="image_missing", blame="engine")
        self.put(digest, *found)
        return found

    def data_uri(self, digest: str) -> str:
        """An image as a `data:` URI; encoded once.

        Raises:
            ImageError: As in `source`.
        """
        with self._lock:
            found = self._uris.get(digest)
        if found is None:
            data, mime = self.source(digest)
            found = f"data:{mime};base64,{b64encode(data).decode()}"
            with self._lock:
                self._uris.put(digest, found, len(found))
        return found

    def scaled_uri(self, digest: str) -> str:
        """An image as the processor scales it, as a PNG `data:` URI; encoded once. See `Vision.scaled`.

        Raises:
            ImageError: The processor refuses the image or its scaled copy, or the image is missing.
        """
        with self._lock:
            found = self._scaled.get(digest)
        if found is None:
            assert self._scale is not None
            found = f"data:image/png;base64,{b64encode(self._scale(digest)).decode()}"
            with self._lock:
                self._scaled.put(digest, found, len(found))
        return found

    def is_scaled(self, digest: str) -> bool:
        """Whether `scaled_uri` has the result in memory."""
        with self._lock:
            return self._scaled.get(digest) is not None

    def picture(self, digest: str) -> ProcessedImage:
        """An image after processing; processed now if it was not before.

        Raises:
            ImageError: The processor refuses it, or it is missing.
        """
        found = self._pictures.get(digest)
        return found if found is not None else self._make(digest)[0]

    def tensors(self, digest: str) -> Tensors:
        """Inputs of the model's forward pass for an image, by name.

        The shapes are the family's: see `VisionFamily.process`.

        Raises:
            ImageError: As in `picture`.
        """
        with self._lock:
            found = self._tensors.get(digest)
        if found is None and self._made is not None and (found := self._made(digest)) is not None:
            with self._lock:
                self._tensors.put(digest, found, sum(array.nbytes for array in found.values()))
        return found if found is not None else self._make(digest)[1]

    def _make(self, digest: str) -> tuple[ProcessedImage, Tensors]:
        with self._lock:
            own = self._busy.setdefault(digest, threading.Lock())
        with own:  # others that need the same image wait here
            with self._lock:
                picture, tensors = self._pictures.get(digest), self._tensors.get(digest)
            if picture is not None and tensors is not None:
                return picture, tensors
            made, tensors = self._process(digest, self.source(digest).data)
            if picture is not None and (picture.grid != made.grid or not np.array_equal(picture.ids, made.ids)):
                raise ImageError(
                    f"the processor gave the grid {made.grid} for {digest}, and {picture.grid} before",
                    kind="image_mismatch",
                    blame="engine",
                )
            with self._lock:
                self.processed += 1
                self._pictures[digest] = made
                self._tensors.put(digest, tensors, sum(array.nbytes for array in tensors.values()))
                self._busy.pop(digest, None)
            return made, tensors


class _RecentlyUsed(Generic[T]):
    """Values up to a limit in bytes; those used longest ago are dropped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._used = 0
        self._values: OrderedDict[str, tuple[T, int]] = OrderedDict()

    def get(self, key: str) -> T | None:
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def put(self, key: str, value: T, size: int) -> None:
        if key in self._values:
            return
        self._values[key] = (value, size)
        self._used += size
        while self._used > self._most and len(self._values) > 1:
            _, (_, freed) = self._values.popitem(last=False)
            self._used -= freed
