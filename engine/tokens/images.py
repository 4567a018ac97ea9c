"""Images of a run: their bytes, and what the model's processor made of each, by digest.

Invariant: an image goes through the processor once, however many turns and episodes hold it: what came of it is kept
under the digest of its bytes. The tensors, which are large, are forgotten when they take more memory than is theirs;
then, and in another process, they are made again from the stored bytes, and must be of the same shape.
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

if TYPE_CHECKING:
    from engine.schemas.message import ImagePart
    from engine.schemas.trajectory import Blame
    from engine.tokens.tape import IntVector

DIGEST = "sha256:"
"""What a reference to a stored image begins with."""
MAX_BYTES = 1 << 28
"""Bytes of one encoded image, at most."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are read, by Pillow's names. Others are refused unopened: EPS, say, which Pillow hands to Ghostscript."""

_NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)

T = TypeVar("T")
Tensors = dict[str, np.ndarray]
"""What a model's forward pass is handed for one image, by name."""


class Picture(NamedTuple):
    """One image as the tape holds it."""

    digest: str
    ids: IntVector
    """Its tokens: placeholders, and what the family puts around them. int32 [tokens]"""
    placeholders: int
    """How many of `ids` the vision tower's features replace."""
    grid: tuple[int, ...]
    """See `ImageSpan.grid`."""


class Source(NamedTuple):
    """An encoded image."""

    data: bytes
    mime: str


def digest_of(data: bytes) -> str:
    """`sha256:<hex>` of an image's bytes: the name under which it is kept."""
    return f"{DIGEST}{sha256(data).hexdigest()}"


def read_reference(part: ImagePart, blame: Blame) -> bytes:
    """The bytes that an image part refers to by path, `file://` or `data:` URI.

    Raises:
        ImageError: There are none (kind `image_unreadable` or `image_empty`).
    """
    reference = part.image
    try:
        if reference.startswith("data:"):
            head, comma, body = reference[5:].partition(",")
            if not comma:
                raise ValueError("a data: URI needs a comma between its media type and its data")
            if len(body) > MAX_BYTES // 3 * 4:
                raise ValueError(f"it holds more than {MAX_BYTES >> 20} MiB")
            data = b64decode(body, validate=True) if head.endswith(";base64") else unquote_to_bytes(body)
        elif "://" in reference and not reference.startswith("file://"):
            raise ValueError("images are given by path, file:// or data: URI; fetch it, and hand over its bytes")
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
    """A regular file's bytes. A device or a pipe may have no end, and opening one may wait for ever.

    Raises:
        OSError: It cannot be opened.
        ValueError: It is no regular file, or too large.
    """
    with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | _NO_WAIT)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        pieces, room = [], MAX_BYTES
        while piece := file.read(min(room + 1, 1 << 20)):  # not by its size: that of a file in /proc is 0
            room -= len(piece)
            if room < 0:
                raise ValueError(f"the file is larger than {MAX_BYTES >> 20} MiB")
            pieces.append(piece)
    return b"".join(pieces)


def open_image(data: bytes) -> Any:
    """The image in one of `FORMATS`, its head read and its pixels not decoded, as Pillow has it. Close it.

    Raises:
        Exception: Whatever Pillow raises; `PIL.UnidentifiedImageError` for another format.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise UnidentifiedImageError(f"neither {', '.join(FORMATS[:-1])} nor {FORMATS[-1]}") from None


def measure_pixels(data: bytes, most: int, blame: Blame) -> tuple[int, int]:
    """Width and height, read from the image's head.

    Raises:
        ImageError: It is none (kind `image_unreadable`), has no pixels (`image_empty`) or more than `most`
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
            f"{len(data)} bytes are no image that can be read: {error}", kind="image_unreadable", blame=blame
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
    """The image, decoded, as Pillow has it.

    Raises:
        ImageError: It cannot be decoded (kind `image_unreadable`): it is cut short, say.
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
    """What is known of each image of a run. Shared by all episodes; safe to call from several threads.

    Args:
        process: Makes a picture and its tensors of an image's digest and bytes.
        scale: Makes a PNG of the pixels that the processor scales an image to, by its digest.
        tensor_bytes: Memory for tensors.
        source_bytes: Memory for encoded images.
    """

    def __init__(
        self,
        process: Callable[[str, bytes], tuple[Picture, Tensors]],
        *,
        scale: Callable[[str], bytes] | None = None,
        tensor_bytes: int = 1 << 30,
        source_bytes: int = 1 << 28,
    ) -> None:
        self._process = process
        self._scale = scale
        self._pictures: dict[str, Picture] = {}
        self._tensors: _Kept[Tensors] = _Kept(tensor_bytes)
        self._sources: _Kept[Source] = _Kept(source_bytes)
        self._uris: _Kept[str] = _Kept(source_bytes)
        self._scaled: _Kept[str] = _Kept(source_bytes)
        self._fetch: Callable[[str], Source | None] | None = None
        self._made: Callable[[str], Tensors | None] | None = None
        self._lock = threading.Lock()
        self._busy: dict[str, threading.Lock] = {}
        self.processed = 0
        """How many times the processor was called."""

    def read_from(self, fetch: Callable[[str], Source | None]) -> None:
        """Where images come from that are not in memory: a run store, by digest."""
        self._fetch = fetch

    def read_tensors_from(self, made: Callable[[str], Tensors | None]) -> None:
        """Where tensors come from that were made before: the files beside exported rows, by digest."""
        self._made = made

    def put(self, digest: str, data: bytes, mime: str) -> None:
        """Remember an image's bytes."""
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
        """An image as a `data:` URI; encoded once."""
        with self._lock:
            found = self._uris.get(digest)
        if found is None:
            data, mime = self.source(digest)
            found = f"data:{mime};base64,{b64encode(data).decode()}"
            with self._lock:
                self._uris.put(digest, found, len(found))
        return found

    def scaled_uri(self, digest: str) -> str:
        """An image as the processor scales it, as a PNG `data:` URI; made once. See `Vision.scaled`.

        Raises:
            ImageError: The processor refuses the image or its scaled copy, or the image is not there.
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
        """Whether `scaled_uri` answers from memory."""
        with self._lock:
            return self._scaled.get(digest) is not None

    def picture(self, digest: str) -> Picture:
        """An image as the tape holds it; processed now where it was not before.

        Raises:
            ImageError: The processor refuses it, or it is not there.
        """
        found = self._pictures.get(digest)
        return found if found is not None else self._make(digest)[0]

    def tensors(self, digest: str) -> Tensors:
        """What the model's forward pass is handed for an image.

        Raises:
            ImageError: As in `picture`.
        """
        with self._lock:
            found = self._tensors.get(digest)
        if found is None and self._made is not None and (found := self._made(digest)) is not None:
            with self._lock:
                self._tensors.put(digest, found, sum(array.nbytes for array in found.values()))
        return found if found is not None else self._make(digest)[1]

    def _make(self, digest: str) -> tuple[Picture, Tensors]:
        with self._lock:
            own = self._busy.setdefault(digest, threading.Lock())
        with own:  # whoever wants the same image meanwhile waits for it
            with self._lock:
                picture, tensors = self._pictures.get(digest), self._tensors.get(digest)
            if picture is not None and tensors is not None:
                return picture, tensors
            made, tensors = self._process(digest, self.source(digest).data)
            if picture is not None and (picture.grid != made.grid or not np.array_equal(picture.ids, made.ids)):
                raise ImageError(
                    f"the processor made {made.grid} of {digest}, where it had made {picture.grid}",
                    kind="image_mismatch",
                    blame="engine",
                )
            with self._lock:
                self.processed += 1
                self._pictures[digest] = made
                self._tensors.put(digest, tensors, sum(array.nbytes for array in tensors.values()))
                self._busy.pop(digest, None)
            return made, tensors


class _Kept(Generic[T]):
    """Values up to so many bytes, the ones used last."""

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
