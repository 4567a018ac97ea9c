"""Counts the bytes of tensors that are alive, on the CPU as on a GPU: every storage that a torch operation returns."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocatedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, `now` is the number of bytes of living storages that were made in it, and `peak` the largest `now`."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: dict[int, int] = {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def reset_peak(self) -> None:
        self.peak = self.now

    def add(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor of any shape, once, until it is freed."""
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:  # FSDP resizes storages
            self.now += size - self._seen[key]
        else:
            self.now += size
            weakref.finalize(storage, self._free, key)
            self._storages[key] = weakref.ref(storage)
        self._seen[key] = size
        if self.now > self.peak * 1.001:  # sizes are read again rarely: a peak is exact to 0.1 %
            self._measure()
            self.peak = max(self.peak, self.now)

    def _measure(self) -> None:
        """Read the sizes of all storages again: FSDP sets those of gathered weights to 0 without an operation."""
        for key, found in self._storages.items():
            storage = found()
            if storage is not None and storage.nbytes() != self._seen[key]:
                self.now += storage.nbytes() - self._seen[key]
                self._seen[key] = storage.nbytes()

    def _free(self, key: int) -> None:
        self.now -= self._seen.pop(key, 0)
        self._storages.pop(key, None)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for leaf in (*tree_leaves(found), *tree_leaves(args)):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return found
