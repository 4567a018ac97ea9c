"""Sends tensors to another process on this host through shared memory, or on the same GPU through CUDA IPC, in the
format of SGLang's `MultiprocessingSerializer`.

The message is a pickle of `[(name, tensor), …]`; a tensor is pickled as the name of its shared memory, or as the handle
of its GPU memory. torch's own reductions write it, so SGLang need not be installed here, and SGLang's unpickler allows
only the globals that they use.
"""

from __future__ import annotations

import base64
import io
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import reductions as torch_reductions

from engine.errors import TrainError

BUCKET_BYTES = 256 << 20
"""Maximum bytes of tensors in shared memory at the same time. A larger tensor is sent by itself."""
_SHARED_MEMORY = Path("/dev/shm")
_ALIGN = 64
"""Alignment of tensors, in bytes."""
_SHARING_STRATEGY_LOCK = threading.Lock()


def buckets(weights: Mapping[str, torch.Tensor], most: int = BUCKET_BYTES) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Split weights, in order, into buckets of at most `most` bytes. A larger tensor is a bucket of its own.

    The tensors keep their shapes.
    """
    piece: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights.items():
        if piece and size + tensor.nbytes > most:
            yield piece
            piece, size = [], 0
        piece.append((name, tensor))
        size += tensor.nbytes
    if piece:
        yield piece


class SharedBlock:
    """A block of shared memory that holds one bucket at a time. It is freed when the object is deleted.

    All readers must be done with a bucket before the next one is written.
    """

    def __init__(self, size: int) -> None:
        """
        Args:
            size: Bytes of the largest bucket, as `buffer_bytes` counts them.

        Raises:
            TrainError: kind `train_setup`: there is not enough free shared memory.
        """
        try:
            free = shutil.disk_usage(_SHARED_MEMORY).free
        except OSError:  # the system does not report it
            free = size
        if size > free:
            raise TrainError(
                f"{size >> 20} MiB of weights do not fit in the {free >> 20} MiB that are free in {_SHARED_MEMORY}: "
                "increase it (for a container: --shm-size), or use `train.weight_sync.method: disk`",
                kind="train_setup",
            )
        with _file_system_sharing():
            memory: Any = torch.empty(max(size, _ALIGN), dtype=torch.uint8)
            self._memory: torch.Tensor = memory.share_memory_()
        self._views: list[tuple[str, torch.Tensor]] = []

    def write(self, piece: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a bucket into the buffer.

        Tensors of any shape, one after another.
        """
        self._views = _copied(piece, self._memory)

    def serialize(self) -> str:
        """The message for one reader: base64 of a pickle. torch counts readers, so make one message for each reader."""
        buffer = io.BytesIO()
        with _file_system_sharing():
            ForkingPickler(buffer).dump(self._views)
        return base64.b64encode(buffer.getvalue()).decode()


@dataclass(eq=False)
class DeviceBuffer:
    """Memory of a GPU that holds one bucket, for processes that see this GPU (CUDA IPC).

    Each bucket gets memory of its own: SGLang answers when its copies are queued on the GPU, which may be before they
    are done (slime's `update_weight_from_tensor.py` says so as well). torch frees the memory when the readers have
    closed it.

    Args:
        device: A GPU of this process.
    """

    device: torch.device
    views: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    def write(self, piece: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a bucket of tensors of any shapes to the GPU.

        Raises:
            TrainError: kind `train_setup`: the GPU has no memory left for it.
        """
        piece = list(piece)
        self.views = []
        try:
            memory = torch.empty(max(buffer_bytes(piece), _ALIGN), dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise TrainError(
                f"{buffer_bytes(piece) >> 20} MiB of weights do not fit in the memory of {self.device}: lower the "
                "servers' --mem-fraction-static, or use `train.weight_sync.method: disk`",
                kind="train_setup",
            ) from error
        self.views = _copied(piece, memory)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def serialize(self) -> str:
        """The message for one reader: base64 of a pickle of handles. The readers' answers end the use of the memory."""
        buffer = io.BytesIO()
        pickler: Any = ForkingPickler(buffer)
        pickler.dispatch_table[torch.Tensor] = reduce_by_uuid
        pickler.dump(self.views)
        return base64.b64encode(buffer.getvalue()).decode()


def reduce_by_uuid(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Reduce a tensor of any shape as torch does, with the UUID of its GPU in place of the index.

    The index of a GPU depends on CUDA_VISIBLE_DEVICES of each process. SGLang reads both (`patch_torch.py` of
    sglang.srt.utils).
    """
    reductions: Any = torch_reductions  # not typed
    rebuild, values = reductions.reduce_tensor(tensor)
    if rebuild is not reductions.rebuild_cuda_tensor:
        return rebuild, values
    uuid = str(torch.cuda.get_device_properties(values[_DEVICE]).uuid)
    return rebuild, (*values[:_DEVICE], uuid, *values[_DEVICE + 1 :])


_DEVICE = 6
"""Place of the GPU among the arguments of torch's `rebuild_cuda_tensor`."""


def _copied(piece: Iterable[tuple[str, torch.Tensor]], memory: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Copies of the tensors, one after another in `memory`."""
    at = 0
    views = []
    for name, tensor in piece:
        place = memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor.detach())
        views.append((name, place))
        at += _padded(tensor.nbytes)
    return views


def buffer_bytes(piece: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Bytes that a bucket needs in a buffer, with alignment.

    The tensors may have any shape.
    """
    return sum(_padded(tensor.nbytes) for _, tensor in piece)


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


@contextmanager
def _file_system_sharing() -> Iterator[None]:
    """Share memory by file name. A file descriptor could only be sent to a process that knows this process's auth
    key."""
    sharing: Any = torch.multiprocessing
    with _SHARING_STRATEGY_LOCK:
        before = sharing.get_sharing_strategy()
        sharing.set_sharing_strategy("file_system")
        try:
            yield
        finally:
            sharing.set_sharing_strategy(before)
