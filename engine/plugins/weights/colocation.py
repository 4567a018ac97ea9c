"""Servers and trainer on the same GPUs in turn (`train.colocate`): while an update runs, the servers' memory is released."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import TYPE_CHECKING

import torch

from engine.backends.sglang.client import SGLangBackend
from engine.plugins.weights.memory import ServerMemory
from engine.train.sync import LentMemory

if TYPE_CHECKING:
    from engine.backends.backend import Backend
    from engine.spec.load import LoadedSpec


def lend_memory(loaded: LoadedSpec, backend: Backend) -> LentMemory | None:
    """With `train.colocate`, what lends the memory of SGLang servers to the training."""
    train = loaded.spec.train
    if train is None or not train.colocate or not isinstance(backend, SGLangBackend):
        return None
    memory = ServerMemory(backend.pool)
    backend.control.memory = memory
    return SharedGpus(memory)


class SharedGpus(LentMemory):
    """The memory of servers whose GPUs the training uses as well."""

    def __init__(self, memory: ServerMemory) -> None:
        self._memory = memory

    @asynccontextmanager
    async def lent(self, timed: Callable[[str], AbstractContextManager[None]]) -> AsyncIterator[None]:
        """See `LentMemory`.

        Raises:
            BackendError: A server still works on requests, or refuses; all servers have their memory then.
        """
        with timed("release"):
            await self._memory.release()
        try:
            yield
        except BaseException:
            _free_cached()
            await self._memory.resume()
            raise
        _free_cached()

    async def take_back(self) -> None:
        """See `LentMemory`."""
        await self._memory.resume()


def _free_cached() -> None:
    """Give GPU memory that torch holds for later allocations back."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
