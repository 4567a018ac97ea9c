"""A model's folder: under which names its files have the weights, and a new one with weights of ours.

Invariant: what is not weights is copied from the folder that the model was loaded from, byte for byte.
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
    """Names of the tensors in a folder's safetensors files; empty where there are none."""
    from safetensors import safe_open

    found: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found |= set(tensors.keys())
    return found


def under_file_names(model: Any, state: Mapping[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """A model's weights under the names of its folder's files.

    Args:
        model: The model of transformers, as it was loaded from `folder`.
        state: Its weights under its own names.
        folder: Where the files are.

    Raises:
        TrainError: The files have names that transformers does not give back.
    """
    wanted = tensor_names(folder)
    if wanted and wanted <= state.keys():
        return {name: state[name] for name in sorted(wanted)}
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, torch.Tensor] = dict(revert_weight_conversion(model, dict(state)))
    missing = sorted(wanted - found.keys())
    if missing:
        raise TrainError(
            f"{folder} names {missing[0]!r} and {len(missing) - 1} other weights that {type(model).__name__} has no "
            "counterpart for: save the model anew with transformers, and name that folder",
            kind="train_setup",
        )
    return {name: found[name] for name in sorted(wanted)} if wanted else found


def write_model(state: Mapping[str, torch.Tensor], source: Path, folder: Path) -> None:
    """Write weights, and beside them all that `source` has but weights.

    Args:
        state: Weights under their names in the files.
        source: A model's folder.
        folder: The new one; an older one in its place is exchanged for it.

    Raises:
        TrainError: Kind `checkpoint`: it cannot be written.
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
