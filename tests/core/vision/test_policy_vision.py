from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vision_kit
from slow_cases import slow_but
from test_vision_episodes import GALLERY
from training_rows import row_of
from transformers import AutoModelForImageTextToText

from engine.errors import TrainError
from engine.schemas.sections import read_stored
from engine.schemas.train import TrainSpec
from engine.store.loader import beside, collate, forward_inputs, read_rows, vision_of, with_image_files
from engine.store.rows.export import training_rows, write_jsonl
from engine.store.rows.row import TrainingRow
from engine.tokens.vision import Vision
from engine.train.packing import pack_rows
from engine.train.policy import Policy
from engine.train.verify import recompute


def open_policy(folder: Path, vision: Vision | None, **spec: Any) -> Policy:
    return Policy.load(
        folder, read_stored({"device": "cpu"} | spec, TrainSpec), temperature=1.0, vocab=None, vision=vision
    )


async def gallery_rows(make_spec: Any, run_spec: Any, family: str) -> tuple[list[TrainingRow], Vision]:
    """Rows of one task, two samples: the first image is in the prompt, and after each reply there are others."""
    rollout = {"seed": 7, "samples_per_task": 2}
    limits = {"turn_tokens": 5}
    ran = await run_spec(make_spec(family, rollout=rollout, limits=limits, **GALLERY))
    vision = vision_of(ran.store)
    assert vision is not None
    return list(training_rows(ran.store)), vision


def plain_gradients(folder: Path, rows: list[TrainingRow], vision: Vision) -> dict[str, torch.Tensor | None]:
    """Of the sum of the log-probs, by one padded pass of transformers' own."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    batch = collate([row.columns() for row in rows], vision, pad_id=0)
    logits = model(**forward_inputs(batch)).logits[:, :-1]
    logits[..., batch["banned_token_ids"]] = float("-inf")
    sampled = batch["loss_mask"][:, 1:] == 1
    logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0][sampled].sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", slow_but(vision_kit.BUILDERS, "qwen2_5_vl"))
async def test_rows_with_images_have_the_samplers_log_probs_and_plain_gradients(
    make_spec: Any, run_spec: Any, vlm: Any, family: str
) -> None:
    rows, vision = await gallery_rows(make_spec, run_spec, family)
    policy = open_policy(vlm(family), vision)
    for max_tokens_per_microbatch in (1, 8192):
        found = recompute(policy, rows, max_tokens_per_microbatch)
        assert found.tokens == sum(len(row.places) for row in rows)
        assert found.largest < 1e-4
    (pack,) = pack_rows(rows, 100_000, share_prefixes=True)
    assert len(pack.images) == sum(len(row.branch.images) for row in rows) - 1
    seen: list[Any] = []
    spy = policy.model.base_model.get_image_features
    policy.model.base_model.get_image_features = lambda **inputs: seen.append(inputs) or spy(**inputs)
    policy.forward(pack, entropy=True)[0].sum().backward()
    (inputs,) = seen
    wanted_tensors = vision.tensors([[digest] for digest in dict.fromkeys(image.image for image in pack.images)])
    assert np.array_equal(inputs["pixel_values"].numpy(), wanted_tensors["pixel_values"])  # of three, once each
    wanted = plain_gradients(vlm(family), rows, vision)
    for name, parameter in policy.named_parameters():
        gradient = wanted[name]
        if gradient is None:
            assert parameter.grad is None
            continue
        assert parameter.grad is not None, name
        assert (parameter.grad - gradient).norm() < 2e-4 * gradient.norm().clamp_min(1e-3), name


@pytest.mark.slow  # by default: rows with images, above
async def test_files_without_a_vision_and_in_mixed_precision(
    make_spec: Any, run_spec: Any, vlm: Any, tiny_model_dir: Path, tmp_path: Path
) -> None:
    rows, vision = await gallery_rows(make_spec, run_spec, "qwen2_5_vl")
    path = tmp_path / "rows.jsonl"
    write_jsonl(with_image_files((row.columns() for row in rows), path, lambda: vision), path)
    loaded = list(map(row_of, read_rows(path)))
    policy = open_policy(
        vlm("qwen2_5_vl"), beside(vision, path), precision="mixed", memory={"gradient_checkpointing": True}
    )
    assert recompute(policy, loaded).mean < 0.1
    (pack,) = pack_rows(loaded, 10_000, share_prefixes=True)
    policy.forward(pack, entropy=False)[0].sum().backward()
    assert all(parameter.grad is not None for _, parameter in policy.named_parameters())
    with pytest.raises(TrainError, match="rows have images: pass the model's `vision`"):
        open_policy(tiny_model_dir, None).forward(pack, entropy=False)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm"])
async def test_a_saved_model_sees_the_same(
    make_spec: Any, run_spec: Any, vlm: Any, family: str, tmp_path: Path
) -> None:
    rows, vision = await gallery_rows(make_spec, run_spec, family)
    policy = open_policy(vlm(family), vision, lora={"rank": 2}, freeze=["visual|vision_model|connector"])
    names = [name for name, _ in policy.named_parameters()]
    assert names
    assert not [name for name in names if "visual" in name or "vision_model" in name]
    optimizer = torch.optim.AdamW(dict(policy.named_parameters()).values(), lr=0.01)
    (pack,) = pack_rows(rows, 100_000, share_prefixes=True)
    policy.forward(pack, entropy=False)[0].sum().backward()
    optimizer.step()
    with torch.no_grad():
        wanted = policy.forward(pack, entropy=False)[0]
        policy.save(tmp_path / "saved")
        assert {file.name for file in (tmp_path / "saved").iterdir()} >= {
            file.name for file in vlm(family).iterdir() if file.suffix == ".json"
        }
        found = open_policy(tmp_path / "saved", vision).forward(pack, entropy=False)[0]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
