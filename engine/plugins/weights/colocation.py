"""Servers and trainer on the same GPUs in turn (`train.colocate`): while an update runs, the servers' memory is
released.

SGLang releases the memory of its weights and of its KV cache, and takes them back one by one: weights before new
weights are loaded, the KV cache after the load, so that trainer and server never hold both in full. A wrong order ends
the server: to release while a request runs, to take back what was not released, to load weights into memory that was
released.

Invariant: a server that has released memory gets no request and no weights until it has taken the memory back. A server
that was started again in the meantime has released nothing, and is asked for nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import structlog
import torch

from engine.errors import BackendError
from engine.plugins.servers.pool import Pool, Server
from engine.plugins.sglang.client import SGLangBackend
from engine.plugins.sglang.control import KeptMemory
from engine.train.sync import LentMemory

if TYPE_CHECKING:
    from engine.backends.backend import Backend
    from engine.spec.load import LoadedSpec

log = structlog.get_logger(__name__)

Part = Literal["weights", "kv_cache"]
PARTS: tuple[Part, ...] = ("weights", "kv_cache")
"""Parts of a server's memory, in the order in which they are taken back."""
IDLE_SECONDS = 60.0
"""Time in which requests that were cancelled must have ended on the servers."""
MEMORY_SECONDS = 120.0
"""Time limit for one server to release memory or to take it back."""


@dataclass(eq=False)
class ServerMemory(KeptMemory, LentMemory):
    """The memory of all servers of a pool, whose GPUs the training uses as well.

    await memory.release()              # between two batches
    ...                                 # the update
    await memory.resume("weights")
    ...                                 # the new weights are loaded
    await memory.resume("kv_cache")
    """

    pool: Pool
    released: dict[str, tuple[str, list[Part]]] = field(default_factory=dict)
    """URL -> which process released memory, and the parts that it has not taken back."""
    out: bool = False
    """Whether the trainer has the memory now."""
    file: Path | None = None
    """Where it is written down which servers have released memory, so that the next process can have them take it
    back."""

    async def prepare(self, folder: Path | None) -> None:
        """Before the first request: undo what a training left that was killed, and check that every server can release
        memory.

        Args:
            folder: Folder of the training, in which released memory is written down.

        Raises:
            BackendError: A server was started without `--enable-memory-saver` (kind `wrong_server`), or does not take
                its memory back (kind `control_failed`).
        """
        if folder is not None:
            await asyncio.to_thread(folder.mkdir, mode=0o700, parents=True, exist_ok=True)
            self.file = folder / "released.json"
            if self.file.exists():
                self.released = msgspec.json.decode(self.file.read_bytes(), type=dict[str, tuple[str, list[Part]]])
                log.warning(
                    "servers take back the memory that they released to a training that was killed",
                    servers=list(self.released),
                )
                await self.resume()
        for server in self.pool.workers:
            if server.healthy and not (await server.json("GET", "/server_info")).get("enable_memory_saver"):
                raise BackendError(
                    f"{server.url} cannot release its memory, which `train.colocate` needs: start it with "
                    "--enable-memory-saver (package torch-memory-saver)",
                    kind="wrong_server",
                )

    async def release(self) -> None:
        """Have every server release its memory. It must have no request; those that were cancelled may take some
        seconds to end.

        Raises:
            BackendError: A server still works on requests (kind `busy`), or refuses (kind `control_failed`). All
                servers have their memory then.
        """
        servers = [server for server in self.pool.workers if server.healthy]
        await asyncio.gather(*(self._idle(server) for server in servers))
        self.out = True
        outcomes = await asyncio.gather(*(self._release(server) for server in servers), return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            await self.resume()
            raise failures[0]

    async def _idle(self, server: Server) -> None:
        running = 1
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                while True:
                    loads = (await server.json("GET", "/v1/loads"))["loads"]
                    running = sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in loads)
                    if not running:
                        return
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise BackendError(
                f"{server.url} still works on {running} requests {IDLE_SECONDS:g} s after the last episode of the "
                "batch, so it cannot release its memory; does another program use it?",
                kind="busy",
            ) from None

    async def _release(self, server: Server) -> None:
        try:
            process = await _process(server)
            await server.json("POST", "/release_memory_occupation", {"tags": list(PARTS)}, timeout=MEMORY_SECONDS)
        except BackendError as error:
            if error.kind == "unreachable" and server in self.pool.servers:
                self.pool.failed(server, str(error))
                return
            raise BackendError(f"{server.url} did not release its memory: {error}", kind="control_failed") from None
        self.released[server.url] = (process, list(PARTS))
        self._write()

    async def resume(self, *parts: Part) -> None:
        """Have the servers take these parts back, or all that they have released; nothing where nothing was released.

        Raises:
            BackendError: A server refuses (kind `control_failed`): most often the trainer has not left enough memory.
        """
        wanted = parts or PARTS
        if "kv_cache" in wanted:
            self.out = False
        servers = [server for server in self.pool.workers if server.healthy and server.url in self.released]
        outcomes = await asyncio.gather(*(self._resume(server, wanted) for server in servers), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _resume(self, server: Server, wanted: tuple[Part, ...]) -> None:
        process, left = self.released[server.url]
        left = list(left)
        self.released[server.url] = (process, left)
        try:
            if await _process(server) != process:  # it was started again, with all of its memory
                del self.released[server.url]
                self._write()
                return
            for part in [part for part in PARTS if part in wanted and part in left]:
                await server.json("POST", "/resume_memory_occupation", {"tags": [part]}, timeout=MEMORY_SECONDS)
                left.remove(part)
                self._write()
        except BackendError as error:
            if error.kind == "unreachable" and server in self.pool.servers:
                self.pool.failed(server, str(error))
                return
            raise BackendError(
                f"{server.url} did not take its memory back: {error}. Lower --mem-fraction-static, or set "
                "`train.memory.offload`",
                kind="control_failed",
            ) from None
        if not left:
            del self.released[server.url]
            self._write()

    def _write(self) -> None:
        if self.file is None:
            return
        if not self.released:
            self.file.unlink(missing_ok=True)
            return
        draft = self.file.with_name(f".{self.file.name}")
        draft.write_bytes(msgspec.json.encode(self.released))
        draft.replace(self.file)

    @asynccontextmanager
    async def lent(self, timed: Callable[[str], AbstractContextManager[None]]) -> AsyncIterator[None]:
        """See `LentMemory`.

        Raises:
            BackendError: A server still works on requests, or refuses; all servers have their memory then.
        """
        with timed("release"):
            await self.release()
        try:
            yield
        except BaseException:
            _free_cached()
            await self.resume()
            raise
        _free_cached()

    async def take_back(self) -> None:
        """See `LentMemory`."""
        await self.resume()

    async def catch_up(self, server: Server) -> None:
        """Bring the memory of a server that is back in line with that of the others, before it gets weights or
        requests.

        Raises:
            BackendError: It must wait until the trainer gives the memory back (kind `memory_released`).
        """
        if self.out:
            raise BackendError(
                f"{server.url} waits until the update is done: the trainer has its memory", kind="memory_released"
            )
        if server.url in self.released:
            await self._resume(server, PARTS)


async def _process(server: Server) -> str:
    """What tells a server's process from one that was started later at the same address."""
    info: dict[str, Any] = await server.json("GET", "/server_info")
    return f"{info.get('startup_time')} {info.get('random_seed')}"


def lend_memory(loaded: LoadedSpec, backend: Backend) -> LentMemory | None:
    """With `train.colocate`, what lends the memory of SGLang servers to the training."""
    train = loaded.spec.train
    if train is None or not train.colocate or not isinstance(backend, SGLangBackend):
        return None
    backend.control.memory = memory = ServerMemory(backend.pool)
    return memory


def _free_cached() -> None:
    """Give GPU memory that torch holds for later allocations back."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
