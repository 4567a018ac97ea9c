"""Vision families: Qwen2-VL's grid of patches, and Idefics3's tiles, each through its processor of transformers.

Invariant: an image becomes what the model's own processor gives: its image processor's tensors, and the text of its
`replace_image_token`. Only the video part, which needs torchvision, is left out.

What becomes of an image is known from its size alone (`SizedImages`): grid, tokens and scaling, without the image. The
processor's own functions compute the sizes: `smart_resize` of Qwen's, and for tiles its methods, called with an empty
image of the size, in a copy of the processor whose `resize` notes the size and scales nothing (`_SizesOnly`). The last
step, from bytes to normalised floats, is a table of 256 values per channel that the processor's own `rescale` and
`normalize` fill, so the floats are the processor's own, bit for bit.
`checked` compares all of it with the processor's own results for several images when a model is loaded. A processor
that differs, or that cannot be told from the size, is asked for each image instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from engine.schemas.base import Struct
from engine.tokens.images import Tensors
from engine.tokens.pixels import MODES, Recipe, scaled_pixels, to_rgb

log = structlog.get_logger(__name__)

_CHECKED = ((90, 61, "RGB"), (61, 190, "RGB"), (33, 40, "RGBA"), (70, 30, "L"))
"""Width, height and mode of the images of `checked`."""
_BLOCK = 256
"""Patches that become floats at a time."""


_PROCESSORS = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
    "idefics3": "Idefics3Processor",
    "smolvlm": "SmolVLMProcessor",
}
"""Model types with Qwen2-VL's scheme, and with Idefics3's, and their processor classes."""
_TILED = ("idefics3", "smolvlm")
_MODULES = {"qwen3_vl_moe": "qwen3_vl"}
FAMILIES = tuple(_PROCESSORS)
"""Model types whose images are supported."""


class ImagePlan(Struct, frozen=True, kw_only=True):
    """What becomes of an image of one size."""

    grid: tuple[int, ...]
    """See `ImageSpan.grid`."""
    text: str
    """The image's tokens, as text."""
    placeholders: int
    recipe: Recipe


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
        if not settings.do_resize:
            raise ValueError("it does not scale images to whole squares of patches")
        self._token = str(processor.image_token)
        self._resize = import_module(type(settings).__module__).smart_resize
        size = dict(settings.size)
        self._limits = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        self._patch, self._merge = int(settings.patch_size), int(settings.merge_size)
        self._frames = int(settings.temporal_patch_size)
        self._resample = int(settings.resample)
        self._table = _table(settings)

    def __getstate__(self) -> dict[str, Any]:
        """What `tensors` reads: a pickle needs no processor."""
        return {"_frames": self._frames, "_table": self._table}

    def plan(self, width: int, height: int) -> ImagePlan:
        """What becomes of an image of this size; grid: (t, h, w) in patches. Raises: ValueError: the processor refuses
        this size."""
        height, width = self._resize(height, width, self._patch * self._merge, **self._limits)
        grid = (1, height // self._patch, width // self._patch)
        count = grid[1] * grid[2] // self._merge**2
        recipe = Recipe(sizes=((width, height),), tile=0, resample=self._resample)
        return ImagePlan(grid=grid, text=self._token * count, placeholders=count, recipe=recipe)

    def arrange(self, pixels: np.ndarray) -> np.ndarray:
        """The pixels of `ImagePlan.recipe`, uint8 [tiles, height, width, 3], in the order of the tensors: uint8
        [patches, 3, side * side]."""
        (image,) = pixels
        side, merge = self._patch, self._merge
        rows, columns = image.shape[0] // side, image.shape[1] // side
        squares = image.reshape(rows // merge, merge, side, columns // merge, merge, side, 3)
        return np.ascontiguousarray(squares.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(rows * columns, 3, side * side)

    def tensors(self, values: np.ndarray, grid: tuple[int, ...]) -> Tensors:
        """Inputs of the model's forward pass for what `arrange` gave: `pixel_values` float32 [patches, values],
        `image_grid_thw` int64 [1, 3]."""
        pixel_values = np.empty((len(values), 3, self._frames, values.shape[2]), np.float32)
        for start in range(0, len(values), _BLOCK):  # in blocks that stay in the CPU's cache: half of the time
            block = values[start : start + _BLOCK]
            for channel in range(3):
                floats = self._table[channel].take(block[:, channel], mode="clip")
                pixel_values[start : start + _BLOCK, channel] = floats[:, None]
        return {"pixel_values": pixel_values.reshape(len(values), -1), "image_grid_thw": np.array([grid], np.int64)}


class TiledSizes:
    """Idefics3's scheme: tiles of a scaled image, and the whole image as one more tile."""

    def __init__(self, processor: Any) -> None:
        """`processor`: the model's own processor."""
        settings = _converting(processor)
        if not settings.do_pad:
            raise ValueError("its tensors have no mask")
        self._processor = processor
        self._sizes = _sizes_only(settings)
        self._size = dict(settings.size)
        self._scaled, self._split = bool(settings.do_resize), bool(settings.do_image_splitting)
        self._side = int(dict(settings.max_image_size)["longest_edge"])
        self._resample = int(settings.resample)
        self._slots = int(processor.image_seq_len)
        """Placeholders of one tile."""
        self._table = _table(settings)

    def plan(self, width: int, height: int) -> ImagePlan:
        """See `QwenSizes.plan`. Grid: (rows, columns)."""
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
        return ImagePlan(
            grid=(rows, columns), text=text, placeholders=(rows * columns + 1) * self._slots, recipe=recipe
        )

    def arrange(self, pixels: np.ndarray) -> np.ndarray:
        """See `QwenSizes.arrange`: uint8 [tiles, 3, side * side]."""
        tiles, height, width, _ = pixels.shape
        return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)).reshape(tiles, 3, height * width)

    def tensors(self, values: np.ndarray, grid: tuple[int, ...]) -> Tensors:
        """See `QwenSizes.tensors`: `pixel_values` float32 [tiles, 3, side, side], `pixel_attention_mask` int64 [tiles,
        side, side]."""
        pixel_values = np.empty(values.shape, np.float32)
        for channel in range(3):
            pixel_values[:, channel] = self._table[channel].take(values[:, channel], mode="clip")
        shape = (len(values), self._side, self._side)
        return {
            "pixel_values": pixel_values.reshape(len(values), 3, *shape[1:]),
            "pixel_attention_mask": np.ones(shape, np.int64),
        }


SizedImages = QwenSizes | TiledSizes
"""A processor whose results follow from an image's size and pixels."""


class PreparedImage(Struct, frozen=True):
    """What is kept of an image for the forward pass: its scaled pixels as bytes, which are an eighth of the tensors of
    Qwen-VL and a quarter of those of Idefics3, or the tensors themselves."""

    nbytes: int
    """Size in memory."""
    tensors: Callable[[], Tensors]
    """Inputs of the forward pass: `pixel_values`, float32 [patches, values] or [tiles, 3, height, width], and what goes
    with it."""


def kept_tensors(tensors: Tensors) -> PreparedImage:
    """`tensors`: arrays in the shapes of `QwenFamily.process`, such as float32 [patches, values]."""
    return PreparedImage(sum(array.nbytes for array in tensors.values()), partial(dict, tensors))


class QwenFamily:
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL: one placeholder per merge_size x merge_size square of patches. `kind`:
    `model_type` of a config.json."""

    marker = "<|image_pad|>"
    """The token that a chat template writes for an image."""
    placeholder = "<|image_pad|>"
    """The token that stands for one feature of the vision tower."""
    forbidden = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    """Tokens that only the processor writes: texts must not spell them, and replies must not have them."""
    names = ("pixel_values", "image_grid_thw")
    """Names of the forward pass's tensors."""
    served = True
    """Whether an image can be sent to a server so that it does not scale it: see `ImageProcessing.scaled`."""
    sizes = QwenSizes
    """What a processor makes of images by their sizes. Raises ValueError where its settings do not allow that."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def begin(self, processor: Any, image_processor: Any, tokenizer: Any) -> None:
        """The `__init__` of the model's processor, for images only."""
        parent: Any = super(type(processor), processor)
        parent.__init__(image_processor, tokenizer, None)

    def process(self, processor: Any, image: Any) -> tuple[Tensors, str, tuple[int, ...], int]:
        """One image -> tensors, its expansion as text, its grid, and the number of placeholders for that grid.

        The tensors have the shapes of the processor: [1, …] for an image, or [patches, …] where the family packs
        patches. Grid: (t, h, w) in patches; placeholders t * h * w / merge_size**2.

        Raises:
            ValueError: The processor's result is inconsistent.
        """
        if image.mode in MODES:
            image = to_rgb(image)  # transparent pixels on white, which transformers 5.3 leaves out
        outputs = processor.image_processor(images=[image], return_tensors="np")
        grid = tuple(int(side) for side in outputs["image_grid_thw"][0])
        merge = int(processor.image_processor.merge_size)
        count = grid[0] * grid[1] * grid[2]
        if len(outputs["image_grid_thw"]) != 1 or len(outputs["pixel_values"]) != count or count % merge**2:
            raise ValueError(f"{len(outputs['pixel_values'])} patches for a grid of {grid}")
        tensors = {name: np.ascontiguousarray(outputs[name]) for name in self.names}
        return tensors, str(processor.image_token) * (count // merge**2), grid, count // merge**2

    def scale(self, processor: Any, image: Any, grid: tuple[int, ...]) -> Any:
        """The pixels that `process` cuts into patches, as an RGB image, which is sent to servers."""
        from PIL import Image

        settings = processor.image_processor
        outputs = settings(images=[image], return_tensors="np", do_rescale=False, do_normalize=False)
        side, merge, frames = int(settings.patch_size), int(settings.merge_size), int(settings.temporal_patch_size)
        rows, columns = grid[1] // merge, grid[2] // merge
        patches = outputs["pixel_values"].reshape(rows, columns, merge, merge, 3, frames, side, side)[:, :, :, :, :, 0]
        pixels = patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(grid[1] * side, grid[2] * side, 3)
        return Image.fromarray(pixels.astype(np.uint8))

    def stack(self, rows: Sequence[Sequence[Tensors]]) -> Tensors:
        """The tensors of a batch, from each sequence's images in order, as the model's forward pass takes them:
        pixel_values [patches of all images, values], image_grid_thw [images, 3]; one sequence after another."""
        images = [tensors for row in rows for tensors in row]
        return {name: np.concatenate([tensors[name] for tensors in images]) for name in self.names}


class TiledFamily:
    """Idefics3 and SmolVLM: an image is cut into rows and columns of tiles, and the whole image follows them.

    Its parts have the names of `QwenFamily`'s.
    """

    marker = placeholder = "<image>"
    names = ("pixel_values", "pixel_attention_mask")
    served = False
    forbidden = ("<image>", "<fake_token_around_image>", "<global-img>", "<video>")
    sizes = TiledSizes

    def __init__(self, kind: str, config: dict[str, Any]) -> None:
        self.kind = kind
        vision = config.get("vision_config") or {}
        side = int(vision.get("image_size") or 512) // int(vision.get("patch_size") or 16)
        self.slots = side**2 // int(config.get("scale_factor") or 2) ** 2
        """Placeholders of one tile: (image_size / patch_size)**2 / scale_factor**2."""

    def begin(self, processor: Any, image_processor: Any, tokenizer: Any) -> None:
        """Set the attributes of Idefics3's and SmolVLM's `__init__`; SmolVLM's needs num2words for videos."""
        from transformers.processing_utils import ProcessorMixin

        processor.fake_image_token, processor.image_token = "<fake_token_around_image>", "<image>"
        processor.global_image_token = processor.global_image_tag = "<global-img>"
        processor.image_token_id = tokenizer.convert_tokens_to_ids(processor.image_token)
        processor.image_seq_len = self.slots
        ProcessorMixin.__init__(processor, image_processor, tokenizer)

    def process(self, processor: Any, image: Any) -> tuple[Tensors, str, tuple[int, ...], int]:
        """See `QwenFamily.process`. Grid: (rows, columns); (0, 0) where the image is one tile."""
        outputs = processor.image_processor(images=[[image]], return_tensors="np", return_row_col_info=True)
        grid = (int(outputs["rows"][0][0]), int(outputs["cols"][0][0]))
        tiles = grid[0] * grid[1] + 1
        if outputs["pixel_values"].shape[:2] != (1, tiles):
            raise ValueError(f"tiles of shape {outputs['pixel_values'].shape} for a grid of {grid}")
        tensors = {name: np.ascontiguousarray(outputs[name][0]) for name in self.names}
        return tensors, processor.replace_image_token(outputs, 0), grid, tiles * self.slots

    def stack(self, rows: Sequence[Sequence[Tensors]]) -> Tensors:
        """pixel_values [sequences, tiles, 3, height, width], pixel_attention_mask likewise; padded with zeros."""
        joined = [
            {name: np.concatenate([tensors[name] for tensors in row]) for name in self.names} if row else None
            for row in rows
        ]
        some = next(row for row in joined if row is not None)
        most = max(len(row["pixel_values"]) for row in joined if row is not None)
        stacked = {}
        for name in self.names:
            padded = np.zeros((len(rows), most, *some[name].shape[1:]), some[name].dtype)
            for index, row in enumerate(joined):
                if row is not None:
                    padded[index, : len(row[name])] = row[name]
            stacked[name] = padded
        return stacked


VisionFamily = QwenFamily | TiledFamily
"""What differs between families of models."""


def images_only(family: VisionFamily, folder: Path, tokenizer: Any) -> Any:
    """The processor of a model, without its video part.

    Args:
        family: The model's family.
        folder: Its files.
        tokenizer: Its tokenizer.
    """
    # transformers 5.10 exports it only beside torchvision
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    # in transformers 5.3 a processor of Pillow and numpy is one that is not fast
    pil = {"backend": "pil"} if find_spec("transformers.image_processing_backends") else {"use_fast": False}
    module, name = _MODULES.get(family.kind, family.kind), _PROCESSORS[family.kind]
    base = getattr(import_module(f"transformers.models.{module}.processing_{module}"), name)
    # it has the parts that `__init__` names
    named = {"__init__": lambda self, image_processor, tokenizer: family.begin(self, image_processor, tokenizer)}
    image_only = type(f"ImageOnly{name}", (base,), named)
    return image_only(AutoImageProcessor.from_pretrained(folder, trust_remote_code=False, **pil), tokenizer)


def family_of(config: dict[str, Any]) -> VisionFamily | None:
    """The family of a model by its config.json; None where its images are not supported."""
    kind = str(config.get("model_type") or "")
    if kind not in FAMILIES:
        return None
    return TiledFamily(kind, config) if kind in _TILED else QwenFamily(kind)


def checked(family: VisionFamily, processor: Any) -> SizedImages | None:
    """A processor's results by size, compared with its own; None if they differ, or cannot be had."""
    from PIL import Image

    try:
        sized, draw = family.sizes(processor), np.random.default_rng(0)
        for width, height, mode in _CHECKED:
            image = Image.fromarray(draw.integers(0, 256, (height, width, 4), np.uint8), "RGBA").convert(mode)
            plan = sized.plan(width, height)
            tensors, *others = family.process(processor, image)
            by_size = sized.tensors(sized.arrange(scaled_pixels(image, plan.recipe)), plan.grid)
            same = [plan.text, plan.grid, plan.placeholders] == others and by_size.keys() == tensors.keys()
            if not same or any(
                by_size[name].dtype != wanted.dtype or not np.array_equal(by_size[name], wanted)
                for name, wanted in tensors.items()
            ):
                raise ValueError(f"an image of {width} x {height} pixels differs")
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, ImportError) as error:
        log.info(
            "the image processor is asked for each image", reason=f"{type(processor.image_processor).__name__}: {error}"
        )
        return None
    return sized
