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

BUCKET = 256 << 20
"""Bytes of tensors that are in shared memory at once, but for a larger tensor, which goes alone."""
_SHARED = Path("/dev/shm")
_STRATEGY = threading.Lock()


def buckets(weights: Mapping[str, torch.Tensor], most: int = BUCKET) -> Iterator[list[tuple[str, torch.Tensor]]]:
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


def share(piece: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Copies of tensors in shared memory, which is given back when the copies are dropped and read.

    Raises:
        TrainError: Kind `train_setup`: there is not enough of it.
    """
    piece = list(piece)
    needed = sum(tensor.nbytes for _, tensor in piece)
    free = free_bytes()
    if free is not None and needed > free:
        raise TrainError(
            f"{needed >> 20} MiB of weights do not fit the {free >> 20} MiB that {_SHARED} has left: give it more "
            "(of a container: --shm-size), or use `train.weights.via: disk`",
            kind="train_setup",
        )
    with _by_name():
        return [(name, _copy(tensor)) for name, tensor in piece]


@contextmanager
def _by_name() -> Iterator[None]:
    """Shared memory goes by file name: a descriptor can only be handed to a process that knows this one's key."""
    sharing: Any = torch.multiprocessing
    with _STRATEGY:
        before = sharing.get_sharing_strategy()
        sharing.set_sharing_strategy("file_system")
        try:
            yield
        finally:
            sharing.set_sharing_strategy(before)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copied: Any = tensor.detach().to("cpu", copy=True).contiguous()
    shared: torch.Tensor = copied.share_memory_()
    return shared


def dump(shared: list[tuple[str, torch.Tensor]]) -> str:
    """What one reader gets: base64 of a pickle. Each reader needs one of its own, since readers are counted."""
    buffer = io.BytesIO()
    with _by_name():
        ForkingPickler(buffer).dump(shared)
    return base64.b64encode(buffer.getvalue()).decode()


def free_bytes() -> int | None:
    """Shared memory that is left; None where the system does not say."""
    try:
        about = os.statvfs(_SHARED)
    except OSError:
        return None
    return about.f_bavail * about.f_frsize
