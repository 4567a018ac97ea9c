"""From a training row to what a trainer's forward pass takes of its images; what all adapters share.

A row is its expanded ids and the digests of its images, in order. Tensors, positions and sums follow from both.

Invariant: pixels stay bytes, one object for each digest, until code of a trainer reads them. So all rows of one
pickle share them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.errors import TrainError

if TYPE_CHECKING:
    from engine.tokens.images import Tensors
    from engine.tokens.vision import Vision
    from engine.tokens.vision_families import PreparedImage, VisionFamily


class RowImages(Mapping[str, torch.Tensor]):
    """The image tensors of one row, by the names of the forward pass; without names for a row without images.

    Qwen's families: `pixel_values` float32 [patches of all images, values], `image_grid_thw` int64 [images, 3]. Each
    read makes new tensors. A pickle holds the scaled pixels as bytes, and needs neither transformers nor the model's
    files.
    """

    def __init__(
        self, family: VisionFamily, digests: Sequence[str], sums: Sequence[int], images: Mapping[str, PreparedImage]
    ) -> None:
        """`digests`: the images, in order; `sums`: `checksum` of each; `images`: the scaled pixels by digest."""
        self.family, self.digests, self.checksums, self.images = family, tuple(digests), tuple(sums), images

    def tensors(self) -> Tensors:
        """The arrays of all images, in the shapes of the class.

        Raises:
            TrainError: kind `handover`: an image is not the one that the row was made with.
        """
        arrays = [self.images[digest].tensors() for digest in self.digests]
        for digest, total, tensors in zip(self.digests, self.checksums, arrays, strict=True):
            if checksum(tensors) != total:
                raise TrainError(f"the pixels of {digest} changed on their way to the trainer", kind="handover")
        return self.family.stack([arrays]) if arrays else {}

    def items(self) -> Any:
        """All tensors by name; they are made once."""
        return {name: torch.from_numpy(array) for name, array in self.tensors().items()}.items()

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in tuple(self):
            raise KeyError(name)
        return torch.from_numpy(self.tensors()[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.family.names if self.digests else ())

    def __len__(self) -> int:
        return len(self.family.names) if self.digests else 0


class Pixels:
    """Makes `RowImages` of rows, and what else a trainer needs of their images. Safe to call from several threads."""

    def __init__(self, vision: Vision, folder: Path) -> None:
        """`vision`: the model's image processing, which knows the images of the rows; `folder`: the model's files."""
        self.vision = vision
        self._folder = folder
        self._checksum = cache(lambda digest: checksum(vision.bank.tensors(digest)))

    def row(self, ids: Sequence[int] | np.ndarray, digests: Sequence[str]) -> RowImages:
        """The images of a row with these expanded ids, [tokens], and these images, in order.

        Raises:
            TrainError: kind `handover`: the ids do not have as many placeholders as the images need.
            ImageError: an image is missing.
        """
        bank = self.vision.bank
        needed = sum(bank.picture(digest).placeholders for digest in digests)
        count = int(np.count_nonzero(np.asarray(ids) == self.vision.placeholder_id))
        if count != needed:
            raise TrainError(
                f"a row has {count} placeholders, and its {len(digests)} images need {needed}", kind="handover"
            )
        images = {digest: bank.prepared(digest) for digest in digests}
        return RowImages(self.vision.family, digests, [self._checksum(digest) for digest in digests], images)

    def sum(self, ids: Sequence[int] | np.ndarray, digests: Sequence[str]) -> int:
        """`row_sum` of a row with these ids, [tokens], as handed over. Raises: ImageError: an image is missing."""
        return row_sum(ids, [self._checksum(digest) for digest in digests])

    def positions(self, ids: Sequence[int] | np.ndarray, digests: Sequence[str]) -> torch.Tensor | None:
        """The positions of a row's tokens, int64 [4, tokens]: 0, 1, 2, … in the first line, and time, height and
        width by the model's own `get_rope_index` in the others. None for a model whose positions are plain numbers.
        Arguments: as `row`.
        """
        if self._rope is None:
            return None
        row = torch.tensor(np.asarray(ids, np.int64))[None]
        types = torch.tensor(self.vision.token_types(row.tolist()))
        grids = torch.from_numpy(self.vision.grids(digests)) if digests else None
        sides, _ = self._rope.get_rope_index(input_ids=row, mm_token_type_ids=types, image_grid_thw=grids)
        return torch.cat([torch.arange(row.shape[1])[None], sides[:, 0].long()])

    @cached_property
    def _rope(self) -> Any:
        """The model's base class without weights, for its `get_rope_index`; None if it has none."""
        from transformers import MODEL_MAPPING, AutoConfig

        config = AutoConfig.from_pretrained(self._folder)
        kind = MODEL_MAPPING[type(config)]
        if not hasattr(kind, "get_rope_index"):
            return None
        model = kind.__new__(kind)
        torch.nn.Module.__init__(model)
        model.config = config
        return model


def check_times(pixels: Pixels, ids: Sequence[int] | np.ndarray, digests: Sequence[str]) -> None:
    """Refuse a transformers that gives the images of a prompt, expanded ids [tokens], another time than model servers
    do: the position behind the text before them.

    Raises:
        TrainError: kind `train_setup`.
    """
    positions = pixels.positions(ids, digests)
    first = int(np.argmax(np.asarray(ids) == pixels.vision.placeholder_id))
    if positions is None or int(positions[1, first]) == int(positions[1, first - 1]) + 1:
        return
    from transformers import __version__

    raise TrainError(
        f"transformers {__version__} multiplies the time of this model's images by `vision_config.tokens_per_second`, "
        "and model servers do not: the trainer's log-probs would not be the sampler's. Set it to 1 in the model's "
        "config.json, which changes videos only, or install transformers 5.8 or newer",
        kind="train_setup",
    )


def checksum(tensors: Mapping[str, Any]) -> int:
    """The CRC-32 of one image's arrays or CPU tensors, in the shapes and types of the model's own processor, in the
    order of their names."""
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(np.ascontiguousarray(tensors[name]).data.cast("B"), total)
    return total


def row_sum(ids: Any, checksums: Sequence[int]) -> int:
    """The sum of a row's images for `Sums.images`: the CRC-32 of its expanded ids without padding, [tokens], and of
    its images' checksums, in order; 0 without images."""
    if not len(checksums):
        return 0
    return zlib.crc32(np.array(checksums, np.uint32).tobytes(), zlib.crc32(np.asarray(ids, np.int32).tobytes()))


def checksums_of(tensors: Mapping[str, Any]) -> list[int]:
    """`checksum` of each image: of `RowImages`; or of `pixel_values` [patches, values] and `image_grid_thw` [images,
    3], of one or more rows."""
    if isinstance(tensors, RowImages):
        return list(tensors.checksums)
    if not tensors or not len(tensors["image_grid_thw"]):
        return []
    pixels, grids = (np.asarray(tensors[name]) for name in ("pixel_values", "image_grid_thw"))
    pieces = np.split(pixels, np.cumsum(grids.prod(1))[:-1])
    return [
        checksum({"pixel_values": piece, "image_grid_thw": grid[None]})
        for piece, grid in zip(pieces, grids, strict=True)
    ]
