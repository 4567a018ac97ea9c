"""The engine's side of one worker process: one call at a time, its deadline, and the failure when the process ends.

Invariant: a worker's answer is treated as bytes until it is validated against the expected contract. The worker is killed for
an answer that is too long or breaks the protocol.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import struct
from typing import Any

from engine.plugins.isolation.server import Limits, Server

TAIL = 4096
"""Number of characters of a worker's output that are shown when it dies."""
_DEATH_SECONDS = 10.0
"""Seconds to wait for the exit status of a process whose socket is closed."""


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


class Worker:
    """One worker process. Use it from the loop that started it."""

    def __init__(self, server: Server, limits: Limits) -> None:
        self._server = server
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

    async def start(self) -> Worker:
        """Fork the process.

        Raises:
            IsolationError: a limit cannot take effect here, or no process can be started.
        """
        ours, theirs = socket.socketpair()
        output, printed = os.pipe()
        try:
            self._id, self.pid = await self._server.fork(self.limits, theirs.fileno(), printed, self._ended)
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
        self._server.kill(self._id)
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
