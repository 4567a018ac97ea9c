"""Model folders: the names of weights in a folder's files, and writing a folder with new weights.

Invariant: all files except weights are copied byte for byte from the folder that the model was loaded from.
"""

from __future__ import annotations

import json
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


def tensor_files(folder: Path) -> dict[str, Path]:
    """The safetensors file of a folder that has a tensor, by the tensor's name; empty if there are none."""
    from safetensors import safe_open

    files: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            files |= dict.fromkeys(tensors.keys(), file)
    return files


def tensor_facts(folder: Path) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Shape of each tensor in a folder's safetensors files, and whether it is of a floating-point type of 16 bits or
    more.

    Only the headers are read. Empty if there are none, or they cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    facts: dict[str, tuple[tuple[int, ...], bool]] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  it is not a mapping
                    part = tensors.get_slice(name)
                    facts[name] = (tuple(part.get_shape()), part.get_dtype() in ("F64", "F32", "F16", "BF16"))
    except (OSError, SafetensorError):
        return {}
    return facts


class ServingDtypes:
    """The number types in which a server keeps a model's weights: that of config.json.

    A model whose files have some weights in float32 beside others in the type of config.json keeps these in float32.
    """

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: The folder of the model that was loaded.
        """
        from safetensors import safe_open

        self.usual = _config_dtype(folder)
        """The type of config.json; None if it names none."""
        stored: dict[str, str] = {}
        for name, file in tensor_files(folder).items():
            with safe_open(file, "pt") as tensors:
                stored[name] = tensors.get_slice(name).get_dtype()
        usual = {torch.bfloat16: "BF16", torch.float16: "F16"}.get(self.usual) if self.usual is not None else None
        self._float32 = (
            {name for name, dtype in stored.items() if dtype == "F32"} if usual in stored.values() else set()
        )

    @property
    def mixed(self) -> bool:
        """Whether some weights are kept in float32 beside others."""
        return bool(self._float32)

    def cast(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Weights of any shapes, by their names in the files, in these types. Integers stay as they are."""
        return {
            name: tensor.to(torch.float32 if name in self._float32 else self.usual or tensor.dtype)
            if tensor.is_floating_point()
            else tensor
            for name, tensor in weights.items()
        }


def _config_dtype(folder: Path) -> torch.dtype | None:
    """The dtype that config.json names, of the text model if it is there alone. transformers wrote `torch_dtype`
    before."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    for part in (config, config.get("text_config") or {}):
        named = part.get("dtype") or part.get("torch_dtype")
        dtype = getattr(torch, named, None) if isinstance(named, str) else None
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            return dtype
    return None


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
    wanted = tensor_files(folder).keys()
    if wanted and wanted <= state.keys():
        return {name: state[name] for name in sorted(wanted)}
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, torch.Tensor] = dict(revert_weight_conversion(model, dict(state)))
    missing = sorted(wanted - converted.keys())
    if missing:
        raise TrainError(
            f"{folder} names {missing[0]!r} and {len(missing) - 1} other weights that {type(model).__name__} does not "
            "have: save the model again with transformers, and use that folder as `model.path`",
            kind="train_setup",
        )
    return {name: converted[name] for name in sorted(wanted)} if wanted else converted


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
                {name: _whole(tensor) for name, tensor in state.items()}, draft, max_shard_size=_SHARD
            )
            draft.chmod(0o755)
            if folder.exists():
                shutil.rmtree(folder)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise TrainError(f"cannot write {folder}: {error}", kind="checkpoint") from error


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape that covers its storage: experts, which files have one by one, are parts of one
    parameter."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
