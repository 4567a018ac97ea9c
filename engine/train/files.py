"""Model folders: the names of weights in a folder's files, and writing a folder with new weights.

Invariant: all files except weights are copied byte for byte from the folder that the model was loaded from.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engine.errors import TrainError
from engine.tokens.catalogue import MANIFEST

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_SHARD = "5GB"


def tensor_names(folder: Path) -> set[str]:
    """The names of the tensors in a folder's safetensors files; empty if there are none."""
    from safetensors import safe_open

    found: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found |= set(tensors.keys())
    return found


def tensor_facts(folder: Path) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Shape of each tensor in a folder's safetensors files, and whether it is of a floating-point type of 16 bits or more.

    Only the headers are read. Empty if there are none, or they cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[tuple[int, ...], bool]] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  it is not a mapping
                    part = tensors.get_slice(name)
                    found[name] = (tuple(part.get_shape()), part.get_dtype() in ("F64", "F32", "F16", "BF16"))
    except (OSError, SafetensorError):
        return {}
    return found


def under_file_names(model: Any, state: Mapping[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """A model's weights under the names that its files use.

    The tensors keep their shapes.

    Args:
        model: The transformers model, loaded from `folder`.
        state: The weights under the model's own names.
        folder: Folder of the model's files.

    Raises:
        TrainError: kind `train_setup`: the files have names that transformers cannot map back to.
    """
    wanted = tensor_names(folder)
    if wanted and wanted <= state.keys():
        return {name: state[name] for name in sorted(wanted)}
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, torch.Tensor] = dict(revert_weight_conversion(model, dict(state)))
    missing = sorted(wanted - found.keys())
    if missing:
        raise TrainError(
            f"{folder} names {missing[0]!r} and {len(missing) - 1} other weights that {type(model).__name__} does not "
            "have: save the model again with transformers, and use that folder as `model.path`",
            kind="train_setup",
        )
    return {name: found[name] for name in sorted(wanted)} if wanted else found


def write_model(state: Mapping[str, torch.Tensor], source: Path, folder: Path) -> None:
    """Write a model folder: new weights, and copies of all other files of `source`.

    The tensors are written in their shapes.

    Args:
        state: Weights by their names in the files.
        source: Folder of the model that was loaded.
        folder: The folder to write. An older one is replaced.

    Raises:
        TrainError: kind `checkpoint`: it cannot be written.
    """
    from huggingface_hub import save_torch_state_dict

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            for file in sorted(source.iterdir()):
                if file.is_file() and file.name != MANIFEST and not file.name.endswith(_WEIGHTS):
                    shutil.copyfile(file, draft / file.name)
                elif file.is_dir() and file.name == "additional_chat_templates":
                    shutil.copytree(file, draft / file.name)
            save_torch_state_dict(
                {name: tensor.contiguous() for name, tensor in state.items()}, draft, max_shard_size=_SHARD
            )
            draft.chmod(0o755)
            if folder.exists():
                shutil.rmtree(folder)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise TrainError(f"cannot write {folder}: {error}", kind="checkpoint") from error
