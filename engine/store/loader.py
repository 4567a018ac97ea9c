"""Training rows -> batches of tensors, images and all: what a trainer's forward pass takes.

    vision = vision_of(store)                              # None for a model that sees nothing
    rows = list(export_rows(store))                        # or read_rows(Path("rows.jsonl"))
    batch = collate(rows[:8], vision, pad_id=0)
    logits = model(**forward_inputs(batch)).logits

Invariants:
- An image's tensors are made once and kept once, however many rows hold it; a file of rows has them beside it, in a
  folder of its own, one file an image.
- `mm_token_type_ids` are the model's own processor's; position ids are left to the model's own code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import StoreError
from engine.store.export import Row
from engine.store.images import stored_images
from engine.store.private import private_file, private_folder
from engine.tokens.images import DIGEST, Tensors

if TYPE_CHECKING:
    import torch

    from engine.store.reader import RunReader
    from engine.tokens.vision import Vision

_BY_TOKEN: dict[str, tuple[Any, float | int]] = {
    "loss_mask": (np.int64, 0),
    "logprobs": (np.float32, 0.0),
    "advantages": (np.float32, 0.0),
    "token_rewards": (np.float32, 0.0),
    "weight_versions": (np.int64, -1),
    "turn_ids": (np.int64, -1),
}
"""Columns with an entry for each token, and what stands where a sequence has ended."""
_INPUTS = ("input_ids", "attention_mask", "mm_token_type_ids")


def vision_of(store: RunReader) -> Vision | None:
    """The images of the run's model; None where it sees nothing. Loads the tokenizer, no weights.

    Raises:
        ModelError: The model's files are no longer there.
        RenderError: Its processor cannot be loaded.
    """
    from engine.tokens.loading import load_format

    loaded = store.header.loaded_spec()
    vision = load_format(loaded.spec.model, loaded.base).vision
    if vision is not None:
        vision.bank.read_from(stored_images(store))
    return vision


def images_folder(path: Path) -> Path:
    """Where the images' tensors of a file of rows are."""
    return path.with_name(f"{path.name}.images")


class TensorFolder:
    """One safetensors file for each image, named by its digest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written: set[str] = set()

    def _file(self, digest: str) -> Path:
        return self.folder / f"{digest.removeprefix(DIGEST)}.safetensors"

    def write(self, digest: str, tensors: Callable[[str], Tensors]) -> None:
        """Write an image's tensors, unless that was done.

        The tensors keep their shapes.

        Raises:
            StoreError: The file cannot be written.
        """
        from safetensors.numpy import save

        if digest in self._written:
            return
        path = self._file(digest)
        try:
            private_folder(self.folder, exist_ok=True)
            if not path.exists():
                draft = path.with_suffix(".part")
                private_file(draft).write_bytes(save(tensors(digest)))
                draft.replace(path)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error}") from error
        self._written.add(digest)

    def read(self, digest: str) -> Tensors | None:
        """An image's tensors, in the shapes that were written; None if they are not here."""
        from safetensors.numpy import load_file

        path = self._file(digest)
        found: Tensors | None = load_file(path) if path.is_file() else None
        return found


def with_image_files(rows: Iterable[Row], path: Path, vision: Callable[[], Vision | None]) -> Iterator[Row]:
    """Rows as they are, their images' tensors written beside `path`. `vision` is asked for at the first image.

    Raises:
        StoreError: A file cannot be written, or the run has images and its model sees none.
    """
    folder: TensorFolder | None = None
    seeing: Vision | None = None
    for row in rows:
        for image in row["images"]:
            if folder is None or seeing is None:
                folder, seeing = TensorFolder(images_folder(path)), vision()
                if seeing is None:
                    raise StoreError("the run has images, and its model sees none: is another model in its place?")
            folder.write(image["image"], seeing.bank.tensors)
        yield row


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a JSONL or Parquet file of `engine export`, arrays as numpy.

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


def _typed(row: Row) -> Row:
    """Lists of numbers as the arrays that they were."""
    typed: Row = {
        name: np.array(row[name], np.int32) for name in ("input_ids", "loss_mask", "weight_versions", "turn_ids")
    }
    for name in ("logprobs", "token_rewards", "advantages"):
        # JSON has no NaN and no infinity: they became null.
        typed[name] = None if row[name] is None else np.array(row[name], np.float32)
    return row | typed


def beside(vision: Vision, path: Path) -> Vision:
    """Let `vision` read the images' tensors beside a file of rows."""
    vision.bank.read_tensors_from(TensorFolder(images_folder(path)).read)
    return vision


def collate(rows: Sequence[Row], vision: Vision | None = None, *, pad_id: int = 0) -> dict[str, torch.Tensor]:
    """One batch, padded on the right.

    Args:
        rows: As `export_rows` or `read_rows` gives them.
        vision: The model's images; needed where a row has some.
        pad_id: Stands in `input_ids` where a sequence has ended.

    Returns:
        input_ids, attention_mask, loss_mask, turn_ids, weight_versions (int64), logprobs, advantages, token_rewards
        (float32): each [rows, longest]. For a model that sees: mm_token_type_ids [rows, longest], the images' tensors
        under their family's names, and banned_token_ids [ids], which the sampler never chose from: a trainer takes
        them out of its logits as well.

    Raises:
        StoreError: A row has images, and there is no `vision`.
    """
    import torch

    longest = max(len(row["input_ids"]) for row in rows)
    ids = [np.asarray(row["input_ids"], np.int64) for row in rows]
    batch: dict[str, torch.Tensor] = {
        "input_ids": torch.from_numpy(_padded(ids, longest, np.int64, pad_id)),
        "attention_mask": torch.from_numpy(_padded([np.ones(len(row)) for row in ids], longest, np.int64, 0)),
    }
    for name, (dtype, fill) in _BY_TOKEN.items():
        values = [np.zeros(len(row["input_ids"])) if row[name] is None else row[name] for row in rows]
        batch[name] = torch.from_numpy(_padded(values, longest, dtype, fill))
    if vision is None:
        if any(row["images"] for row in rows):
            raise StoreError("rows have images: hand over the model's vision, vision_of(store)")
        return batch
    types = [np.array(row) for row in vision.token_types([row.tolist() for row in ids])]
    batch["mm_token_type_ids"] = torch.from_numpy(_padded(types, longest, np.int64, 0))
    batch["banned_token_ids"] = torch.tensor(vision.banned)
    tensors = vision.tensors([[image["image"] for image in row["images"]] for row in rows])
    batch |= {name: torch.from_numpy(array.copy()) for name, array in tensors.items()}
    return batch


def forward_inputs(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The part of a batch that the model's forward pass takes; Idefics3's and SmolVLM's take no token types.

    The tensors are those of the batch, in their shapes: [rows, tokens] for ids, mask and token types.
    """
    tiled = "pixel_attention_mask" in batch
    names = [name for name in _INPUTS if name in batch and not (tiled and name == "mm_token_type_ids")]
    known = {*_INPUTS, *_BY_TOKEN, "banned_token_ids"}
    return {name: batch[name] for name in (*names, *(name for name in batch if name not in known))}


def _padded(rows: Sequence[Any], longest: int, dtype: Any, fill: float | int) -> np.ndarray:
    padded = np.full((len(rows), longest), fill, dtype)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
    return padded
