"""The servers of `backend.launch`: started, watched, started again when they die, and stopped with the run.

Invariant: no server outlives the engine. Each one is the child of a warden (`warden.py`), which ends it when the
engine's end of a pipe closes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError

import structlog

from engine.errors import BackendError
from engine.processes.system import script
from engine.tokens.catalogue import cache_root

log = structlog.get_logger(__name__)

GRACE_SECONDS = 15.0
"""Time that a server gets to end by itself, in seconds; then it is killed."""
LOG_TAIL = 3000
"""Number of characters of a server's log that an error shows."""
_POLL_SECONDS = 0.25
_RESTART_PAUSE = 1.0
"""Pause before a dead server is started again, in seconds; it doubles each time."""
_WARDEN = Path(__file__).with_name("warden.py")
_gpus_in_use: set[int] = set()
"""GPUs of the servers that this process has started."""


class LaunchedServer:
    """One server: its process, its port, its log.

    Args:
        argv: Returns the command for a port.
        env: Variables that are added to the engine's environment.
        gpus: Indexes of its GPUs, among those that this process sees; empty: none.
    """

    def __init__(self, argv: Callable[[int], Sequence[str]], env: dict[str, str], gpus: tuple[int, ...]) -> None:
        self.argv, self.env, self.gpus = argv, env, gpus
        # Bound until the server starts, so that no other process gets the port in between.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self.port: int = self._reserved.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log: Path | None = None
        self.restarts = 0
        self.process: asyncio.subprocess.Process | None = None

    async def begin(self, log: Path) -> None:
        """Start the process; its output is appended to `log`.

        Raises:
            BackendError: The interpreter cannot be started (kind `launch`).
        """
        self._reserved.close()
        self.log = log
        argv = self.argv(self.port)
        opened = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(opened, "ab") as output:
            output.write(f"--- {' '.join(argv)}\n".encode())
            output.flush()
            try:
                self.process = await asyncio.create_subprocess_exec(
                    *script(_WARDEN, f"{GRACE_SECONDS:g}", *argv),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    env={**os.environ, **self.env, **_visible(self.gpus)},
                    start_new_session=True,  # Ctrl-C is for the engine, which ends its episodes first
                )
            except OSError as error:
                raise BackendError(f"a server could not be started: {error}", kind="launch") from None

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.returncode is None

    async def ready(self, seconds: float) -> None:
        """Wait until it answers its health check.

        Raises:
            BackendError: It ended, or did not answer in `seconds` (kind `launch`); the message has the end of its log.
        """
        ends = time.monotonic() + seconds
        while not await asyncio.to_thread(_healthy, self.url):
            if not self.alive:
                status = self.process.returncode if self.process else None
                raise BackendError(
                    f"a server ended with status {status} while it started; {self._end_of_log()}", kind="launch"
                )
            if time.monotonic() > ends:
                raise BackendError(
                    f"a server did not answer {self.url}/health within `launch.ready_timeout` ({seconds:g} s); "
                    f"{self._end_of_log()}",
                    kind="launch",
                )
            await asyncio.sleep(_POLL_SECONDS)

    def _end_of_log(self) -> str:
        assert self.log is not None
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL))
            tail = file.read().decode(errors="replace")
        return f"the end of {self.log}:\n{tail.strip()}"

    async def end(self) -> None:
        """End the process, and wait for it."""
        self._reserved.close()
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            await self.process.wait()  # the warden kills the server after the grace


class ServerProcesses:
    """All servers of one backend.

    servers = ServerProcesses([LaunchedServer(argv, {}, gpus=(0,))], ready_timeout=600, restarts=3)
    servers.urls
    await servers.start(folder)         # returns when all answer
    await servers.close()
    """

    def __init__(self, servers: Sequence[LaunchedServer], *, ready_timeout: float, restarts: int) -> None:
        self._servers = servers
        self._gpus = {gpu for server in servers for gpu in server.gpus}
        self._ready_timeout = ready_timeout
        self._restarts = restarts
        self._watches: list[asyncio.Task[None]] = []
        self._leased = False

    @property
    def urls(self) -> list[str]:
        """The URL of each server."""
        return [server.url for server in self._servers]

    async def start(self, folder: Path | None = None) -> None:
        """Start all servers, wait until they answer, and watch them from then on.

        Args:
            folder: Folder of the logs; made if it does not exist. Default: a folder of the cache.

        Raises:
            BackendError: A GPU is used by other servers of this process, or a server does not start (kind `launch`).
        """
        if taken := sorted(self._gpus & _gpus_in_use):
            raise BackendError(
                f"GPU {', '.join(map(str, taken))} of `backend.launch` is used by servers of another backend of this "
                "spec: name other GPUs in `gpus`",
                kind="launch",
            )
        if folder is None:
            folder = cache_root() / "servers" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        _gpus_in_use.update(self._gpus)
        self._leased = True
        await asyncio.to_thread(folder.mkdir, mode=0o700, parents=True, exist_ok=True)
        log.info("servers are starting", servers=len(self._servers), logs=str(folder))
        logs = [folder / f"server-{number}.log" for number in range(len(self._servers))]
        starts = [asyncio.create_task(self._begin(*begun)) for begun in zip(self._servers, logs, strict=True)]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            await _cancel(starts)
            await self.close()
            raise
        self._watches = [asyncio.create_task(self._watch(*begun)) for begun in zip(self._servers, logs, strict=True)]

    async def _begin(self, server: LaunchedServer, log: Path) -> None:
        await server.begin(log)
        await server.ready(self._ready_timeout)

    async def _watch(self, server: LaunchedServer, file: Path) -> None:
        """Start a server again when it dies. The pool takes it in again when it answers."""
        assert server.process is not None
        while True:
            status = await server.process.wait()
            if server.restarts == self._restarts:
                log.error("a server died too often and stays out", url=server.url, status=status, log=str(file))
                return
            await asyncio.sleep(_RESTART_PAUSE * 2**server.restarts)
            server.restarts += 1
            log.warning("a server died and is started again", url=server.url, status=status, log=str(file))
            try:
                await self._begin(server, file)
            except BackendError as error:
                log.warning("a server could not be started again", url=server.url, reason=str(error))
                await server.end()
            else:
                log.info("a server that died runs again", url=server.url, restarts=server.restarts)

    async def close(self) -> None:
        """Stop watching, and end all servers."""
        await _cancel(self._watches)
        self._watches = []
        await asyncio.gather(*(server.end() for server in self._servers))
        if self._leased:
            _gpus_in_use.difference_update(self._gpus)
            self._leased = False

    def stats(self) -> list[dict[str, Any]]:
        """URL, log and number of restarts of each server."""
        return [
            {"url": server.url, "log": str(server.log), "restarts": server.restarts, "alive": server.alive}
            for server in self._servers
        ]


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _visible(gpus: tuple[int, ...]) -> dict[str, str]:
    """`CUDA_VISIBLE_DEVICES` of a server: its GPUs, among those that this process sees."""
    if not gpus:
        return {}
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not seen:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    if max(gpus) >= len(seen):
        raise BackendError(
            f"`backend.launch.gpus` names GPU {max(gpus)}, and this process sees {len(seen)} "
            f"(CUDA_VISIBLE_DEVICES={','.join(seen)})",
            kind="launch",
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(seen[gpu] for gpu in gpus)}


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=25) as reply:
            return bool(reply.status == 200)
    except (URLError, OSError):
        return False
