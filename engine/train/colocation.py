"""Servers and trainer on the same GPUs in turn (`train.colocate`): while an update runs, the servers' memory is released."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import TYPE_CHECKING

import torch

from engine.backends.weight_target import weight_target

if TYPE_CHECKING:
    from engine.backends.backend import Backend


class LentMemory:
    """The memory of the servers' GPUs.

    Args:
        backend: The servers; None: the trainer has GPUs of its own.
    """

    def __init__(self, backend: Backend | None) -> None:
        self._backend = backend

    @asynccontextmanager
    async def lent(self, timed: Callable[[str], AbstractContextManager[None]]) -> AsyncIterator[None]:
        """Inside the block the GPUs are free for an update. The next push of weights gives the memory back."""
        if self._backend is None:
            yield
            return
        with timed("release"):
            await weight_target(self._backend).lend_memory()
        try:
            yield
        except BaseException:
            _free_cached()
            await weight_target(self._backend).take_memory_back()
            raise
        _free_cached()

    async def take_back(self) -> None:
        """Give the servers what no push of weights has given back."""
        if self._backend is not None:
            await weight_target(self._backend).take_memory_back()


def _free_cached() -> None:
    """Give GPU memory that torch holds for later allocations back."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
