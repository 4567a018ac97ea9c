"""The engine's side of the zygote: starts it, asks it for workers, and receives their exit statuses.

One zygote serves one engine, for any number of event loops, one after the other.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from engine.errors import EngineError
from engine.processes.system import MessageSocket

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(2)); from engine.plugins.isolation.zygote import main; main()"
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Workers compute on one thread, because there are many workers and a process with threads cannot be forked safely."""
END_SECONDS = 10.0
"""Seconds that the zygote may take to kill its workers when the engine closes."""


class IsolationError(EngineError):
    """Worker processes cannot be started, or a limit cannot take effect; the message says what to change."""

    kind = "isolation"
    blame = "spec"


@dataclass(frozen=True)
class Limits:
    """Limits of one worker. Workers with equal limits are interchangeable."""

    memory: int
    cpu: float | None
    output: int
    processes: int | None
    user: str | None

    @property
    def key(self) -> str:
        """Key of the zygote's plan for such workers."""
        return json.dumps([self.memory, self.processes, self.user])


class Server:
    """Starts worker processes."""

    def __init__(self) -> None:
        self.folders: set[str] = set()
        """Folders that workers must be able to read, besides the import path."""
        self._process: subprocess.Popen[bytes] | None = None
        self._control: MessageSocket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ids = count(1)
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ended: dict[int, Callable[[int], None]] = {}
        self._planned: set[tuple[str, int]] = set()
        self.reads_as_root = False
        """Whether workers keep the capability to read every file, because some files are readable only by root."""

    @property
    def pid(self) -> int | None:
        """Process id of the zygote; None before the first worker."""
        return self._process.pid if self._process else None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-P", "-c", _BOOT, str(theirs.fileno()), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_ONE_THREAD},
                start_new_session=True,  # Ctrl-C is for the engine
            )
        ours.setblocking(False)
        self._control = MessageSocket(ours)
        self._planned.clear()

    def _attach(self) -> MessageSocket:
        """Return the connection to the zygote, which the running loop reads from now on."""
        loop = asyncio.get_running_loop()
        if self._control is None:
            self._loop = None
            self._start()
        assert self._control is not None
        if self._loop is not loop:
            self.detach()
            loop.add_reader(self._control.socket, self._readable)
            self._loop = loop
        return self._control

    def detach(self) -> None:
        """Stop reading the control socket in the current loop."""
        if self._loop is not None and self._control is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._control.socket)
        self._loop = None

    def _readable(self) -> None:
        assert self._control is not None
        messages = self._control.receive()
        if messages is None:
            self._on_end()
            return
        for message in messages:
            if message["told"] == "ended":
                ended = self._ended.pop(message["id"], None)
                if ended is not None:
                    ended(message["status"])
            else:
                asked = self._asked.pop(message["id"], None)
                if asked is not None and not asked.done():
                    asked.set_result(message)

    def _on_end(self) -> None:
        """Handle the end of the zygote, which ends all workers."""
        self.detach()
        if self._control is not None:
            self._control.socket.close()
        self._control = None
        asked, self._asked = self._asked, {}
        ended, self._ended = self._ended, {}
        for future in asked.values():
            if not future.done():
                future.set_exception(IsolationError("the process that starts workers ended; workers are lost"))
        for end in ended.values():
            end(-9)

    async def _ask(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        control = self._attach()
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked[message["id"]] = future
        control.send(message, descriptors)
        answer = await future
        if answer["told"] == "refused":
            raise IsolationError(answer["message"])
        return answer

    async def fork(self, limits: Limits, channel: int, output: int, ended: Callable[[int], None]) -> tuple[int, int]:
        """Start a worker.

        Args:
            limits: Its limits.
            channel: Its end of the socket for requests.
            output: Its end of the pipe for its output.
            ended: Called once with its exit status; negative for the signal that killed it.

        Returns:
            (the worker's id, its pid)

        Raises:
            IsolationError: a limit cannot take effect here, or no process can be started.
        """
        self._attach()
        plan = (limits.key, len(self.folders))
        if plan not in self._planned:
            found = await self._ask(
                {
                    "do": "plan",
                    "id": next(self._ids),
                    "key": limits.key,
                    "memory": limits.memory,
                    "processes": limits.processes,
                    "user": limits.user,
                    "folders": list(dict.fromkeys([*sorted(self.folders), *sys.path, sys.executable])),
                }
            )
            self._planned.add(plan)
            self.reads_as_root |= found["reads"]
        id = next(self._ids)
        self._ended[id] = ended
        try:
            answer = await self._ask({"do": "fork", "id": id, "key": limits.key}, [channel, output])
        except BaseException:
            self._ended.pop(id, None)
            self.kill(id)
            raise
        return id, answer["pid"]

    def kill(self, id: int) -> None:
        """Kill a worker with every process that it started; `ended` is called after its end."""
        if self._control is not None:
            try:
                self._control.send({"do": "kill", "id": id})
            except OSError:
                self._on_end()

    def close(self) -> None:
        """Kill every worker and end the zygote. A second call has no effect."""
        self.detach()
        if self._control is not None:
            self._control.socket.close()
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def run_in_new_loop(make: Callable[[], Any]) -> Any:
    """Run a coroutine to its end from code that is not `async`, whether or not a loop runs in this thread."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(asyncio.run(make()))
        except BaseException as error:  # noqa: BLE001  (raised again below)
            found.append(error)

    thread = threading.Thread(target=run, name="isolation-start")
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]
