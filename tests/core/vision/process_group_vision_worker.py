"""A step of a model that sees, by one process or by several; the images are process 0's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from training_rows import row_of

from engine.schemas.model import ModelSpec
from engine.schemas.train import TrainSpec
from engine.store.loader import beside, read_rows
from engine.tokens.images import EncodedImage
from engine.tokens.loading import load_format
from engine.tokens.vision import Vision
from engine.train.distributed import ProcessGroup, join_process_group
from engine.train.learner import Learner
from engine.train.policy import Policy


def give_images(vision: Vision, path: Path) -> None:
    """Give a vision the images of rows: their bytes, from the folder `encoded` beside the file, or their tensors."""
    encoded = path.parent / "encoded"
    if not encoded.exists():
        beside(vision, path)
        return
    vision.bank.read_from(lambda digest: EncodedImage(data=(encoded / digest[7:]).read_bytes(), mime="image/png"))


def told_by(
    process_group: ProcessGroup, model: Path, path: Path, tokens: int = 1
) -> tuple[dict[str, float], dict[str, torch.Tensor], list[int]]:
    """Metrics and weights, both empty in a process that follows; the number of images in each call of the vision tower."""
    spec = TrainSpec.model_validate(
        {
            "device": "cpu",
            "loss": {"kind": "dr_grpo", "length": 16},
            "optimizer": {"lr": 1e-2, "eps": 1e-3},
            "memory": {"max_tokens_per_microbatch": tokens},
        }
    )
    vision = load_format(ModelSpec(path=str(model)), path.parent).vision
    assert vision is not None
    if process_group.main:
        give_images(vision, path)
    policy = Policy.load(model, spec, temperature=1.0, vocab=None, vision=vision, process_group=process_group)
    learner = Learner(policy, spec, process_group=process_group)
    encoded: list[int] = []
    policy.model.get_encoder("image").register_forward_pre_hook(
        lambda module, args, inputs: encoded.append(len(inputs["grid_thw"])), with_kwargs=True
    )
    if not process_group.main:
        learner.follow()
        return {}, {}, encoded
    columns = list(read_rows(path))
    rows = [row_of(row, advantages=row["loss_mask"] * (1.0 + number)) for number, row in enumerate(columns)]
    text = columns[0]["images"][0]["start"]  # one row, and one pass, that sees nothing: what stands before an image
    mask = np.arange(text) > 0
    blind = row_of(
        {name: value[:text] for name, value in columns[0].items() if hasattr(value, "shape")},
        episode_id="blind", task_id=columns[0]["task_id"], loss_mask=mask, advantages=mask * 0.5, turn_rewards=np.zeros(0),
    )  # fmt: skip
    # By cost: two passes that see, then one that sees beside the one that does not.
    told = learner.step(
        [*rows, row_of(columns[0], advantages=columns[0]["loss_mask"] * 1.0, episode_id="again"), blind], 0
    )
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in learner.policy.weights().items()}
    return told, weights, encoded


def main(model: Path, path: Path, out: Path, tokens: int) -> None:
    process_group = join_process_group()
    told, weights, encoded = told_by(process_group, model, path, tokens)
    (out / f"encoded-{process_group.rank}.json").write_text(json.dumps(encoded))
    if not process_group.main:
        return
    process_group.close()
    save_file(weights, out / "told.safetensors")
    (out / "told.json").write_text(json.dumps(told | {"processes": process_group.size}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    model, path, out = map(Path, sys.argv[1:4])
    main(model, path, out, int(sys.argv[4]))
