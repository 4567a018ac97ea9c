"""The four sums of TRL's batches, compared with those of the engine's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from engine.integrations.trainers.handover import Sums
from engine.integrations.trainers.pixels import checksum, checksums_of, row_sum

TILES = "engine_tiles"
"""The column of the number of tiles of each image of a row, int64 [rows, most images], for models whose images are tiles."""


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
            images += _images_of(batch)
    return Sums(tokens, trained, total, images)


def _images_of(batch: Mapping[str, Any]) -> int:
    """The sum of `row_sum` over the rows of a slice."""
    held = {
        name: batch[name].cpu() for name in ("pixel_values", "image_grid_thw", "pixel_attention_mask") if name in batch
    }
    if "image_grid_thw" in held:
        every = iter(checksums_of(held))
        checksums = [[next(every) for _ in range(count)] for count in batch["num_images"]]
    else:
        checksums = []
        for place, tiles in enumerate(batch[TILES].tolist()):
            pieces = {name: torch.split(value[place, : sum(tiles)], tiles) for name, value in held.items()}
            images = [{name: pieces[name][image] for name in held} for image, count in enumerate(tiles) if count]
            checksums.append([checksum(image) for image in images])
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1).cpu()
    there = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1).bool().cpu()
    return sum(row_sum(row[mask], sums) for row, mask, sums in zip(ids, there, checksums, strict=True))


def check_batches(rows: Sums, batches: Sequence[Mapping[str, Any]]) -> None:
    """Compare the engine's sums with those of TRL's batch.

    Raises:
        TrainError: kind `handover`: they differ.
    """
    rows.check(
        sums_of_batches(batches), "TRL", "an overridden method, an option of GRPOConfig that masks or cuts completions"
    )
