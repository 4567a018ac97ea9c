"""Vision families: Qwen2-VL's grid of patches, and Idefics3's tiles, each through its processor of transformers.

Invariant: an image becomes what the model's own processor gives: its image processor's tensors, and the text of its
`replace_image_token`. Only the video part, which needs torchvision, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from engine.tokens.images import Tensors
from engine.tokens.pixels import MODES, to_rgb
from engine.tokens.vision_sizes import QwenSizes, SizedImages, TiledSizes

_QWEN = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
}
"""Model types with Qwen2-VL's scheme, and their processor classes."""
_TILED = {"idefics3": "Idefics3Processor", "smolvlm": "SmolVLMProcessor"}
"""Model types with Idefics3's scheme."""
_MODULES = {"qwen3_vl_moe": "qwen3_vl"}
FAMILIES = (*_QWEN, *_TILED)
"""Model types whose images are supported."""


def family_of(config: dict[str, Any]) -> QwenFamily | TiledFamily | None:
    """The family of a model by its config.json; None where its images are not supported."""
    kind = str(config.get("model_type") or "")
    if kind in _QWEN:
        return QwenFamily(kind)
    return TiledFamily(kind, config) if kind in _TILED else None


def _image_processor(folder: Path) -> Any:
    # transformers 5.10 exports it only beside torchvision
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    # in transformers 5.3 a processor of Pillow and numpy is one that is not fast
    pil = {"backend": "pil"} if find_spec("transformers.image_processing_backends") else {"use_fast": False}
    return AutoImageProcessor.from_pretrained(folder, trust_remote_code=False, **pil)


def _image_only(kind: str, name: str, begin: Callable[..., None]) -> Any:
    """The processor class of a model type without its video part; `begin` is its `__init__`.

    A processor has the parts that its `__init__` names.
    """
    module = _MODULES.get(kind, kind)
    base = getattr(import_module(f"transformers.models.{module}.processing_{module}"), name)
    return type(f"ImageOnly{name}", (base,), {"__init__": begin})


class QwenFamily:
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL: one placeholder per merge_size x merge_size square of patches."""

    marker = placeholder = "<|image_pad|>"
    forbidden: tuple[str, ...] = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    names: tuple[str, ...] = ("pixel_values", "image_grid_thw")
    served = True

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def processor(self, folder: Path, tokenizer: Any) -> Any:
        """See `Family.processor`."""

        def begin(self: Any, image_processor: Any, tokenizer: Any) -> None:
            parent: Any = super(type(self), self)
            parent.__init__(image_processor, tokenizer, None)

        return _image_only(self.kind, _QWEN[self.kind], begin)(_image_processor(folder), tokenizer)

    def process(self, processor: Any, image: Any) -> tuple[Tensors, str, tuple[int, ...], int]:
        """See `Family.process`. Grid: (t, h, w) in patches; placeholders t * h * w / merge_size**2."""
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

    def sized(self, processor: Any) -> SizedImages:
        """See `Family.sized`."""
        return QwenSizes(processor)

    def scale(self, processor: Any, image: Any, grid: tuple[int, ...]) -> Any:
        """See `Family.scale`."""
        from PIL import Image

        settings = processor.image_processor
        outputs = settings(images=[image], return_tensors="np", do_rescale=False, do_normalize=False)
        side, merge, frames = int(settings.patch_size), int(settings.merge_size), int(settings.temporal_patch_size)
        rows, columns = grid[1] // merge, grid[2] // merge
        patches = outputs["pixel_values"].reshape(rows, columns, merge, merge, 3, frames, side, side)[:, :, :, :, :, 0]
        pixels = patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(grid[1] * side, grid[2] * side, 3)
        return Image.fromarray(pixels.astype(np.uint8))

    def stack(self, rows: Sequence[Sequence[Tensors]]) -> Tensors:
        """pixel_values [patches of all images, values], image_grid_thw [images, 3]; one sequence after another."""
        images = [tensors for row in rows for tensors in row]
        return {name: np.concatenate([tensors[name] for tensors in images]) for name in self.names}


class TiledFamily:
    """Idefics3 and SmolVLM: an image is cut into rows and columns of tiles, and the whole image follows them."""

    marker = placeholder = "<image>"
    names: tuple[str, ...] = ("pixel_values", "pixel_attention_mask")
    served = False

    def __init__(self, kind: str, config: dict[str, Any]) -> None:
        self.kind = kind
        self.forbidden: tuple[str, ...] = ("<image>", "<fake_token_around_image>", "<global-img>", "<video>")
        vision = config.get("vision_config") or {}
        side = int(vision.get("image_size") or 512) // int(vision.get("patch_size") or 16)
        self.slots = side**2 // int(config.get("scale_factor") or 2) ** 2
        """Placeholders of one tile: (image_size / patch_size)**2 / scale_factor**2."""

    def processor(self, folder: Path, tokenizer: Any) -> Any:
        """See `Family.processor`."""
        from transformers.processing_utils import ProcessorMixin

        slots = self.slots

        def begin(self: Any, image_processor: Any, tokenizer: Any) -> None:
            # The attributes that Idefics3's and SmolVLM's `__init__` set, under their names; SmolVLM's needs num2words for videos.
            self.fake_image_token, self.image_token = "<fake_token_around_image>", "<image>"
            self.global_image_token = self.global_image_tag = "<global-img>"
            self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
            self.image_seq_len = slots
            ProcessorMixin.__init__(self, image_processor, tokenizer)

        return _image_only(self.kind, _TILED[self.kind], begin)(_image_processor(folder), tokenizer)

    def process(self, processor: Any, image: Any) -> tuple[Tensors, str, tuple[int, ...], int]:
        """See `Family.process`. Grid: (rows, columns); (0, 0) where the image is one tile."""
        outputs = processor.image_processor(images=[[image]], return_tensors="np", return_row_col_info=True)
        grid = (int(outputs["rows"][0][0]), int(outputs["cols"][0][0]))
        tiles = grid[0] * grid[1] + 1
        if outputs["pixel_values"].shape[:2] != (1, tiles):
            raise ValueError(f"tiles of shape {outputs['pixel_values'].shape} for a grid of {grid}")
        tensors = {name: np.ascontiguousarray(outputs[name][0]) for name in self.names}
        return tensors, processor.replace_image_token(outputs, 0), grid, tiles * self.slots

    def sized(self, processor: Any) -> SizedImages:
        """See `Family.sized`."""
        return TiledSizes(processor, self.slots)

    def scale(self, processor: Any, image: Any, grid: tuple[int, ...]) -> Any:
        """See `Family.scale`."""
        raise ValueError("its tiles and the whole image are scaled separately")

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
