"""Episodes with images for the tests of adapters of trainers, and what the engine's own pass makes of their rows."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from vision_code import FIRST, MACHINE, THIRD, Gallery
from vision_kit import square

from engine.schemas.environment import EpisodeView, Reset, Step, Task
from engine.schemas.message import Message, TextPart, image_part
from engine.schemas.reward import RewardEvent

if TYPE_CHECKING:
    from engine.store.rows.columns import Columns

WINDOW: dict[str, Any] = {
    "condense": {"keep": {"images": "last 2", "step": 1}, "opening": True},
    "limits": {"turn_tokens": 24, "assistant_turns": 3, "episode_seconds": 3600, "on_overflow": "condense"},
}
"""Changes of a spec with which an episode of `SomeBlind` has two rows of two images each."""
FOUR_TURNS = WINDOW | {"limits": WINDOW["limits"] | {"turn_tokens": 6, "assistant_turns": 4}}
"""The same for `Gallery`."""
COLOURS = ("blue", "green", "orange", "purple", "red")


class SomeBlind(Gallery):
    """Images in the prompt, a tool's result (which one follows from the reply) and a user's turn; in tasks with `blind`, no image at all."""

    def reset(self, task: Task, seed: int) -> Reset:
        self._blind, self._broken = bool(task.fields.get("blind")), bool(task.fields.get("broken"))
        if self._blind:
            return Reset(messages=[Message(role="user", content="What colour is it?")])
        return super().reset(task, seed)

    def step(self, view: EpisodeView) -> Step:
        if self._broken:
            raise RuntimeError("the gallery is closed")
        letters = sum(map(ord, view.reply))
        if view.turn > 1:
            return Step(event="over", rewards=[RewardEvent(value=float(letters % 7), turn="last")])
        if self._blind:
            said = Message(role="user", content="Are you sure?")
        elif view.turn == 0:
            seen = image_part(square(COLOURS[letters % len(COLOURS)], 96, 64))
            said = Message(role="tool", content=[TextPart(text="You looked."), seen], name="look")
        else:
            said = Message(
                role="user", content=[image_part(THIRD), TextPart(text="And this one, beside"), image_part(FIRST)]
            )
        return Step(event="shown", messages=[said], rewards=[RewardEvent(value=float(letters % 7), turn="last")])


def write_spec(
    folder: Path, model: Path, *, blind: tuple[str, ...] = (), broken: tuple[str, ...] = (), **changes: Any
) -> Path:
    """Write `spec.yaml`: three tasks t0, t1 and t2 of two episodes each.

    Args:
        folder: Where to write it.
        model: The folder of the model.
        blind: The tasks without images.
        broken: The tasks whose environment fails.
        changes: Keys that replace those of the spec.
    """
    spec: dict[str, Any] = {
        "spec": "episode/v1",
        "name": "pixels",
        "model": {"path": str(model)},
        "backend": {"kind": "local"},
        "tasks": {
            "source": "inline",
            "rows": [{"id": name, "blind": name in blind, "broken": name in broken} for name in ("t0", "t1", "t2")],
            "id": "id",
        },
        "environment": {
            "use": "pixel_kit:SomeBlind",
            "timeout": 3600,
        },  # a trainer's imports block the loop for minutes under load
        "machine": MACHINE,
        "limits": {"turn_tokens": 24, "assistant_turns": 3, "episode_tokens": 512, "episode_seconds": 3600},
        "rewards": {"credit": {"method": "turn_return", "gamma": 0.5}},
        "rollout": {"samples_per_task": 2, "seed": 3},
    }
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec | changes))
    return path


def rows_and_vision(store: Path, folder: Path) -> tuple[list[Columns], Any]:
    """The trainable rows of a run store, and the model's image processing with their images in its bank."""
    from engine.schemas.model import ModelSpec
    from engine.store.rows.export import export_rows
    from engine.store.store import RunStore
    from engine.tokens.loading import load_format

    run = RunStore.open(store, readonly=True)
    rows = [row for row in export_rows(run) if row["trainable"]]
    vision = load_format(ModelSpec(path=str(folder)), folder).vision
    assert vision is not None
    for digest in {digest for row in rows for digest in images_of(row)}:
        vision.bank.put(digest, run.image(digest).data, "image/png")
    return rows, vision


@cache
def _model(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def own_logprobs(folder: Path, row: Columns, vision: Any) -> np.ndarray:
    """The log-probs of a row's trained tokens by the batch and the inputs of `engine train`, float32 [trained]."""
    import torch

    from engine.store.loader import collate, forward_inputs

    batch = collate([row], vision, pad_id=0)
    with torch.no_grad():
        logits = _model(folder)(**forward_inputs(batch)).logits[0, :-1]
    chosen = logits.log_softmax(-1).gather(-1, batch["input_ids"][0, 1:, None])[:, 0]
    found: np.ndarray = chosen.numpy()[row["loss_mask"][1:] == 1]
    return found


def images_of(row: Columns) -> list[str]:
    """The digests of a row's images, in order."""
    return [image["image"] for image in row["images"]]


def own_checksums(row: Columns, vision: Any) -> list[int]:
    """`checksum` of each image of a row by the model's own processor."""
    from engine.plugins.trainers.pixels import checksums_of

    return checksums_of(vision.tensors([images_of(row)]))
