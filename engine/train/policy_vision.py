"""Packs with images: what a model that sees takes of them beside tokens.

Invariants:
- An image that rows share goes through the vision tower once.
- Position ids are the model's own: its `get_rope_index` over each row as it stands alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine.train.packing import Pack

if TYPE_CHECKING:
    from engine.tokens.vision import Vision


def vision_inputs(
    model: Any, vision: Vision, pack: Pack, device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Position ids ([3, 1, T] where the model has three of them) and the images' tensors, under their family's names.

    Args:
        model: A model of transformers with a vision tower.
        vision: Makes tensors of images; it has to know the pack's.
        pack: Its `cache` keeps the position ids.
        device: Where the tensors are to be.
        dtype: Of those that are no integers.
    """
    digests = [image.image for image in pack.images]
    found = {name: torch.from_numpy(array.copy()) for name, array in vision.tensors([digests]).items()}
    find = getattr(model.model, "get_rope_index", None)
    if "positions" not in pack.cache:
        positions = pack.position_ids if find is None else _positions(find, vision, pack, found, device)
        pack.cache["positions"] = positions.to(device).unsqueeze(-2)
    inputs = {name: tensor.to(device, dtype if tensor.is_floating_point() else None) for name, tensor in found.items()}
    return {"position_ids": pack.cache["positions"], **inputs}


def _positions(
    find: Any, vision: Vision, pack: Pack, tensors: dict[str, torch.Tensor], device: torch.device
) -> torch.Tensor:
    """[3, T]. What stands before a token settles its position, so rows that share it agree."""
    positions = torch.zeros((3, pack.tokens), dtype=torch.long)
    starts = torch.tensor([image.start for image in pack.images], dtype=torch.long)
    for number in range(len(pack.rows)):
        places = pack.row_tokens(number)
        ids = pack.input_ids[places]
        types = torch.tensor(vision.token_types([ids.tolist()]))
        mine = torch.isin(starts, places)
        grid = tensors["image_grid_thw"][mine].to(device) if mine.any() else None
        row = find(input_ids=ids[None].to(device), mm_token_type_ids=types.to(device), image_grid_thw=grid)[0]
        positions[:, places] = row[:, 0].cpu()
    return positions
