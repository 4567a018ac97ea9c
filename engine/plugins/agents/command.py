"""A program that is a shell command: its environment, its folder with task and reward, and its process, which the
keeper (keeper.py) starts.

Invariant: after `stop`, and after `ended` is done, no process of the program runs, unless it belongs to another user.
"""

from __future__ import annotations

import asyncio
import base64
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
from typing import Any

from engine.plugins.agents.confined import HOME, INSIDE, SOCKET, Confined, confine
from engine.plugins.agents.keeper import REWARD, remove
from engine.plugins.agents.program import Endpoint, ProgramBody
from engine.plugins.agents.rewards import PATH as REWARD_PATH
from engine.plugins.agents.server import Listener, server_of_loop
from engine.plugins.agents.spec import AgentSandbox
from engine.plugins.confinement.sandbox import LEAST_FILE, give_uid
from engine.processes.system import MessageSocket, read_small, script, send_signal

_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "SYSTEMROOT", "TMPDIR", "VIRTUAL_ENV")
"""Variables of the engine that a program gets. Others may be secret."""
_LONGEST_VARIABLE = 100_000
"""Characters of a task that fits into a variable; the operating system refuses longer ones."""
TASK_FILE = "task.json"
MOST_OUTPUT = 16_384
"""Bytes of a program's output that are kept: the last ones."""
MOST_PRINTED = 64 << 20
"""Bytes of output after which a program is killed."""
_LONGEST_LINE = 1 << 20
_KEEPER = Path(__file__).with_name("keeper.py")


class CommandProgram(ProgramBody):
    """A shell command. See `ProgramBody`.

    Args:
        command: The command.
        base: The folder that it runs in.
        env: Variables that it gets besides those of the engine.
        task: Its task.
        episode: The episode's id.
        sandbox: Its sandbox; None: it runs without one.
        answers: Files and folders that a sandbox hides from it.
    """

    def __init__(
        self,
        command: str,
        base: Path,
        env: Mapping[str, str],
        task: Mapping[str, Any],
        episode: str,
        sandbox: AgentSandbox | None = None,
        answers: Sequence[Path] = (),
    ) -> None:
        super().__init__()
        self._sandbox, self._answers = sandbox, answers
        self._confined: Confined | None = None
        self._socket: Listener | None = None
        self._command, self._base, self._env, self._task, self._episode = command, base, env, task, episode
        self._folder: Path | None = None
        self._reward: str | None = None
        """What a program in a sandbox left in its reward file."""
        self._kept = bytearray()
        """The end of its output."""
        self._printed = 0
        self._guard: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._mark = b""
        """A secret in its environment, by which its processes are found if the guard was killed."""
        self._killed = False

    async def start(self, endpoint: Endpoint) -> None:
        """Start it. Raises OSError if that is not possible."""
        self._folder = folder = Path(tempfile.mkdtemp(prefix="", dir=_keeper().folder))
        task = json.dumps(self._task, ensure_ascii=False)
        (folder / TASK_FILE).write_text(task, encoding="utf-8")
        shown, written = (folder, folder) if self._sandbox is None else (Path(INSIDE), Path(HOME))
        env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        env |= {
            "OPENAI_BASE_URL": f"{endpoint.address}/v1",
            "OPENAI_API_KEY": endpoint.key,
            "OPENAI_MODEL": endpoint.model,
            "ANTHROPIC_BASE_URL": endpoint.address,
            "ANTHROPIC_API_KEY": endpoint.key,
            "ANTHROPIC_MODEL": endpoint.model,
            "EPISODE_ID": self._episode,
            "EPISODE_TASK_FILE": str(shown / TASK_FILE),
            "EPISODE_REWARD_FILE": str(written / REWARD),
            "EPISODE_REWARD_URL": f"{endpoint.address}{REWARD_PATH}",
            "NO_PROXY": "127.0.0.1",
        }
        if len(task) <= _LONGEST_VARIABLE:
            env["EPISODE_TASK"] = task
        env |= self._env
        command, sandbox = ["/bin/sh", "-c", self._command], dict[str, Any]()
        if self._sandbox is not None:
            self._socket = await server_of_loop().listen_on_file(folder / SOCKET)
            port = int(endpoint.address.rpartition(":")[2])
            self._confined = await asyncio.to_thread(
                confine, self._sandbox, self._command, self._base, folder, port, env, self._answers
            )
            command, env = self._confined.command, {}
            sandbox = {
                "reads": [base64.b64encode(data).decode() for data in self._confined.reads],
                "files": self._confined.files,
            }
        self._mark = endpoint.key.encode()
        mine, theirs = socket.socketpair()
        read, write = os.pipe()
        try:
            with theirs:
                program = {"command": command, "cwd": str(self._base), "env": env, **sandbox}
                _keeper().start(program, theirs.fileno(), write)
        except BaseException:
            mine.close()
            os.close(read)
            raise
        finally:
            os.close(write)
        reader, self._guard = await asyncio.open_unix_connection(sock=mine, limit=_LONGEST_LINE)
        said = json.loads(await reader.readline() or '{"error": "its guard has ended"}')
        reading = asyncio.create_task(self._read(read))
        self._tasks = [reading, asyncio.create_task(self._wait(reader, reading))]
        if "error" in said:
            await self.stop()
            raise OSError(said["error"])

    async def stop(self) -> None:
        """Kill all of its processes, and wait until they are dead. A second call does nothing."""
        self._kill()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def _kill(self) -> None:
        if self._guard is not None and not self._killed and not self.ended.done():
            self._killed = True
            with suppress(ConnectionError):
                self._guard.write(b"kill\n")

    async def _wait(self, reader: asyncio.StreamReader, reading: asyncio.Task[None]) -> None:
        """Wait until its guard says how it ended."""
        try:
            said = json.loads(await reader.readline() or "{}")
        except (ConnectionError, ValueError):
            said = {}
        if "status" not in said:  # the guard was killed, and the kernel killed the program
            await asyncio.to_thread(_kill_marked, self._mark)
        self._reward = said.get("reward")
        await asyncio.wait([reading], timeout=1.0)  # nothing writes any more, unless a process of another user does
        reading.cancel()
        self.output = bytes(self._kept).decode("utf-8", "replace")
        if said.get("full"):
            self.output += f"\n(killed: it has more files than `disk` allows; each counts at least {LEAST_FILE} bytes)"
        elif self._printed > MOST_PRINTED:
            self.output += f"\n(killed: it printed more than {MOST_PRINTED >> 20} MiB)"
        if not self.ended.done():
            status = said.get("status", -signal.SIGKILL)
            self.ended.set_result(128 - status if self._sandbox is not None and 128 < status <= 128 + 64 else status)

    async def _read(self, pipe: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb", 0)
        )
        try:
            while chunk := await reader.read(1 << 16):
                self._kept += chunk
                del self._kept[:-MOST_OUTPUT]
                self._printed += len(chunk)
                if self._printed > MOST_PRINTED:  # it is read until it is dead, or a closed pipe could end it first
                    self._kill()
        finally:
            transport.close()

    async def reward(self) -> str | None:
        """What it wrote to its reward file; None if there is no file, or a link."""
        if self._sandbox is not None:
            return self._reward
        assert self._folder is not None
        written = await asyncio.to_thread(read_small, self._folder / REWARD, MOST_OUTPUT)
        return None if written is None else written.decode("utf-8", "replace")

    async def close(self) -> None:
        """Remove its folder, and give back what its sandbox has."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._confined is not None and self._confined.uid is not None:
            give_uid(self._confined.uid)
        self._confined = None
        if self._folder is not None:
            await asyncio.to_thread(remove, self._folder)
            self._folder = None


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
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=env
            )
        self._control = MessageSocket(mine)

    def start(self, program: Mapping[str, Any], reports: int, output: int) -> None:
        """Have a program started, with its guard's socket and its output."""
        with self._lock:
            self._control.send(program, [reports, output])


_kept: list[_Keeper] = []
_keeping = threading.Lock()


def _keeper() -> _Keeper:
    """The keeper of this process, started if there is none."""
    with _keeping:
        if not _kept or _kept[0].owner != os.getpid() or _kept[0].process.poll() is not None:
            _kept[:] = [_Keeper()]
        return _kept[0]


def _kill_marked(mark: bytes) -> None:
    """Kill every process that has a mark in its environment, until there is none."""
    for _ in range(100):
        pids = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if environ.parent.name != str(os.getpid()) and mark in environ.read_bytes():
                    pids.append(int(environ.parent.name))
        for pid in pids:
            send_signal(pid)
        if not pids:
            return
