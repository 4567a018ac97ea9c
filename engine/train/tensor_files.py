"""Tensors, sharded or not, in safetensors files: each process writes and reads only its own part
(`torch.distributed.checkpoint`).

A folder has one file for each process that wrote it. It can be read by another number of processes, or by one. The
file's header says which part of each tensor it holds; nothing is pickled.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from engine.errors import TrainError
from engine.train.optimizers import local_of

if TYPE_CHECKING:
    from engine.train.distributed import ProcessGroup


def write_tensors(tensors: Mapping[str, Tensor], folder: Path, process_group: ProcessGroup) -> None:
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
    odd = next((name for name, tensor in tensors.items() if not _finite(local_of(tensor))), None)
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


def read_tensors(tensors: Mapping[str, Tensor], folder: Path, process_group: ProcessGroup) -> None:
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


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _reason(error: CheckpointException) -> str:
    return "; ".join(f"process {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items()))
