"""The four sums of TRL's batches, compared with those of the engine's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from engine.plugins.trainers.handover import Sums
from engine.plugins.trainers.pixels import checksum, checksums_of, row_sum

_PIXELS = ("pixel_values", "image_grid_thw", "pixel_attention_mask")


def sums_of_batches(batches: Sequence[Mapping[str, Any]]) -> Sums:
    """The sums of what TRL's loss reads, over all slices of one generation."""
    tokens = trained = images = 0
    total = 0.0
    for batch in batches:
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        advantages = batch["advantages"]
        if advantages.dim() == 1:
            advantages = advantages[:, None]
        tokens += int(batch["prompt_mask"].sum() + batch["completion_mask"].sum())
        trained += int(mask.sum())
        total += float((advantages.double().abs() * mask).sum())
        if "num_images" in batch:
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1).cpu()
            there = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1).bool().cpu()
            rows = zip(ids, there, checksums_of_rows(batch), strict=True)
            images += sum(row_sum(row[mask], checksums) for row, mask, checksums in rows)
    return Sums(tokens, trained, total, images)


def checksums_of_rows(batch: Mapping[str, Any]) -> list[list[int]]:
    """`checksum` of each image of each row, or of all tiles of a row together."""
    tensors = {name: batch[name].cpu() for name in _PIXELS if name in batch}
    if "image_grid_thw" not in tensors:
        return [[checksum(dict(zip(tensors, row, strict=True)))] for row in zip(*tensors.values(), strict=True)]
    checksums = iter(checksums_of(tensors))
    return [[next(checksums) for _ in range(count)] for count in batch["num_images"]]


def check_batches(rows: Sums, batches: Sequence[Mapping[str, Any]]) -> None:
    """Compare the engine's sums with those of TRL's batch.

    Raises:
        TrainError: kind `handover`: they differ.
    """
    rows.check(
        sums_of_batches(batches), "TRL", "an overridden method, an option of GRPOConfig that masks or cuts completions"
    )
