"""Measures what `engine.plugins.plan.plan` plans: the bytes of living tensors in one process of several, over real steps.

python plan_worker.py SPEC...         # or by torchrun; each process writes SPEC.<rank>.json
"""

from __future__ import annotations

import io
import json
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from training_rows import row_of

from engine.plugins.plan.planned_step import AllocatedBytes, PlannedImages
from engine.rewards.credit import Member
from engine.rewards.ledger import Ledger
from engine.schemas.reward import RewardEvent
from engine.spec.load import load_spec
from engine.store.rows.row import TrainingRow
from engine.tokens.loading import load_format
from engine.train.distributed import join_process_group
from engine.train.setup import learner_of

IMAGES = PlannedImages(2, 168, 112)
"""The images of each row, if the model takes some."""


def rows_of(count: int, tokens: int, vision: Any = None) -> list[TrainingRow]:
    """Rows that fill one micro-batch each, as a critic needs them too; with images of a model that takes some."""
    rng, rows = np.random.default_rng(0), []
    ledger = Ledger()
    ledger.post(RewardEvent(turn=0, value=1.0), 0)
    for number in range(count):
        mask = (np.arange(tokens) > 0).astype(np.int64)
        ids = rng.integers(0, 500, tokens)
        images = []
        for image in range(IMAGES.number if vision is not None else 0):
            picture = shown(vision, f"{number}.{image}")
            start = 10 + image * (len(picture.ids) + 10)
            end = start + len(picture.ids)
            ids[start:end], mask[start:end] = picture.ids, 0
            images.append({"image": picture.digest, "start": start, "end": end, "grid": picture.grid})
        rows.append(
            row_of(
                {
                    "input_ids": ids,
                    "loss_mask": mask,
                    "turn_ids": np.where(mask == 1, 0, -1),
                    "images": images,
                    "group": {f"e{number}": Member(ledger=ledger.seal(1))},
                    "cut": False,
                    "task_id": f"t{number}",
                    "episode_id": f"e{number}",
                    "logprobs": rng.normal(-7, 0.1, tokens),
                    "advantages": rng.normal(0, 1, tokens),
                }
            )
        )
    return rows


def shown(vision: Any, name: str) -> Any:
    """An image of random pixels, after the model's processor."""
    pixels = np.random.default_rng(len(name)).integers(0, 255, (IMAGES.height, IMAGES.width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    vision.bank.put(name, file.getvalue(), "image/png")
    return vision.bank.picture(name)


def measure(path: Path) -> dict[str, int]:
    """Two steps of two micro-batches in each process. Returns the peak of the second, and the peak of the process's memory."""
    loaded, process_group = load_spec(path), join_process_group()
    assert loaded.spec.train is not None
    tokens = loaded.spec.train.memory.max_tokens_per_microbatch
    told: dict[str, int] = {}
    with AllocatedBytes() as held:
        format = load_format(loaded.spec.model, loaded.base)
        learner = learner_of(loaded, format, process_group)
        told["loading"] = held.peak
        if not process_group.main:
            learner.follow()
        else:
            for number in range(2):
                held.peak = held.now
                rows = rows_of(2 * process_group.size, tokens, format.vision)
                learner.step(rows, number)
            process_group.close()
        told["peak"] = held.peak
    return told | {"rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "rank": process_group.rank}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for spec in map(Path, sys.argv[1:]):
        found = measure(spec)
        spec.with_suffix(f".{found['rank']}.json").write_text(json.dumps(found))
