"""A checkpoint -> its named parts: each owner of state that a resumed training needs declares one part, and no part is skipped.

    parts = {"policy": StatePart(2, tensors, load)}       # folder `policy`, version 2

A checkpoint lists its parts with their versions. A part that a training does not have, or has in another version, is refused
by name; no part is skipped in silence. Every process writes and reads its own part of each tensor (`tensor_files.py`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class StatePart:
    """One part: tensors in a folder of its own."""

    version: int
    """Version of the part's content."""
    tensors: Callable[[], dict[str, torch.Tensor]]
    """The tensors to write, of this process."""
    load: Callable[[Path], None]
    """Read the folder. It may raise ValueError, KeyError or RuntimeError where the files belong to other settings."""


@contextmanager
def part_folder(checkpoint: Path, name: str) -> Iterator[Path]:
    """The folder of a part. A checkpoint of format 2 or older has one file for each part; then this is a folder with that file."""
    file = checkpoint / f"{name}.safetensors"
    if not file.is_file():
        yield checkpoint / name
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / file.name).symlink_to(file.resolve())
        yield Path(folder)
