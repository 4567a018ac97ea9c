"""One image through a model's processor: its tokens, its pixels, and the copy that servers get.

The tokens follow from the size where the processor allows that (`ImageProcessing.sized`), so that no tensor is made to show an image.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from engine.errors import ImageError, RenderError
from engine.tokens.images import FloatImage, PreparedImage, ProcessedImage, Tensors, open_pixels
from engine.tokens.pixels import MODES, Recipe, open_file, scaled_pixels
from engine.tokens.vision_sizes import ByteImage, Plan, SizedImages, checked

if TYPE_CHECKING:
    from engine.tokens.tape import IntVector
    from engine.tokens.tokenizer import FastTokenizer


class VisionFamily(Protocol):
    """The differences between families: see vision_families.py."""

    kind: str
    """`model_type` of its config.json."""
    marker: str
    """The token that a chat template writes for an image."""
    placeholder: str
    """The token that stands for one feature of the vision tower."""
    forbidden: tuple[str, ...]
    """Tokens that only the processor writes: texts must not spell them, and replies must not have them."""
    names: tuple[str, ...]
    """Names of the forward pass's tensors."""
    served: bool
    """Whether an image can be sent to a server so that it does not scale it: see `Vision.scaled`."""

    def processor(self, folder: Path, tokenizer: Any) -> Any:
        """The model's processor, for images only."""
        ...

    def process(self, processor: Any, image: Any) -> tuple[Tensors, str, tuple[int, ...], int]:
        """One image -> tensors, its expansion as text, its grid, and the number of placeholders for that grid.

        The tensors have the shapes of the processor: [1, …] for an image, or [patches, …] where the family packs patches.

        Raises:
            ValueError: The processor's result is inconsistent.
        """
        ...

    def sized(self, processor: Any) -> SizedImages:
        """What the processor makes of images by their sizes: see vision_sizes.py.

        Raises:
            ValueError: With these settings of the processor it cannot be told from the size.
        """
        ...

    def scale(self, processor: Any, image: Any, grid: tuple[int, ...]) -> Any:
        """The pixels that `process` cuts into patches, as an RGB image, which is sent to servers.

        Raises:
            ValueError: No single image gives the same tensors; `served` is False.
        """
        ...

    def stack(self, rows: Sequence[Sequence[Tensors]]) -> Tensors:
        """The tensors of a batch, from each sequence's images in order.

        Shapes: [images, …] or [patches, …] over all images, as the model's forward pass takes them.
        """
        ...


class ImageProcessing:
    """How the images of one model are processed. Safe to call from several threads.

    Args:
        family: The model's family.
        folder: The model's files.
        tokenizer: Its tokenizer.
        placeholder: Id of the token that stands for one feature.
    """

    def __init__(self, family: VisionFamily, folder: Path, tokenizer: FastTokenizer, placeholder: int) -> None:
        self.family = family
        self._folder = folder
        self._tokenizer = tokenizer
        self._placeholder = placeholder
        self._ids: dict[tuple[int, ...], IntVector] = {}
        """Tokens of images by grid."""

    @cached_property
    def processor(self) -> Any:
        """The model's own processor (transformers), without its video part.

        Raises:
            RenderError: It cannot be loaded.
        """
        try:
            return self.family.processor(self._folder, self._tokenizer.real)
        except (OSError, ValueError, ImportError, TypeError) as error:
            raise RenderError(f"the image processor of {self._folder} cannot be loaded: {error}") from error

    @cached_property
    def sized(self) -> SizedImages | None:
        """What the processor makes of an image by its size alone; None if that is known from the processor only.

        Raises:
            RenderError: The processor cannot be loaded.
        """
        processor = self.processor
        return checked(
            lambda: self.family.sized(processor),
            lambda image: self.family.process(processor, image),
            type(processor.image_processor).__name__,
        )

    def tokens_of_size(self, width: int, height: int) -> int | None:
        """Number of tokens of an image of this size; None if only the processor knows.

        Raises:
            ImageError: the processor refuses an image of this size.
        """
        if self.sized is None:
            return None
        try:
            plan = self.sized.plan(width, height)
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise _refused((width, height), error) from error
        return len(self._picture("", plan.text, plan.grid, plan.placeholders).ids)

    def look(self, digest: str, data: bytes) -> tuple[ProcessedImage, PreparedImage | None]:
        """An image's tokens. Its pixels are decoded, so that an incomplete file is refused where it is shown, and not kept.

        Returns:
            The tokens; and the image's tensors where its tokens are known from the processor only, else None.

        Raises:
            ImageError: It cannot be decoded, or the processor refuses it.
        """
        image = open_pixels(data)
        plan = self._plan(image)
        if plan is None:
            return self._process(digest, image)
        return self._picture(digest, plan.text, plan.grid, plan.placeholders), None

    def make(self, digest: str, data: bytes) -> PreparedImage:
        """An image's scaled pixels as bytes; its tensors where its tokens are known from the processor only.

        Raises:
            ImageError: As in `look`.
        """
        image = open_pixels(data)
        plan = self._plan(image)
        if plan is None:
            return self._process(digest, image)[1]
        return self.arrange(scaled_pixels(image, plan.recipe), plan.grid)

    def recipe(self, data: bytes) -> Recipe | None:
        """How a worker process scales an image, from its header; None if this process must."""
        with open_file(data) as image:
            plan = self._plan(image)
        return None if plan is None else plan.recipe

    def arrange(self, pixels: np.ndarray, grid: tuple[int, ...]) -> PreparedImage:
        """What is kept of pixels that were scaled by `recipe`, uint8 [tiles, height, width, 3]."""
        sized = self.sized
        assert sized is not None
        return ByteImage(sized, sized.arrange(pixels), grid)

    def _plan(self, image: Any) -> Plan | None:
        """What becomes of an image, from its size; None if only the processor knows.

        Raises:
            ImageError: The processor refuses an image of this size.
        """
        if self.sized is None or image.mode not in MODES:
            return None
        try:
            return self.sized.plan(*image.size)
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise _refused(image.size, error) from error

    def _process(self, digest: str, image: Any) -> tuple[ProcessedImage, PreparedImage]:
        try:
            tensors, text, grid, wanted = self.family.process(self.processor, image)
        except (ValueError, TypeError, ZeroDivisionError, OSError) as error:
            raise _refused(image.size, error) from error
        return self._picture(digest, text, grid, wanted), FloatImage(tensors)

    def _picture(self, digest: str, text: str, grid: tuple[int, ...], wanted: int) -> ProcessedImage:
        ids = self._ids.get(grid)
        if ids is None:
            ids = np.asarray(self._tokenizer.encode(text), np.int32)
            ids.flags.writeable = False
            self._ids[grid] = ids
        placeholders = int(np.count_nonzero(ids == self._placeholder))
        if placeholders != wanted:
            raise ImageError(
                f"an image with the grid {grid} needs {wanted} placeholders; its tokens have {placeholders}",
                kind="image_mismatch",
                blame="engine",
            )
        return ProcessedImage(digest=digest, ids=ids, placeholders=placeholders, grid=grid)

    def scaled(self, data: bytes) -> bytes:
        """An image at the size of its grid, as an RGB PNG, which is sent to servers in its place.

        Servers process images themselves, and their processors decode and scale differently (Pillow, torchvision,
        nvJPEG: up to 17 grey levels). None of them scales an image that already has its grid's size, so the server's pixels
        are the pixels of the training rows. This method checks that the processor does not scale the copy; without `sized`, that the
        copy's tensors equal the image's, bit for bit.

        Raises:
            ImageError: Kind `image_refused`: the processor scales the copy again, because its aspect ratio is too large.
        """
        image = open_pixels(data)
        plan = self._plan(image)
        try:
            copy = self._processed_copy(image) if plan is None else self._copy(image, plan)
        except (ValueError, TypeError) as error:
            raise ImageError(
                f"an image of {image.size[0]} x {image.size[1]} pixels cannot be sent to a server exactly: {error}; "
                "crop it, or use `backend: {kind: local}`",
                kind="image_refused",
            ) from error
        buffer = io.BytesIO()
        copy.save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()

    def _copy(self, image: Any, plan: Plan) -> Any:
        """Raises: ValueError: the processor scales the copy again."""
        from PIL import Image

        if not self.family.served:
            raise ValueError("its tiles and the whole image are scaled separately")
        assert self.sized is not None
        copy = Image.fromarray(scaled_pixels(image, plan.recipe)[0])
        again = self.sized.plan(*copy.size)
        if any(size != copy.size for size in again.recipe.sizes):
            raise ValueError(
                f"a copy of {copy.size[0]} x {copy.size[1]} pixels is scaled again, to the grid {again.grid}"
            )
        return copy

    def _processed_copy(self, image: Any) -> Any:
        """Raises: ValueError: the copy's tensors are not the image's."""
        tensors, _, wanted, _ = self.family.process(self.processor, image)
        copy = self.family.scale(self.processor, image, wanted)
        copied, _, grid, _ = self.family.process(self.processor, copy)
        if grid != wanted or any(not np.array_equal(copied[name], tensors[name]) for name in copied):
            raise ValueError(f"a copy of {copy.size[0]} x {copy.size[1]} pixels is scaled again, to the grid {grid}")
        return copy


def _refused(size: tuple[int, int], error: Exception) -> ImageError:
    return ImageError(
        f"the model's processor refuses an image of {size[0]} x {size[1]} pixels: {error}",
        kind="image_refused",
    )
