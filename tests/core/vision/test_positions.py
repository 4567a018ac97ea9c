"""Position ids of rows with images: by packs and by the local backend, beside what the model computes itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from slow_cases import slow_but
from test_policy_vision import gallery_rows, open_policy
from transformers import AutoModelForImageTextToText

from engine.plugins.local.vision import VisionModel, place_images
from engine.store.loader import collate, forward_inputs
from engine.store.rows.row import TrainingRow
from engine.train.packed_model import vision_inputs
from engine.train.packing import pack_rows

MROPE = ("qwen2_5_vl", "qwen3_vl")


def by_the_definition(row: TrainingRow, placeholder: int, merge: int) -> np.ndarray:
    """[3, tokens]: text counts on in all three; an image's tokens keep time, and count rows and columns (Qwen2-VL, 2.1)."""
    grids = [list(image.grid) for image in row.branch.images]
    found, after, at = [], 0, 0
    ids = row.branch.input_ids
    while at < len(ids):
        if ids[at] != placeholder:
            found.append(np.full((3, 1), after))
            after, at = after + 1, at + 1
            continue
        _, height, width = grids.pop(0)
        down, across = np.mgrid[0 : height // merge, 0 : width // merge]
        found.append(after + np.stack([np.zeros(down.size, int), down.ravel(), across.ravel()]))
        after, at = after + max(height, width) // merge, at + down.size
    return np.concatenate(found, axis=1)


@pytest.mark.parametrize("family", slow_but(MROPE, "qwen3_vl"))
async def test_positions_are_those_that_the_model_computes_itself(
    make_spec: Any, run_spec: Any, vlm: Any, family: str
) -> None:
    rows, vision = await gallery_rows(make_spec, run_spec, family)
    assert max(len(row.branch.images) for row in rows) == 4
    model: Any = AutoModelForImageTextToText.from_pretrained(vlm(family), dtype=torch.float32).eval()
    text = next(
        module for name, module in model.named_modules() if name in ("model.language_model", "model.text_model")
    )
    seen: list[torch.Tensor] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        positions = kwargs.get("position_ids")
        count = kwargs["inputs_embeds"].shape[1]
        seen.append(torch.arange(count)[None] if positions is None else positions)  # None: the places

    text.register_forward_pre_hook(note, with_kwargs=True)
    backend = VisionModel(vlm(family), torch.device("cpu"), torch.float32, 2, vision=vision)
    policy = open_policy(vlm(family), vision)
    (pack,) = pack_rows(rows, 100_000, share_prefixes=True)
    with vision_inputs(policy.net.model, vision, pack, torch.device("cpu"), torch.float32) as inputs:
        packed = inputs["position_ids"].reshape(-1, pack.tokens)
    for number, row in enumerate(rows):
        seen.clear()
        with torch.no_grad():
            model(**forward_inputs(collate([row.columns()], vision, pad_id=0)))
        own = seen[0].reshape(-1, len(row.branch.input_ids))[-len(packed) :]
        assert own.shape[0] == 3
        merge = vision.processing.processor.image_processor.merge_size
        np.testing.assert_array_equal(own.numpy(), by_the_definition(row, vision.placeholder_id, merge))
        placed = place_images(
            vision,
            row.branch.input_ids,
            [image.image for image in row.branch.images],
            [(image.start, image.end) for image in row.branch.images],
            {},
        )
        assert placed is not None
        found = backend.positions(placed)
        assert torch.equal(found.reshape(own.shape), own)
        places = pack.row_tokens(number)
        assert torch.equal(packed[:, places], own[:, : len(places)])  # a pack ends before the row's last sampled token
