"""Tensors for another process on this host, as SGLang's `MultiprocessingSerializer` reads them.

What is sent is a pickle of `[(name, tensor), …]` in which a tensor is the name of its shared memory. It is written with
torch's own reductions, so SGLang need not be installed here; its unpickler knows no other globals than theirs.
"""

from __future__ import annotations

import base64
import io
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

from engine.errors import TrainError

BUCKET_BYTES = 256 << 20
"""Bytes of tensors that are in shared memory at once, but for a larger tensor, which goes alone."""
_SHARED_MEMORY = Path("/dev/shm")
_ALIGN = 64
"""Tensors begin at multiples of so many bytes."""
_SHARING_STRATEGY_LOCK = threading.Lock()


def buckets(weights: Mapping[str, torch.Tensor], most: int = BUCKET_BYTES) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The weights in pieces of at most `most` bytes, in their order; a larger tensor is a piece of its own."""
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


class SharedBuffer:
    """A piece of shared memory that buckets are laid into, one after the other. It is given back when it is dropped.

    A reader must be done with a bucket before the next one is laid.
    """

    def __init__(self, size: int) -> None:
        """
        Args:
            size: Bytes of the largest bucket, as `room` counts them.

        Raises:
            TrainError: Kind `train_setup`: there is not so much shared memory.
        """
        free = free_bytes()
        if free is not None and size > free:
            raise TrainError(
                f"{size >> 20} MiB of weights do not fit the {free >> 20} MiB that {_SHARED_MEMORY} has left: give it more "
                "(of a container: --shm-size), or use `train.weight_sync.method: disk`",
                kind="train_setup",
            )
        with _file_system_sharing():
            memory: Any = torch.empty(max(size, _ALIGN), dtype=torch.uint8)
            self._memory: torch.Tensor = memory.share_memory_()
        self._views: list[tuple[str, torch.Tensor]] = []

    def write(self, piece: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a bucket into it."""
        at = 0
        self._views = []
        for name, tensor in piece:
            place = self._memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor.detach())
            self._views.append((name, place))
            at += _padded(tensor.nbytes)

    def serialize(self) -> str:
        """What one reader of the bucket gets: base64 of a pickle. Readers are counted, so each needs one of its own."""
        buffer = io.BytesIO()
        with _file_system_sharing():
            ForkingPickler(buffer).dump(self._views)
        return base64.b64encode(buffer.getvalue()).decode()


def buffer_bytes(piece: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Bytes that a bucket takes on a buffer."""
    return sum(_padded(tensor.nbytes) for _, tensor in piece)


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


@contextmanager
def _file_system_sharing() -> Iterator[None]:
    """Shared memory goes by file name: a descriptor can only be handed to a process that knows this one's key."""
    sharing: Any = torch.multiprocessing
    with _SHARING_STRATEGY_LOCK:
        before = sharing.get_sharing_strategy()
        sharing.set_sharing_strategy("file_system")
        try:
            yield
        finally:
            sharing.set_sharing_strategy(before)


def free_bytes() -> int | None:
    """Shared memory that is left; None where the system does not say."""
    try:
        about = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return about.f_bavail * about.f_frsize
