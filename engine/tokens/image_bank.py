"""The digest of an image of the run -> its bytes, its tokens, and the tensors that the forward pass takes.

Invariants:
- An image is decoded once to be shown, however many turns and episodes show it. Its pixels are scaled only where a
  forward pass or a server takes them.
- Scaled pixels are kept as bytes, up to a limit in memory. Those that were dropped, and those of other processes, are
  made again from the encoded image, and must have the same grid.
"""

from __future__ import annotations

import json
import os
import threading
import time
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import structlog

from engine.errors import ImageError
from engine.processes.worker import WorkerPool, default_processes
from engine.tokens.images import EncodedImage, ProcessedImage, Tensors
from engine.tokens.vision_families import PreparedImage, kept_tensors

if TYPE_CHECKING:
    from engine.tokens.pixels import Recipe
    from engine.tokens.vision import ImageProcessing

log = structlog.get_logger(__name__)

T = TypeVar("T")

_PIXEL_BYTES, _SOURCE_BYTES = 1 << 30, 1 << 28
"""Memory limits: for scaled pixels; for encoded images, and for each of their two forms that are sent."""
AFTER = 2.0
"""Seconds of scaling in this process before worker processes scale images ahead."""


DEADLINE = 60.0
"""Seconds after which a worker that scales one image is killed."""
AHEAD = 3
"""Images per worker that are scaled and not yet taken."""

PixelJob = Callable[[str], "tuple[bytes, Recipe] | None"]
"""A digest -> the encoded image and its recipe; None: no worker scales it."""


SentImages = tuple[dict[str, EncodedImage], dict[str, Tensors]]
"""Images for other processes, by digest: encoded ones, and the tensors of those whose bytes are not known here."""


class ImageBank:
    """The images of a run and the results of their processing. Shared by all episodes; safe to call from several
    threads.

    Args:
        processing: How the model's images are processed.
        after: Seconds of scaling in this process before worker processes scale images ahead.
    """

    def __init__(self, processing: ImageProcessing, *, after: float = AFTER) -> None:
        self._processing = processing
        self._pictures: dict[str, ProcessedImage] = {}
        self._prepared: RecentlyUsed[PreparedImage] = RecentlyUsed(_PIXEL_BYTES)
        self._sources: RecentlyUsed[EncodedImage] = RecentlyUsed(_SOURCE_BYTES)
        self._uris: RecentlyUsed[str] = RecentlyUsed(_SOURCE_BYTES)
        self._scaled: RecentlyUsed[str] = RecentlyUsed(_SOURCE_BYTES)
        self._fetch: Callable[[str], EncodedImage | None] = lambda digest: None
        self._made: Callable[[str], Tensors | None] = lambda digest: None
        self._lock = threading.Lock()
        self._busy: dict[str, AbstractContextManager[bool]] = {}
        self._after = after
        self._seconds = 0.0
        """Seconds of scaling in this process."""
        self._ahead = PixelsAhead()
        self.looked = 0
        """How many times an image was decoded to be shown."""
        self.processed = 0
        """How many times pixels were scaled for a forward pass."""

    def read_from(self, fetch: Callable[[str], EncodedImage | None]) -> None:
        """Set where images that are not in memory are read from: a run store, by digest."""
        self._fetch = fetch

    def read_tensors_from(self, made: Callable[[str], Tensors | None]) -> None:
        """Set where tensors that were computed before are read from: the files beside exported rows, by digest.

        The tensors have the shapes that `QwenFamily.process` gave them.
        """
        self._made = made

    def put(self, digest: str, data: bytes, mime: str) -> None:
        """Keep an image's bytes in memory."""
        with self._lock:
            self._sources.put(digest, EncodedImage(data=data, mime=mime), len(data))

    def source(self, digest: str) -> EncodedImage:
        """An image's bytes.

        Raises:
            ImageError: It is neither in memory nor in the store (kind `image_missing`).
        """
        with self._lock:
            source = self._sources.get(digest)
        if source is None:
            source = self._fetch(digest)
        if source is None:
            raise ImageError(f"the image {digest} is not in the run store", kind="image_missing", blame="engine")
        self.put(digest, source.data, source.mime)
        return source

    def data_uri(self, digest: str) -> str:
        """An image as a `data:` URI; encoded once.

        Raises:
            ImageError: As in `source`.
        """
        return self._uri(digest, self._uris, self.source)

    def scaled_uri(self, digest: str) -> str:
        """An image as the processor scales it, as a PNG `data:` URI; encoded once. See `ImageProcessing.scaled`.

        Raises:
            ImageError: The processor refuses the image or its scaled copy, or the image is missing.
        """
        scale = self._processing.scaled
        return self._uri(
            digest, self._scaled, lambda digest: EncodedImage(data=scale(self.source(digest).data), mime="image/png")
        )

    def _uri(self, digest: str, uris: RecentlyUsed[str], encoded: Callable[[str], EncodedImage]) -> str:
        with self._lock:
            uri = uris.get(digest)
        if uri is None:
            image = encoded(digest)
            uri = f"data:{image.mime};base64,{b64encode(image.data).decode()}"
            with self._lock:
                uris.put(digest, uri, len(uri))
        return uri

    def is_scaled(self, digest: str) -> bool:
        """Whether `scaled_uri` has the result in memory."""
        with self._lock:
            return self._scaled.get(digest) is not None

    def picture(self, digest: str) -> ProcessedImage:
        """An image's tokens, from its size where the processor allows that.

        Raises:
            ImageError: It cannot be decoded, the processor refuses it, or it is missing.
        """
        picture = self._pictures.get(digest)
        if picture is not None:
            return picture
        with self._own(digest):
            picture = self._pictures.get(digest)
            if picture is None:
                picture, prepared = self._processing.look(digest, self.source(digest).data)
                self.looked += 1
                if prepared is not None:
                    with self._lock:
                        self._prepared.put(digest, prepared, prepared.nbytes)
                    self.processed += 1
                self._pictures[digest] = picture
        return picture

    def tensors(self, digest: str) -> Tensors:
        """Inputs of the model's forward pass for an image, by name; made of its scaled pixels at each call.

        The shapes are the family's: see `QwenFamily.process`.

        Raises:
            ImageError: As in `picture`.
        """
        return self.prepared(digest).tensors()

    def prepared(self, digest: str) -> PreparedImage:
        """An image's scaled pixels; raises as `picture` does."""
        with self._lock:
            prepared = self._prepared.get(digest)
        if prepared is not None:
            return prepared
        with self._own(digest):
            with self._lock:
                prepared = self._prepared.get(digest)
            if prepared is not None:
                return prepared
            if (made := self._made(digest)) is not None:
                prepared = kept_tensors(made)
            elif (pixels := self._ahead.take(digest)) is not None:
                prepared = self._processing.arrange(pixels, self.picture(digest).grid)
                self.processed += 1
            else:
                began = time.perf_counter()
                prepared = self._processing.make(digest, self.source(digest).data)
                self._seconds += time.perf_counter() - began
                self.processed += 1
            with self._lock:
                self._prepared.put(digest, prepared, prepared.nbytes)
        return prepared

    @contextmanager
    def _own(self, digest: str) -> Iterator[None]:
        """Others that need the same image wait until this block ends."""
        with self._lock:
            lock = self._busy.setdefault(digest, threading.RLock())
        with lock:
            try:
                yield
            finally:
                with self._lock:
                    self._busy.pop(digest, None)

    # --- many images ----------------------------------------------------------------------------------------

    def expect(self, digests: Iterable[str]) -> None:
        """Have worker processes scale the images of the coming forward passes ahead, in this order.

        Images that are asked for before a worker has them are scaled by the one who asks. Workers start when this
        process has spent `after` seconds on scaling.
        """
        if self._seconds < self._after:
            return
        with self._lock:
            new = [digest for digest in dict.fromkeys(digests) if self._prepared.get(digest) is None]
        self._ahead.expect(new, self._job)

    def _job(self, digest: str) -> tuple[bytes, Recipe] | None:
        """What a worker needs to scale an image; None if it must not."""
        if self._made(digest) is not None:
            return None
        data = self.source(digest).data
        recipe = self._processing.recipe(data)
        return None if recipe is None else (data, recipe)

    def sent(self, digests: Iterable[str]) -> SentImages:
        """Images for other processes: their bytes, which are much smaller than tensors; tensors where bytes are not
        known.

        Raises:
            ImageError: An image is missing.
        """
        sources: dict[str, EncodedImage] = {}
        tensors: dict[str, Tensors] = {}
        for digest in dict.fromkeys(digests):
            made = self._made(digest)
            if made is None:
                sources[digest] = self.source(digest)
            else:
                tensors[digest] = made
        return sources, tensors

    def receive(self, images: SentImages) -> None:
        """Take the images of another process, in place of those that were received before."""
        sources, tensors = images
        self.read_from(sources.get)
        self.read_tensors_from(tensors.get)


class RecentlyUsed(Generic[T]):
    """Values up to a limit in bytes; those used longest ago are dropped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._used = 0
        self._values: OrderedDict[str, tuple[T, int]] = OrderedDict()

    def get(self, key: str) -> T | None:
        entry = self._values.get(key)
        if entry is None:
            return None
        self._values.move_to_end(key)
        return entry[0]

    def put(self, key: str, value: T, size: int) -> None:
        if key in self._values:
            return
        self._values[key] = (value, size)
        self._used += size
        while self._used > self._most and len(self._values) > 1:
            _, (_, freed) = self._values.popitem(last=False)
            self._used -= freed


class PixelsAhead:
    """Scales expected images in worker processes, a few ahead of those that were taken. Workers start at the first
    image. A worker that dies, or an image that it cannot scale, costs time only.

    Args:
        processes: Number of workers. Default: `default_processes()`, shared by the processes of a training on this
            host.
    """

    def __init__(self, processes: int | None = None) -> None:
        self._processes = processes
        self._workers: WorkerPool | None = None
        self._waiting: OrderedDict[str, PixelJob] = OrderedDict()
        self._begun: OrderedDict[str, Future[np.ndarray | None]] = OrderedDict()
        self._lock = threading.Lock()

    def expect(self, digests: Iterable[str], job: PixelJob) -> None:
        """Scale these images, in this order, in place of those that were expected before.

        Args:
            digests: The images.
            job: Called in another thread. None: the image is not scaled here.
        """
        with self._lock:
            self._waiting = OrderedDict((digest, job) for digest in digests)
            for digest in [begun for begun in self._begun if begun not in self._waiting]:
                self._begun.pop(digest).cancel()
            for digest in self._begun:
                del self._waiting[digest]
            self._begin()

    def take(self, digest: str) -> np.ndarray | None:
        """The pixels of an expected image, uint8 [tiles, height, width, 3]; None if it is not being scaled."""
        with self._lock:
            future = self._begun.pop(digest, None)
            if future is None:
                self._waiting.pop(digest, None)
                return None
        pixels = None if future.cancel() else future.result()
        with self._lock:
            self._begin()
        return pixels

    def _begin(self) -> None:
        if not self._waiting:
            return
        if self._processes is None:
            self._processes = max(1, default_processes() // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
        if self._workers is None:
            self._workers = WorkerPool(self._processes, "engine.tokens.pixels:scale")
        while self._waiting and len(self._begun) < AHEAD * self._processes:
            digest, job = self._waiting.popitem(last=False)
            self._begun[digest] = self._workers.submit(self._pixels, digest, job)

    def _pixels(self, digest: str, job: PixelJob) -> np.ndarray | None:
        assert self._workers is not None
        try:
            asked = job(digest)
            if asked is None:
                return None
            image, recipe = asked
            shape, pixels = self._workers.ask(json.dumps(recipe).encode(), image, seconds=DEADLINE)
            return np.frombuffer(pixels, np.uint8).reshape(shape)
        except Exception as error:  # noqa: BLE001 - the one who takes the image makes it, and raises what is wrong
            log.info("an image is scaled in this process", reason=f"{type(error).__name__}: {error}")
            return None
