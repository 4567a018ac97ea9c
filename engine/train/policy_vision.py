"""Inputs of vision models for packs with images: position ids and image features.

Invariants:
- The vision tower encodes an image once per pass, for any number of rows and positions, with every version of transformers.
- Position ids are those of the model's own `get_rope_index`, applied to each row by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from engine.train.packing import Pack

if TYPE_CHECKING:
    from engine.tokens.vision import Vision


@contextmanager
def vision_inputs(
    model: Any, vision: Vision, pack: Pack, device: torch.device, dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    """Position ids ([1, T], or [3, 1, T] for models with three), and the tensors of the pack's images, each once.

    A model asks its own `get_image_features` for the features of its input. In the block, that method returns those of the pack's positions:
    not all versions of transformers accept features as an input. The pack's `cache` stores the position ids.
    """
    inner = model.base_model
    if "positions" not in pack.cache:
        find = getattr(inner, "get_rope_index", None)
        positions = pack.position_ids if find is None else _positions(find, vision, pack, device)
        pack.cache["positions"] = positions.to(device).unsqueeze(-2)
    inputs: dict[str, Any] = {"position_ids": pack.cache["positions"]}
    if not pack.images:
        yield inputs
        return
    grids = {image.image: image.grid for image in pack.images}
    features = inner.get_image_features(
        **_tensors(vision, [[digest] for digest in grids], device, dtype), return_dict=True
    )
    places = {digest: place for place, digest in enumerate(grids)}
    _repeat(features, list(grids.values()), [places[image.image] for image in pack.images])
    inner.get_image_features = lambda *args, **kwargs: features
    try:
        yield inputs | {"pixel_values": torch.empty(0)}  # nobody reads it: with it, a model asks for features
    finally:
        del inner.get_image_features


def _tensors(
    vision: Vision, rows: Sequence[Sequence[str]], device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The tensors of the images of several sequences, by the names that the model's family uses."""
    found = {name: torch.from_numpy(array) for name, array in vision.tensors(rows).items()}
    return {name: tensor.to(device, dtype if tensor.is_floating_point() else None) for name, tensor in found.items()}


def _repeat(features: Any, grids: Sequence[tuple[int, ...]], order: Sequence[int]) -> None:
    """Replace the features of distinct images, in the form of `get_image_features`, by those of `order`, which has indices of images."""
    pooled = features.pooler_output
    # One tensor for all images (transformers before 5.19) has Idefics3's tiles, and the whole image after them.
    sizes = [
        math.prod(grid) + 1 if isinstance(pooled, torch.Tensor) else len(pooled[at]) for at, grid in enumerate(grids)
    ]

    def repeated(values: Any) -> Any:
        if isinstance(values, torch.Tensor):
            parts = torch.split(values, sizes)
            return torch.cat([parts[index] for index in order])
        return [values[index] for index in order]

    features.pooler_output = repeated(pooled)
    if getattr(features, "deepstack_features", None) is not None:  # Qwen3-VL: features for several layers
        features.deepstack_features = [repeated(layer) for layer in features.deepstack_features]


def _positions(find: Any, vision: Vision, pack: Pack, device: torch.device) -> torch.Tensor:
    """Position ids, int64 [3, T]. They depend on earlier tokens only, so rows that share a token agree on its position."""
    positions = torch.zeros((3, pack.tokens), dtype=torch.long)
    starts = torch.tensor([image.start for image in pack.images], dtype=torch.long)
    grids = [torch.tensor([image.grid]) for image in pack.images]
    for number in range(len(pack.rows)):
        places = pack.row_tokens(number)
        ids = pack.input_ids[places]
        types = torch.tensor(vision.token_types([ids.tolist()]))
        mine = [grid for grid, inside in zip(grids, torch.isin(starts, places).tolist(), strict=True) if inside]
        grid = torch.cat(mine).to(device) if mine else None
        row = find(input_ids=ids[None].to(device), mm_token_type_ids=types.to(device), image_grid_thw=grid)[0]
        positions[:, places] = row[:, 0].cpu()
    return positions
