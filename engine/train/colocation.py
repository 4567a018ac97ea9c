"""Servers and trainer on the same GPUs in turn: while an update runs, the servers' memory is lent to it, by a plugin."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from engine.plugin import Hook
from engine.schemas.sections import used_plugins

if TYPE_CHECKING:
    from engine.backends.backend import Backend
    from engine.spec.load import LoadedSpec


class LentMemory:
    """The memory of the servers' GPUs, which the servers keep: the trainer has GPUs of its own."""

    @asynccontextmanager
    async def lent(self, timed: Callable[[str], AbstractContextManager[None]]) -> AsyncIterator[None]:
        """Inside the block the GPUs are free for an update. The next push of weights gives the memory back."""
        yield

    async def take_back(self) -> None:
        """Give the servers what no push of weights has given back."""


LEND_MEMORY: Hook[Callable[[LoadedSpec, Backend], LentMemory | None]] = Hook("lend_memory")
"""Lets the servers of a training's backend, which is not started yet, lend their memory; None if the spec does not ask for it."""


def open_memory(loaded: LoadedSpec, backend: Backend) -> LentMemory:
    """The memory of the servers of a training. `backend`: not started yet."""
    lent = (lend(loaded, backend) for lend in LEND_MEMORY.all(used_plugins(loaded.spec)))
    return next((memory for memory in lent if memory is not None), LentMemory())
