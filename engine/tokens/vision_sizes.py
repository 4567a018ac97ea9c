"""The size of an image -> what the image processor makes of it: grid, tokens and scaling, without the image.

The processor's own functions compute the sizes: `smart_resize` of Qwen's, and for tiles its methods, called with an empty
image of the size, in a copy of the processor whose `resize` notes the size and scales nothing (`_SizesOnly`). The last step,
from bytes to normalised floats, is a table of 256 values per channel that the processor's own `rescale` and `normalize`
fill, so the floats are the processor's own, bit for bit.

Invariant: `checked` compares all of it with the processor's own results for several images when a model is loaded. A processor that
differs, or that cannot be told from the size, is asked for each image instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import structlog

from engine.schemas.base import Struct
from engine.tokens.pixels import Recipe, scaled_pixels

if TYPE_CHECKING:
    from engine.tokens.images import Tensors

log = structlog.get_logger(__name__)

_CHECKED = ((90, 61, "RGB"), (61, 190, "RGB"), (33, 40, "RGBA"), (70, 30, "L"))
"""Width, height and mode of the images of `checked`."""
_BLOCK = 256
"""Patches that become floats at a time."""


class Plan(Struct, frozen=True, kw_only=True):
    """What becomes of an image of one size."""

    grid: tuple[int, ...]
    """See `ImageSpan.grid`."""
    text: str
    """The image's tokens, as text."""
    placeholders: int
    recipe: Recipe


class SizedImages(Protocol):
    """A processor whose results follow from an image's size and pixels."""

    def plan(self, width: int, height: int) -> Plan:
        """What becomes of an image of this size.

        Raises:
            ValueError: The processor refuses this size.
        """
        ...

    def arrange(self, pixels: np.ndarray) -> np.ndarray:
        """The pixels of `Plan.recipe`, uint8 [tiles, height, width, 3], in the order of the tensors: uint8 [rows, 3, values]."""
        ...

    def tensors(self, values: np.ndarray, grid: tuple[int, ...]) -> Tensors:
        """Inputs of the model's forward pass for an image.

        Args:
            values: uint8 [rows, 3, values], of `arrange`.
            grid: `Plan.grid`.

        Returns:
            Arrays in the shapes of `VisionFamily.process`.
        """
        ...


class ByteImage:
    """An image's scaled pixels as bytes: an eighth of the tensors of Qwen-VL, a quarter of those of Idefics3."""

    def __init__(self, sized: SizedImages, values: np.ndarray, grid: tuple[int, ...]) -> None:
        """`values`: uint8 [rows, 3, values], of `SizedImages.arrange`."""
        self._sized, self._values, self._grid = sized, values, grid

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        return self._values.nbytes

    def tensors(self) -> Tensors:
        """See `PreparedImage.tensors`; `pixel_values` has float32 [patches, values] or [tiles, 3, height, width]."""
        return self._sized.tensors(self._values, self._grid)


def _sizes_only(processor: Any) -> Any:
    """A copy of an image processor that scales nothing: its `resize` notes sizes in `.sizes`."""
    from transformers.image_processing_backends import PilBackend

    class _SizesOnly(PilBackend):  # type: ignore[misc]  # transformers has no types
        def resize(self, image: Any, size: Any, resample: Any = None, **_: Any) -> Any:
            if not (size.height and size.width):
                raise ValueError("a side of it would have no pixels")
            self.sizes.append((int(size.width), int(size.height)))
            return _empty(int(size.width), int(size.height))

    sizes_only = copy.copy(processor)
    # Behind the processor's own class, whose `super().resize` this is.
    sizes_only.__class__ = type("SizesOnly", (type(processor), _SizesOnly), {})
    return sizes_only


def _empty(width: int, height: int) -> np.ndarray:
    """An image as processors hold it, [3, height, width], of one byte."""
    return np.broadcast_to(np.uint8(0), (3, height, width))


def _converting(processor: Any) -> Any:
    """The image processor of a processor. Raises: ValueError: it does not convert images to RGB."""
    settings = processor.image_processor
    if not settings.do_convert_rgb:
        raise ValueError("it takes images in any mode")
    return settings


def _table(processor: Any) -> np.ndarray:
    """The floats of the 256 values of each channel: float32 [3, 256]."""
    values: Any = np.broadcast_to(np.arange(256, dtype=np.uint8), (3, 1, 256)).copy()
    if processor.do_rescale:
        values = processor.rescale(values, processor.rescale_factor)
    if processor.do_normalize:
        values = processor.normalize(values, processor.image_mean, processor.image_std)
    return np.ascontiguousarray(values[:, 0], np.float32)


class QwenSizes:
    """Qwen2-VL's scheme: one scaled image, cut into patches."""

    def __init__(self, processor: Any) -> None:
        """`processor`: the model's own processor."""
        settings = _converting(processor)
        self._token = str(processor.image_token)
        self._resize = import_module(type(settings).__module__).smart_resize
        size = dict(settings.size)
        self._limits = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        self._scaled = bool(settings.do_resize)
        self._patch, self._merge = int(settings.patch_size), int(settings.merge_size)
        self._frames = int(settings.temporal_patch_size)
        self._resample = int(settings.resample)
        self._table = _table(settings)

    def __getstate__(self) -> dict[str, Any]:
        """What `tensors` reads: a pickle needs no processor."""
        return {"_frames": self._frames, "_table": self._table}

    def plan(self, width: int, height: int) -> Plan:
        """See `SizedImages.plan`. Grid: (t, h, w) in patches."""
        factor = self._patch * self._merge
        if self._scaled:
            height, width = self._resize(height, width, factor, **self._limits)
        if width % factor or height % factor:
            raise ValueError(f"{width} x {height} pixels are not whole squares of {factor}")
        grid = (1, height // self._patch, width // self._patch)
        count = grid[1] * grid[2] // self._merge**2
        sizes = ((width, height),) if self._scaled else ()
        return Plan(
            grid=grid,
            text=self._token * count,
            placeholders=count,
            recipe=Recipe(sizes=sizes, tile=0, resample=self._resample),
        )

    def arrange(self, pixels: np.ndarray) -> np.ndarray:
        """See `SizedImages.arrange`: [patches, 3, side * side]."""
        (image,) = pixels
        side, merge = self._patch, self._merge
        rows, columns = image.shape[0] // side, image.shape[1] // side
        squares = image.reshape(rows // merge, merge, side, columns // merge, merge, side, 3)
        return np.ascontiguousarray(squares.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(rows * columns, 3, side * side)

    def tensors(self, values: np.ndarray, grid: tuple[int, ...]) -> Tensors:
        """See `SizedImages.tensors`: `pixel_values` float32 [patches, values], `image_grid_thw` int64 [1, 3]."""
        pixel_values = np.empty((len(values), 3, self._frames, values.shape[2]), np.float32)
        for start in range(0, len(values), _BLOCK):  # in blocks that stay in the CPU's cache: half of the time
            block = values[start : start + _BLOCK]
            for channel in range(3):
                floats = self._table[channel].take(block[:, channel], mode="clip")
                pixel_values[start : start + _BLOCK, channel] = floats[:, None]
        return {"pixel_values": pixel_values.reshape(len(values), -1), "image_grid_thw": np.array([grid], np.int64)}


class TiledSizes:
    """Idefics3's scheme: tiles of a scaled image, and the whole image as one more tile."""

    def __init__(self, processor: Any, slots: int) -> None:
        """`processor`: the model's own processor; `slots`: placeholders of one tile."""
        settings = _converting(processor)
        if not settings.do_pad:
            raise ValueError("its tensors have no mask")
        self._processor = processor
        self._sizes = _sizes_only(settings)
        self._size = dict(settings.size)
        self._scaled, self._split = bool(settings.do_resize), bool(settings.do_image_splitting)
        self._side = int(dict(settings.max_image_size)["longest_edge"])
        self._resample = int(settings.resample)
        self._slots = slots
        self._table = _table(settings)

    def plan(self, width: int, height: int) -> Plan:
        """See `SizedImages.plan`. Grid: (rows, columns)."""
        from transformers.image_utils import SizeDict

        processor = copy.copy(self._sizes)  # several threads may ask at once
        sizes = processor.sizes = []
        image, how = _empty(width, height), {"resample": self._resample}
        if self._scaled:
            image = processor.resize(image=image, size=SizeDict(**self._size), **how)
        rows = columns = 0
        if self._split:
            image = processor.resize_for_vision_encoder(image, self._side, **how)
            count = len(sizes)
            _, rows, columns = processor.split_images(image, max_image_size={"longest_edge": self._side}, **how)
            del sizes[count:]  # the whole image as one tile, which `Recipe.tile` stands for
        else:
            processor.resize(image=image, size=SizeDict(height=self._side, width=self._side), **how)
        outputs = {"rows": [[rows]], "cols": [[columns]]}
        text = str(self._processor.replace_image_token(outputs, 0))
        recipe = Recipe(sizes=tuple(sizes), tile=self._side if self._split else 0, resample=self._resample)
        return Plan(grid=(rows, columns), text=text, placeholders=(rows * columns + 1) * self._slots, recipe=recipe)

    def arrange(self, pixels: np.ndarray) -> np.ndarray:
        """See `SizedImages.arrange`: [tiles, 3, side * side]."""
        tiles, height, width, _ = pixels.shape
        return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)).reshape(tiles, 3, height * width)

    def tensors(self, values: np.ndarray, grid: tuple[int, ...]) -> Tensors:
        """See `SizedImages.tensors`: `pixel_values` float32 [tiles, 3, side, side], `pixel_attention_mask` int64 [tiles, side, side]."""
        pixel_values = np.empty(values.shape, np.float32)
        for channel in range(3):
            pixel_values[:, channel] = self._table[channel].take(values[:, channel], mode="clip")
        shape = (len(values), self._side, self._side)
        return {
            "pixel_values": pixel_values.reshape(len(values), 3, *shape[1:]),
            "pixel_attention_mask": np.ones(shape, np.int64),
        }


def checked(make: Callable[[], SizedImages], process: Callable[[Any], Any], name: str) -> SizedImages | None:
    """A processor's results by size, compared with its own; None if they differ, or cannot be had.

    Args:
        make: The results by size.
        process: The processor itself: see `VisionFamily.process`.
        name: The processor, in the log.
    """
    try:
        sized = make()
        for image in _samples():
            plan = sized.plan(*image.size)
            tensors, text, grid, placeholders = process(image)
            by_size = sized.tensors(sized.arrange(scaled_pixels(image, plan.recipe)), plan.grid)
            same = (plan.grid, plan.text, plan.placeholders) == (
                grid,
                text,
                placeholders,
            ) and by_size.keys() == tensors.keys()
            if not same or any(not _equal(by_size[key], tensors[key]) for key in by_size):
                raise ValueError(f"an image of {image.size[0]} x {image.size[1]} pixels differs")
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, ImportError) as error:
        log.info("the image processor is asked for each image", reason=f"{name}: {error}")
        return None
    return sized


def _equal(found: np.ndarray, wanted: np.ndarray) -> bool:
    return (found.shape, found.dtype) == (wanted.shape, wanted.dtype) and bool(np.array_equal(found, wanted))


def _samples() -> Iterator[Any]:
    from PIL import Image

    draw = np.random.default_rng(0)
    for width, height, mode in _CHECKED:
        values = draw.integers(0, 256, (height, width, 4), np.uint8)
        yield Image.fromarray(values, "RGBA").convert(mode) if mode != "RGBA" else Image.fromarray(values, "RGBA")
