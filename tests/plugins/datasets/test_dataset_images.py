"""Images in data sets for TRL and verl: the same pixels, as bytes in the file or as files beside it."""

from __future__ import annotations

import asyncio
import io
from base64 import b64encode
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from command_line import engine_here
from ended_runs import run_to_end
from PIL import Image
from slow_cases import slow_after
from verl_loader import digest, load_with_verl
from vision_code import FIRST, SECOND
from vision_kit import BUILDERS
from written_specs import save_spec

FAMILY = "idefics3"
"""A family whose processor needs no torchvision."""
ROWS = [
    {
        "id": name,
        "messages": [{"role": "user", "content": f"What {name} colour is <image> and <image>?"}],
        "images": [f"data:image/png;base64,{b64encode(data).decode()}" for data in images],
        "answer": "red",
    }
    for name, images in (("a", (FIRST, SECOND)), ("b", (SECOND, SECOND)))
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two tasks with two images each."""
    tasks = {"source": "inline", "rows": ROWS, "id": "id"}
    spec = {
        "spec": "episode/v1",
        "name": "seen",
        "model": {"path": str(BUILDERS[FAMILY](tmp_path / "model"))},
        "backend": {"kind": "scripted", "replies": ["The square is red."]},
        "tasks": tasks,
        "prompt": {"field": "messages"},
        "machine": "single_turn",
    }
    ran = asyncio.run(run_to_end(save_spec(tmp_path / "seen.yaml", spec), tmp_path / "runs"))
    assert [each.outcome.failure for each in ran.store.trajectories()] == [None, None]
    return Path(ran.store.folder)


def export(run: Path, folder: Path, *words: str) -> Path:
    out = folder / "rows.parquet"
    code, said, err = engine_here("export", run, *words, "--out", out, cwd=folder)
    assert code == 0, err
    assert "rows: " in said
    return out


def pixels(data: bytes) -> bytes:
    return Image.open(io.BytesIO(data)).convert("RGB").tobytes()


@pytest.mark.parametrize(
    ("images", "content"),
    slow_after(1, product(["paths", "bytes"], ["conversations", "turns", "prompts"]), several=True),
)
def test_images_are_read_as_images(content: str, images: str, run: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    path = export(run, tmp_path, "--format", "trl", "--content", content, "--images", images)
    rows = datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert [[image.convert("RGB").tobytes() for image in row["images"]] for row in rows] == [
        [pixels(FIRST), pixels(SECOND)], [pixels(SECOND), pixels(SECOND)]
    ]  # fmt: skip
    files = sorted(tmp_path.glob("rows_images/*"))
    assert [file.read_bytes() for file in files] == (
        [] if images == "bytes" else sorted([FIRST, SECOND], key=lambda data: _name(data))
    )
    messages = rows[0]["messages" if content == "conversations" else "prompt"]
    assert messages[0]["content"] == [
        {"type": "text", "text": "What a colour is "}, {"type": "image"}, {"type": "text", "text": " and "},
        {"type": "image"}, {"type": "text", "text": "?"},
    ]  # fmt: skip


def _name(data: bytes) -> str:
    from engine.tokens.images import digest_of

    return digest_of(data)


@pytest.mark.slow  # importing trl takes seconds
def test_trl_trains_on_images(run: Path, vlm: Any, tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from transformers import AutoModelForImageTextToText, AutoProcessor

    path = export(run, tmp_path, "--format", "trl")
    rows = datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    config = trl.SFTConfig(
        output_dir=str(tmp_path / "out"), report_to="none", use_cpu=True, bf16=False, max_steps=1, max_length=None,
        save_strategy="no", gradient_checkpointing=False,
    )  # fmt: skip
    folder = vlm(FAMILY)
    trainer = trl.SFTTrainer(
        model=AutoModelForImageTextToText.from_pretrained(folder),
        args=config,
        train_dataset=rows,
        processing_class=AutoProcessor.from_pretrained(folder, image_seq_len=4),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["pixel_values"].shape[:2] == (2, 10)
    assert (batch["labels"] != -100).any(dim=1).all()
    trainer.train()


@pytest.mark.slow  # importing verl takes seconds
@pytest.mark.parametrize("images", ["bytes", "paths"])
def test_verl_loads_images(images: str, run: Path, vlm: Any, tmp_path: Path) -> None:
    path = export(run, tmp_path, "--format", "verl", "--images", images)
    batch = load_with_verl(path, vlm(FAMILY), images=True)
    (message,) = batch["raw_prompt"][0]
    assert [part["type"] for part in message["content"]] == ["text", "image", "text", "image", "text"]
    shown = [part["image"] for part in message["content"] if part["type"] == "image"]
    assert shown == [digest(pixels(FIRST)), digest(pixels(SECOND))]
    assert batch["reward_model"][1] == {"style": "rule", "ground_truth": "red"}
