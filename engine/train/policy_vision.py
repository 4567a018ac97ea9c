"""Packs with images: what a model that sees takes of them beside tokens.

Invariants:
- An image goes through the vision tower once in a pass, however many rows show it, and wherever. (Where transformers
  is too old to be handed features, once for each place that rows do not share.)
- Position ids are the model's own: its `get_rope_index` over each row as it stands alone.
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
    """Position ids ([3, 1, T] where the model has three of them), and the images: as features, or as their tensors.

    Args:
        model: A model of transformers with a vision tower.
        vision: Makes tensors of images; it has to know the pack's.
        pack: Its `cache` keeps the position ids.
        device: Where the tensors are to be.
        dtype: Of those that are no integers.
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
    """The images of sequences under their family's names."""
    found = {name: torch.from_numpy(array.copy()) for name, array in vision.tensors(rows).items()}
    return {name: tensor.to(device, dtype if tensor.is_floating_point() else None) for name, tensor in found.items()}


def _features(inner: Any, vision: Vision, digests: Sequence[str], device: torch.device, dtype: torch.dtype) -> Any:
    """What the tower makes of each place's image, as the model's own `get_image_features` gives it."""
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
    """[3, T]. What stands before a token settles its position, so rows that share it agree."""
    positions = torch.zeros((3, pack.tokens), dtype=torch.long)
    starts = torch.tensor([image.start for image in pack.images], dtype=torch.long)
    grids = [torch.from_numpy(vision.bank.tensors(image.image)["image_grid_thw"].copy()) for image in pack.images]
    for number in range(len(pack.rows)):
        places = pack.row_tokens(number)
        ids = pack.input_ids[places]
        types = torch.tensor(vision.token_types([ids.tolist()]))
        mine = [grid for grid, inside in zip(grids, torch.isin(starts, places).tolist(), strict=True) if inside]
        grid = torch.cat(mine).to(device) if mine else None
        row = find(input_ids=ids[None].to(device), mm_token_type_ids=types.to(device), image_grid_thw=grid)[0]
        positions[:, places] = row[:, 0].cpu()
    return positions
