"""A program as a process that ends with everything that it started: starts it through the keeper (keeper.py), reads its output.

Invariant: after `stop`, and after `ended` is done, no process of the program runs, unless it belongs to another user.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.plugins.confinement.sandbox import LEAST_FILE
from engine.processes.system import MessageSocket, script, send_signal

MOST_OUTPUT = 16_384
"""Bytes of a program's output that are kept: the last ones."""
MOST_PRINTED = 64 << 20
"""Bytes of output after which a program is killed."""
_LONGEST_LINE = 1 << 20
_KEEPER = Path(__file__).with_name("keeper.py")


class ProgramProcess:
    """One program. Its output and its end are read on the running event loop.

    Args:
        of_shell: Its exit status follows the convention of shells: 128 and the signal's number, for what it runs.
    """

    def __init__(self, *, of_shell: bool = False) -> None:
        self._of_shell = of_shell
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Its exit status, negative for a signal; done when all of its processes are dead."""
        self._output = bytearray()
        self._printed = 0
        self._own: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._mark = b""
        self._killed = False
        self._full = False
        self.reward: str | None = None
        """What a program in a sandbox left in its reward file."""

    async def start(
        self,
        command: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        mark: str,
        sandbox: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Start it, in a session of its own and with the standard input closed.

        Args:
            command: The path of a file that can be executed, and its arguments.
            cwd: The folder that it runs in.
            env: Its environment.
            mark: A secret in its environment, by which its processes are found if the guard was killed.
            sandbox: `reads` and `files` of a program in a sandbox, for the keeper.

        Raises:
            OSError: It could not be started.
        """
        self._mark = mark.encode()
        mine, theirs = socket.socketpair()
        read, write = os.pipe()
        try:
            with theirs:
                program = {"command": list(command), "cwd": str(cwd), "env": dict(env), **sandbox}
                _keeper().start(program, theirs.fileno(), write)
        except BaseException:
            mine.close()
            os.close(read)
            raise
        finally:
            os.close(write)
        reader, self._own = await asyncio.open_unix_connection(sock=mine, limit=_LONGEST_LINE)
        said = json.loads(await reader.readline() or '{"error": "its guard has ended"}')
        reading = asyncio.create_task(self._read(read))
        self._tasks = [reading, asyncio.create_task(self._wait(reader, reading))]
        if "error" in said:
            await self.stop()
            raise OSError(said["error"])

    @property
    def output(self) -> str:
        """The end of what it wrote to stdout and stderr."""
        words = bytes(self._output).decode("utf-8", "replace")
        if self._full:
            return f"{words}\n(killed: it has more files than `disk` allows; each counts at least {LEAST_FILE} bytes)"
        if self._printed > MOST_PRINTED:
            return f"{words}\n(killed: it printed more than {MOST_PRINTED >> 20} MiB)"
        return words

    async def stop(self) -> None:
        """Kill all of its processes, and wait until they are dead. A second call does nothing."""
        self._kill()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._own is not None:
            self._own.close()
            self._own = None

    def _kill(self) -> None:
        if self._own is not None and not self._killed and not self.ended.done():
            self._killed = True
            with suppress(ConnectionError):
                self._own.write(b"kill\n")

    async def _wait(self, reader: asyncio.StreamReader, reading: asyncio.Task[None]) -> None:
        """Wait until its guard says how it ended."""
        try:
            said = json.loads(await reader.readline() or "{}")
        except (ConnectionError, ValueError):
            said = {}
        if "status" not in said:  # the guard was killed, and the kernel killed the program
            await asyncio.to_thread(_kill_marked, self._mark)
        self.reward, self._full = said.get("reward"), said.get("full", False)
        await asyncio.wait([reading], timeout=1.0)  # nothing writes any more, unless a process of another user does
        reading.cancel()
        if not self.ended.done():
            status = said.get("status", -signal.SIGKILL)
            self.ended.set_result(128 - status if self._of_shell and 128 < status <= 128 + 64 else status)

    async def _read(self, pipe: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb", 0)
        )
        try:
            while chunk := await reader.read(1 << 16):
                self._output += chunk
                del self._output[:-MOST_OUTPUT]
                self._printed += len(chunk)
                if self._printed > MOST_PRINTED:  # it is read until it is dead, or a closed pipe could end it first
                    self._kill()
        finally:
            transport.close()


class _Keeper:
    """The keeper of this process."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.folder = tempfile.mkdtemp(prefix="agents-")
        """For the programs' files. The keeper removes it when this process is gone."""
        self._lock = threading.Lock()
        mine, theirs = socket.socketpair()
        with theirs:
            command = script(_KEEPER, str(theirs.fileno()), self.folder)
            env = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}  # of the interpreter
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=env
            )
        self._control = MessageSocket(mine)

    @property
    def runs(self) -> bool:
        """Whether it runs, as a child of this process."""
        return self.owner == os.getpid() and self._process.poll() is None

    def start(self, program: Mapping[str, Any], own: int, output: int) -> None:
        """Have a program started, with its guard's socket and its output."""
        with self._lock:
            self._control.send(program, [own, output])


_kept: list[_Keeper] = []
_keeping = threading.Lock()


def programs_folder() -> str:
    """The folder for temporary folders of programs of this process, which is removed however it ends."""
    return _keeper().folder


def _keeper() -> _Keeper:
    """The keeper of this process, started if there is none."""
    with _keeping:
        if not _kept or not _kept[0].runs:
            _kept[:] = [_Keeper()]
        return _kept[0]


def _kill_marked(mark: bytes) -> None:
    """Kill every process that has a mark in its environment, until there is none."""
    for _ in range(100):
        found = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if _has(path, mark)]
        for pid in found:
            send_signal(pid)
        if not found:
            return


def _has(environ: Path, mark: bytes) -> bool:
    try:
        return environ.parent.name != str(os.getpid()) and mark in environ.read_bytes()
    except OSError:
        return False
