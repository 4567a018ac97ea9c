"""Files of tensors: model folders, and the folders of sharded tensors in a checkpoint.

A model's folder is written with new weights, and all other files are copied byte for byte from the folder that the
model was loaded from.

Tensors of several processes are in one file for each process that wrote them; each process writes and reads only its
own part (`torch.distributed.checkpoint`). Such a folder can be read by another number of processes, or by one. The
file's header says which part of each tensor it holds; nothing is pickled.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from engine.errors import TrainError
from engine.tokens.catalogue import MANIFEST
from engine.train.optimizers import local_of

if TYPE_CHECKING:
    from engine.train.distributed import ProcessGroup

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


def serving_dtypes(folder: Path) -> tuple[torch.dtype | None, set[str]]:
    """The number types in which a server keeps a model's weights: that of config.json, None if it names none, and the
    names of the weights that stay in float32.

    Some weights do if the model's files have them in float32 beside others in the type of config.json. `folder`: that
    of the model that was loaded.
    """
    from safetensors import safe_open

    usual = _config_dtype(folder)
    stored: dict[str, str] = {}
    for name, file in tensor_files(folder).items():
        with safe_open(file, "pt") as tensors:
            stored[name] = tensors.get_slice(name).get_dtype()
    if usual is None or {torch.bfloat16: "BF16", torch.float16: "F16"}.get(usual) not in stored.values():
        return usual, set()
    return usual, {name for name, dtype in stored.items() if dtype == "F32"}


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


def write_tensors(tensors: Mapping[str, torch.Tensor], folder: Path, process_group: ProcessGroup) -> None:
    """Write tensors. Every process must call this; a tensor that is not sharded is written by one of the processes that
    pass it.

    Args:
        tensors: By name, each of any shape; scalars are shape [].
        folder: The folder to write into; it is made.
        process_group: The processes of the training.

    Raises:
        TrainError: kind `diverged`: a tensor has a value that is not finite; nothing is written.
        OSError: a process cannot write.
    """
    floats = ((name, local_of(tensor)) for name, tensor in tensors.items() if tensor.is_floating_point())
    odd = next((name for name, part in floats if not part.isfinite().all()), None)
    names = [name for name in process_group.all_gather(odd) if name is not None]
    if names:
        raise TrainError(f"`{names[0]}` has values that are not finite; it is not saved", kind="diverged")
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach() for name, tensor in tensors.items()}
    writer, alone = HuggingFaceStorageWriter(str(folder), save_distributed=True), process_group.torch_group is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            save(state, storage_writer=writer, process_group=process_group.torch_group, no_dist=alone)
        except CheckpointException as error:
            raise OSError(_reason(error)) from error


def read_tensors(tensors: Mapping[str, torch.Tensor], folder: Path, process_group: ProcessGroup) -> None:
    """Read into tensors, in place: of a sharded tensor only this process's part. Every process must call this with the
    same names.

    Args:
        tensors: By name; each has the shape of the tensor in the files, and any dtype.
        folder: A folder of safetensors files: of `write_tensors`, or a model's.
        process_group: The processes of the training.

    Raises:
        ValueError: the files have no tensor of a name, or one of another shape.
        OSError: a process cannot read.
    """
    reader, alone = HuggingFaceStorageReader(str(folder)), process_group.torch_group is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load(dict(tensors), storage_reader=reader, process_group=process_group.torch_group, no_dist=alone)
        except CheckpointException as error:
            raise ValueError(_reason(error)) from error


def stored_names(folder: Path) -> dict[str, tuple[int, ...]]:
    """The tensors of a folder by name, with their whole shapes. Only the headers are read."""
    about = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: tuple(tensor.size) for name, tensor in about.items()}  # type: ignore[union-attr]


def _reason(error: CheckpointException) -> str:
    return "; ".join(f"process {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items()))
