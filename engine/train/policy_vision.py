"""Inputs of vision models for packs with images: position ids and image features.

Invariants:
- The vision tower encodes an image once per pass, for any number of rows and positions. (Versions of transformers that do
  not accept features encode it once for each position in the pack.)
- Position ids are those of the model's own `get_rope_index`, applied to each row by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch

from engine.train.packing import Pack

if TYPE_CHECKING:
    from engine.tokens.vision import Vision

_FEATURES = "mm_encoder_outputs"


def vision_inputs(model: Any, vision: Vision, pack: Pack, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Position ids ([1, T], or [3, 1, T] for models with three), and the images, as features or as tensors.

    Args:
        model: A transformers model with a vision tower.
        vision: Makes tensors of images. It must have the images of the pack.
        pack: The pack. Its `cache` stores the position ids.
        device: Device of the tensors.
        dtype: Dtype of the floating-point tensors.
    """
    inner = model.base_model
    digests = [image.image for image in pack.images]
    if "positions" not in pack.cache:
        find = getattr(inner, "get_rope_index", None)
        positions = pack.position_ids if find is None else _positions(find, vision, pack, device)
        pack.cache["positions"] = positions.to(device).unsqueeze(-2)
    inputs: dict[str, Any] = {"position_ids": pack.cache["positions"]}
    if not digests:
        return inputs
    if _FEATURES not in signature(inner.forward).parameters:
        return inputs | _tensors(vision, [digests], device, dtype)
    return inputs | {_FEATURES: {"image": _features(inner, vision, digests, device, dtype)}}


def _tensors(
    vision: Vision, rows: Sequence[Sequence[str]], device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The tensors of the images of several sequences, by the names that the model's family uses."""
    found = {name: torch.from_numpy(array) for name, array in vision.tensors(rows).items()}
    return {name: tensor.to(device, dtype if tensor.is_floating_point() else None) for name, tensor in found.items()}


def _features(inner: Any, vision: Vision, digests: Sequence[str], device: torch.device, dtype: torch.dtype) -> Any:
    """The features of the image at each position, in the form of the model's `get_image_features`."""
    single = list(dict.fromkeys(digests))
    found = inner.get_image_features(
        **_tensors(vision, [[digest] for digest in single], device, dtype), return_dict=True
    )
    order = [single.index(digest) for digest in digests]
    found.pooler_output = [found.pooler_output[index] for index in order]
    if getattr(found, "deepstack_features", None) is not None:  # Qwen3-VL: features for several layers
        found.deepstack_features = [[layer[index] for index in order] for layer in found.deepstack_features]
    return found


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
