"""A training on written episodes with images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from slow_cases import slow_but
from test_vision_episodes import GALLERY
from transformers import AutoModelForImageTextToText

from engine.errors import TrainError
from engine.spec.load import load_spec
from engine.store import training as folders
from engine.store.header import RunHeader
from engine.store.loader import collate, forward_inputs, images_folder, vision_of, with_image_files
from engine.store.rows.export import export_rows, write_jsonl
from engine.train.trainer import Trainer


@pytest.mark.parametrize("family", slow_but(["qwen2_5_vl", "idefics3"], "qwen2_5_vl"))
async def test_the_loss_of_rows_with_images_is_the_cross_entropy(
    family: str, make_spec: Any, run_spec: Any, vlm: Any, tmp_path: Path
) -> None:
    spec = make_spec(family, rollout={"seed": 7, "samples_per_task": 2}, limits={"turn_tokens": 5}, **GALLERY)
    ran = await run_spec(spec)
    vision = vision_of(ran.store)
    assert vision is not None
    rows, file = list(export_rows(ran.store)), tmp_path / "rows.jsonl"
    write_jsonl(with_image_files(rows, file, lambda: vision), file)
    model: Any = AutoModelForImageTextToText.from_pretrained(vlm(family), dtype=torch.float32).eval()
    batch = collate(rows, vision, pad_id=0)
    with torch.no_grad():
        logits = model(**forward_inputs(batch)).logits[:, :-1]
    logits[..., batch["banned_token_ids"]] = float("-inf")
    sampled = batch["loss_mask"][:, 1:] == 1
    wanted = -logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0][sampled].mean()

    data = dict(ran.loaded.data)
    data["train"] = {"kind": "sft", "steps": 1, "data": {"path": str(file), "episodes_per_step": len(rows)}}
    other = tmp_path / "sft.yaml"
    other.write_text(yaml.safe_dump(data))
    loaded = load_spec(other)
    trainer = Trainer(loaded, folders.begin(tmp_path, RunHeader.of(loaded)))
    assert (await trainer.run()).first["loss"] == pytest.approx(float(wanted), abs=2e-6)

    images_folder(file).rename(tmp_path / "elsewhere")
    trainer = Trainer(loaded, folders.begin(tmp_path / "again", RunHeader.of(loaded)))
    with pytest.raises(TrainError, match=r"the tensors of the image sha256:\w+ are missing"):
        await trainer.run()
