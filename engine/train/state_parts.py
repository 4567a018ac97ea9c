"""Named parts of a checkpoint: whoever has state that a resumed training needs declares a part for it.

    parts = {"policy": StatePart(1, save, load)}       # file policy.safetensors, version 1

A checkpoint lists its parts with their versions. A part that a training does not have, or has in another version, is refused
by name; no part is skipped in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.errors import TrainError


@dataclass(frozen=True, slots=True)
class StatePart:
    """One part: tensors in a safetensors file of its own."""

    version: int
    """Version of the file's content."""
    save: Callable[[Path], None]
    """Write the file, with `save_tensors`."""
    load: Callable[[Path], None]
    """Load the file. It may raise ValueError, KeyError or RuntimeError where the file belongs to other settings."""


def save_tensors(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write tensors to a safetensors file.

    Args:
        tensors: By name, each of any shape; scalars are shape [].
        file: The file.

    Raises:
        TrainError: kind `diverged`: a tensor has a value that is not finite.
    """
    seen: set[int] = set()
    whole = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        if plain.is_floating_point() and not bool(plain.isfinite().all()):
            raise TrainError(f"`{name}` has values that are not finite; it is not saved", kind="diverged")
        if plain.data_ptr() in seen:  # safetensors refuses tensors that share memory
            plain = plain.clone()
        seen.add(plain.data_ptr())
        whole[name] = plain
    save_file(whole, file)
