"""Converts training rows to batches of tensors, with images, for a trainer's forward pass.

    vision = vision_of(store)                              # None for a model without vision
    rows = list(export_rows(store))                        # or read_rows(Path("rows.jsonl"))
    batch = collate(rows[:8], vision, pad_id=0)
    logits = model(**forward_inputs(batch)).logits

Invariants:
- An image's tensors are made and stored once, also if many rows have the image. A file of rows has them beside it, in a
  separate folder, one file per image.
- `mm_token_type_ids` are those of the model's processor; position ids are computed by the model's code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import StoreError
from engine.schemas.experts import unpack_experts
from engine.store.images import stored_images
from engine.store.private import private_file, private_folder
from engine.tokens.images import DIGEST, Tensors

if TYPE_CHECKING:
    import torch

    from engine.store.reader import RunReader
    from engine.store.rows.columns import Columns
    from engine.tokens.vision import Vision

_BY_TOKEN: dict[str, tuple[Any, float | int]] = {
    "loss_mask": (np.int64, 0),
    "logprobs": (np.float32, 0.0),
    "advantages": (np.float32, 0.0),
    "token_rewards": (np.float32, 0.0),
    "weight_versions": (np.int64, -1),
    "turn_ids": (np.int64, -1),
}
"""Columns with one entry per token, and their padding values."""
_INPUTS = ("input_ids", "attention_mask", "mm_token_type_ids")


def vision_of(store: RunReader) -> Vision | None:
    """Load the image processor of the run's model; None if the model has no vision. Loads the tokenizer, but no
    weights.

    Raises:
        ModelError: The model's files no longer exist.
        RenderError: Its processor cannot be loaded.
    """
    from engine.tokens.loading import load_format

    vision = load_format(store.header.model, store.header.base).vision
    if vision is not None:
        vision.bank.read_from(stored_images(store))
    return vision


def images_folder(path: Path) -> Path:
    """Return the folder of the image tensors of a file of rows."""
    return path.with_name(f"{path.name}.images")


def tensor_file(path: Path, digest: str) -> Path:
    """Return the safetensors file of an image's tensors beside a file of rows."""
    return images_folder(path) / f"{digest.removeprefix(DIGEST)}.safetensors"


def _write_tensors(path: Path, digest: str, tensors: Callable[[str], Tensors]) -> None:
    """Write an image's tensors beside a file of rows if they are not there yet.

    The tensors keep their shapes.

    Raises:
        StoreError: The file cannot be written.
    """
    from safetensors.numpy import save

    file = tensor_file(path, digest)
    try:
        private_folder(file.parent, exist_ok=True)
        if not file.exists():
            draft = file.with_suffix(".part")
            private_file(draft).write_bytes(save(tensors(digest)))
            draft.replace(file)
    except OSError as error:
        raise StoreError(f"cannot write {file}: {error}") from error


def tensors_beside(path: Path, digest: str) -> Tensors | None:
    """Read an image's tensors beside a file of rows, in the shapes that were written; None if there is no file."""
    from safetensors.numpy import load_file

    file = tensor_file(path, digest)
    tensors: Tensors | None = load_file(file) if file.is_file() else None
    return tensors


def with_image_files(rows: Iterable[Columns], path: Path, vision: Callable[[], Vision | None]) -> Iterator[Columns]:
    """Yield the rows unchanged, and write their images' tensors beside `path`. `vision` is called at the first image.

    Raises:
        StoreError: A file cannot be written, or the run has images and its model has no vision.
    """
    seeing: Vision | None = None
    for columns in rows:
        for image in columns.get("images", ()):
            seeing = seeing or vision()
            if seeing is None:
                raise StoreError("the run has images, but its model has no vision: was the model replaced?")
            _write_tensors(path, image["image"], seeing.bank.tensors)
        yield columns


def read_rows(path: Path) -> Iterator[Columns]:
    """Read the rows of a JSONL or Parquet file of `engine export`, with arrays as NumPy.

    Raises:
        StoreError: The file cannot be read.
    """
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=256):
                    yield from map(_typed, batch.to_pylist())
            return
        with path.open("rb") as lines:
            for line in lines:
                yield _typed(json.loads(line))
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read {path}: {error}") from error


def _typed(columns: Columns) -> Columns:
    """Convert the lists of numbers of a row of a file back to arrays: int32 and float32 [tokens]."""
    typed = dict(columns)
    for name in ("input_ids", "loss_mask", "weight_versions", "turn_ids"):
        typed[name] = np.array(columns[name], np.int32)
    for name in ("logprobs", "token_rewards", "advantages"):
        # JSON has no NaN and no infinity: the export writes null.
        typed[name] = None if columns[name] is None else np.array(columns[name], np.float32)
    if columns.get("routed_experts") is not None:
        typed["routed_experts"] = unpack_experts(columns["routed_experts"])
    return typed


def beside(vision: Vision, path: Path) -> Vision:
    """Return `vision` with the tensors of the images beside a file of rows."""
    vision.bank.read_tensors_from(partial(tensors_beside, path))
    return vision


def collate(rows: Sequence[Columns], vision: Vision | None = None, *, pad_id: int = 0) -> dict[str, torch.Tensor]:
    """Collate rows into one batch, padded on the right.

    Args:
        rows: Rows of `export_rows` or `read_rows`.
        vision: The model's image processor; required if a row has images.
        pad_id: Padding id of `input_ids`.

    Returns:
        input_ids, attention_mask, loss_mask, turn_ids, weight_versions (int64), logprobs, advantages, token_rewards
        (float32): each [rows, longest]. For rows with routed experts: routed_experts (int32), [rows, longest, layers,
        top_k], -1 where they are not known. For a model with vision: mm_token_type_ids [rows, longest], the images'
        tensors under their family's names, and banned_token_ids [ids], which the sampler could not choose: a trainer
        removes them from its logits as well.

    Raises:
        StoreError: A row has images, and `vision` is None.
    """
    import torch

    ids = [np.asarray(columns["input_ids"], np.int64) for columns in rows]
    longest = max(map(len, ids))
    batch: dict[str, torch.Tensor] = {
        "input_ids": torch.from_numpy(_padded(ids, longest, np.int64, pad_id)),
        "attention_mask": torch.from_numpy(_padded([np.ones(len(of_row)) for of_row in ids], longest, np.int64, 0)),
    }
    for name, (dtype, fill) in _BY_TOKEN.items():
        values = [
            np.zeros(len(of_row)) if columns[name] is None else columns[name]
            for of_row, columns in zip(ids, rows, strict=True)
        ]
        batch[name] = torch.from_numpy(_padded(values, longest, dtype, fill))
    experts = [columns.get("routed_experts") for columns in rows]
    form = next((of_row.shape[1:] for of_row in experts if of_row is not None), None)
    if form is not None:
        routed = np.full((len(rows), longest, *form), -1, np.int32)
        for place, of_row in zip(routed, experts, strict=True):
            if of_row is not None:
                place[: len(of_row)] = of_row
        batch["routed_experts"] = torch.from_numpy(routed)
    if vision is None:
        if any(columns["images"] for columns in rows):
            raise StoreError("rows have images: pass `vision=vision_of(store)`")
        return batch
    types = [np.array(of_row) for of_row in vision.token_types([of_row.tolist() for of_row in ids])]
    batch["mm_token_type_ids"] = torch.from_numpy(_padded(types, longest, np.int64, 0))
    batch["banned_token_ids"] = torch.tensor(vision.banned)
    tensors = vision.tensors([[image["image"] for image in columns["images"]] for columns in rows])
    batch |= {name: torch.from_numpy(array.copy()) for name, array in tensors.items()}
    return batch


def forward_inputs(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the part of a batch that the model's forward pass takes. Idefics3 and SmolVLM take no token types.

    Shapes are those of the batch: [rows, tokens] for ids, mask and token types.
    """
    tiled = "pixel_attention_mask" in batch
    names = [name for name in _INPUTS if name in batch and not (tiled and name == "mm_token_type_ids")]
    others = {*_INPUTS, *_BY_TOKEN, "banned_token_ids", "routed_experts"}
    return {name: batch[name] for name in (*names, *(name for name in batch if name not in others))}


def _padded(rows: Sequence[Any], longest: int, dtype: Any, fill: float | int) -> np.ndarray:
    padded = np.full((len(rows), longest), fill, dtype)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
    return padded
