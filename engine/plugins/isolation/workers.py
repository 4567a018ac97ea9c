"""The engine's side of worker processes: the zygote, which forks them, and of each one its call, its deadline and its
end.

One zygote serves one engine, for any number of event loops, one after the other.

Invariant: a worker's answer is treated as bytes until it is validated against the expected contract. The worker is
killed for an answer that is too long or breaks the protocol.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from engine.errors import EngineError
from engine.processes.system import MessageSocket

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(2)); from engine.plugins.isolation.zygote import main; "
    "main()"
)
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Workers compute on one thread, because there are many workers and a process with threads cannot be forked safely."""
END_SECONDS = 10.0
"""Seconds that the zygote may take to kill its workers when the engine closes."""

TAIL = 4096
"""Number of characters of a worker's output that are shown when it dies."""
_DEATH_SECONDS = 10.0
"""Seconds to wait for the exit status of a process whose socket is closed."""


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


class ZygoteClient:
    """Starts the zygote, asks it for workers, and receives their exit statuses."""

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

    def _attach(self) -> MessageSocket:
        """Return the connection to the zygote, which the running loop reads from now on."""
        loop = asyncio.get_running_loop()
        if self._control is None:
            self._loop = None
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
                words = "the process that starts workers ended; workers are lost"
                future.set_exception(EngineError(words, kind="isolation", blame="spec"))
        for end in ended.values():
            end(-9)

    async def _ask(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        control = self._attach()
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked[message["id"]] = future
        control.send(message, descriptors)
        answer = await future
        if answer["told"] == "refused":
            raise EngineError(answer["message"], kind="isolation", blame="spec")
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
            EngineError: a limit cannot take effect here, or no process can be started.
        """
        self._attach()
        plan = (limits.key, len(self.folders))
        if plan not in self._planned:
            planned = await self._ask(
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
            self.reads_as_root |= planned["reads"]
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


class WorkerLost(Exception):
    """A worker died in a call, or was killed because of it.

    Attributes:
        why: `timeout`, `cpu`, `output` or `crashed`: the failure's kind, after the blame.
        words: What happened; a message puts it after the name of the called function.
        printed: The end of its output.
        later: Whether it was killed before this call.
    """

    def __init__(self, why: str, words: str, printed: str, *, later: bool = False) -> None:
        self.why, self.words, self.printed, self.later = why, words, printed, later
        super().__init__(words)


class CodeWorker:
    """One worker process. Use it from the loop that started it."""

    def __init__(self, zygote: ZygoteClient, limits: Limits) -> None:
        self._zygote = zygote
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.pid = 0
        self._id = 0
        self._buffer = bytearray()
        self._unsent = bytearray()
        self._printed = bytearray()
        self._output_bytes = 0
        """Bytes of output in this call."""
        self._answer: asyncio.Future[bytes] | None = None
        self._exited: asyncio.Future[int] = self.loop.create_future()
        self._reason: str | None = None
        """Why the engine killed it; None if it did not."""
        self.imported: set[str] = set()
        """Entry points whose modules were imported in it."""
        self.left: str | None = None
        """What an object left running in it, in words: then it serves no other episode."""
        self._socket: socket.socket | None = None
        self._output: int | None = None

    async def start(self) -> CodeWorker:
        """Fork the process.

        Raises:
            EngineError: a limit cannot take effect here, or no process can be started.
        """
        ours, theirs = socket.socketpair()
        output, printed = os.pipe()
        try:
            self._id, self.pid = await self._zygote.fork(self.limits, theirs.fileno(), printed, self._ended)
        except BaseException:
            ours.close()
            os.close(output)
            raise
        finally:
            theirs.close()
            os.close(printed)
        ours.setblocking(False)
        os.set_blocking(output, False)
        self._socket, self._output = ours, output
        self.loop.add_reader(ours, self._readable)
        self.loop.add_reader(output, self._read_output)
        return self

    @property
    def alive(self) -> bool:
        """Whether it can take a call."""
        return self._reason is None and not self._exited.done() and self._socket is not None

    async def request(self, *request: Any, seconds: float | None) -> bytes:
        """Send one request and wait for its answer.

        Returns:
            The answer's kind (one byte) and its JSON.

        Raises:
            WorkerLost: it died, or was killed at its deadline or because of its output or answer.
        """
        if not self.alive or self._socket is None:
            raise self._lost()
        what, *rest = request
        data = pickle.dumps((what, self.limits.cpu, *rest), pickle.HIGHEST_PROTOCOL)
        self._output_bytes = 0
        self._answer = self.loop.create_future()
        try:
            async with asyncio.timeout(seconds):
                self._unsent += struct.pack("<I", len(data)) + data
                self._write()
                answer = await self._answer
        except TimeoutError:
            self.kill("timeout")
            raise WorkerLost("timeout", f"did not answer within {seconds:g} s", self.printed) from None
        except asyncio.CancelledError:
            self.kill("cancelled")
            raise
        except EOFError:
            await asyncio.wait([self._exited], timeout=_DEATH_SECONDS)
            raise self._lost() from None
        finally:
            self._answer = None
        count = 1 + answer[0]
        if count > 1:
            self.left = answer[1:count].decode("utf-8", "replace")
        return answer[count:]

    def kill(self, reason: str) -> None:
        """Kill it, with every process that it started."""
        if self._reason is None:
            self._reason = reason
        self._zygote.kill(self._id)
        self._close()

    @property
    def printed(self) -> str:
        """The end of its output."""
        return self._printed.decode("utf-8", "replace")

    def _lost(self) -> WorkerLost:
        self._read_output()
        limits = self.limits
        if self._reason == "output":
            return WorkerLost(
                "output", f"wrote more than isolation.output ({limits.output} bytes) in one call", self.printed
            )
        if self._reason == "protocol":
            return WorkerLost("crashed", "wrote to the engine's connection to its worker", self.printed)
        if self._reason is not None:
            return WorkerLost("crashed", f"had been killed before ({self._reason})", self.printed, later=True)
        if not self._exited.done():
            self.kill("protocol")
            return WorkerLost("crashed", "closed its connection to the engine", self.printed)
        status = self._exited.result()
        if status == -signal.SIGXCPU:
            return WorkerLost("cpu", f"used more CPU time than isolation.cpu ({limits.cpu:g} s)", self.printed)
        if status < 0:
            name = signal.Signals(-status).name if -status in signal.valid_signals() else f"signal {-status}"
            hint = ", perhaps because memory ran out" if status == -signal.SIGKILL else ""
            return WorkerLost("crashed", f"ended its process by {name}{hint}", self.printed)
        return WorkerLost("crashed", f"ended its process with exit code {status}", self.printed)

    def _ended(self, status: int) -> None:
        """Handle the zygote's report that the process has ended."""
        if not self._exited.done():
            self._exited.set_result(status)
        self._readable()
        self._close()

    def _close(self) -> None:
        if self._socket is not None:
            self._read_output()
            if not self.loop.is_closed():
                self.loop.remove_reader(self._socket)
                self.loop.remove_writer(self._socket)
                if self._output is not None:
                    self.loop.remove_reader(self._output)
            self._socket.close()
            self._socket = None
            if self._output is not None:
                os.close(self._output)
                self._output = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(EOFError())

    def _write(self) -> None:
        """Send as much of the rest of a request as the socket accepts now."""
        if self._socket is None:
            return
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            self.loop.add_writer(self._socket, self._write)
            return
        except OSError:
            self._unsent.clear()  # it has ended; the zygote reports its status
        self.loop.remove_writer(self._socket)

    def _readable(self) -> None:
        """Read bytes of an answer."""
        while self._socket is not None:
            try:
                data = self._socket.recv(1 << 18)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                if self._answer is not None and not self._answer.done():
                    self._answer.set_exception(EOFError())
                self.loop.remove_reader(self._socket)
                return
            self._buffer += data
            if self._answer is None or self._answer.done():
                self.kill("protocol")  # it sent bytes without a request
                return
            if len(self._buffer) < 4:
                continue
            length = struct.unpack_from("<I", self._buffer)[0]
            if length > self.limits.output or length < 2:
                self.kill("output" if length > self.limits.output else "protocol")
                return
            if len(self._buffer) == 4 + length:
                answer = bytes(self._buffer[4:])
                self._buffer.clear()
                self._answer.set_result(answer)
                return
            if len(self._buffer) > 4 + length:
                self.kill("protocol")
                return

    def _read_output(self) -> None:
        """Read its output: keep the end of it, and kill the worker if a call prints too much."""
        while self._output is not None:
            try:
                data = os.read(self._output, 1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                if not self.loop.is_closed():
                    self.loop.remove_reader(self._output)
                os.close(self._output)
                self._output = None
                return
            self._printed += data
            del self._printed[:-TAIL]
            self._output_bytes += len(data)
            if self._output_bytes > self.limits.output and self._reason is None:
                self.kill("output")
                return
