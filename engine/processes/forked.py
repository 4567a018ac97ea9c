"""A forked process that answers requests. It cannot block its parent, and no way to end looks like success.

An answer is a frame on a separate pipe that begins with the child's random token. If the child ends in any way
(`os._exit(0)`, `sys.exit`, a crash), writes anything else to the pipe, or exceeds its deadline, the parent raises a
`ChildError`.

    child = Child(lambda request, doing: request.upper(), memory=2**30)
    child.ask(b"text", seconds=10)
    child.close()
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import secrets
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from engine.errors import EngineError
from engine.processes.system import limit_cpu, send_signal, take_streams
from engine.terminal import visible

Answer = Callable[[bytes, Callable[[str], None]], bytes]
"""Takes a request, and a function that records the current activity; returns the answer."""
MAX_ANSWERED = 64 * 2**20
"""Maximum size of one answer, in bytes."""
MAX_PRINTED = 64 * 2**10
"""Bytes of a child's output that are kept."""
_NOTE = 200
"""Maximum length of a child's current activity, in bytes."""
_POLL = 0.05
"""Seconds between two checks whether the child has ended."""
_ASKED = struct.Struct(">Qd")
"""Before a request: its length, and the seconds for its answer."""
_HEAD = struct.Struct(">16sQ")
"""Before an answer: the child's token, and the answer's length."""


class ChildError(EngineError):
    """A child gave no answer; the message says why."""

    kind = "child_error"
    blame = "spec"


class Child:
    """One forked process.

    Args:
        answer: Called in the child with each request.
        memory: Bytes that the child may allocate in addition to its parent's.
        group: Whether it leads its own process group, so that processes that it starts end with it.
        capture: Whether its output is kept in `printed`; otherwise it goes where the parent's output goes.
    """

    def __init__(self, answer: Answer, *, memory: int, group: bool = True, capture: bool = False) -> None:
        self._token = secrets.token_bytes(16)
        self._note = mmap.mmap(-1, _NOTE)
        self._group = group
        self.printed = b""
        """The beginning of its output."""
        ask_out, ask_in = os.pipe()
        told_out, told_in = os.pipe()
        print_out, print_in = os.pipe() if capture else (-1, -1)
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = self._leader = os.fork()
        if self._pid == 0:
            try:
                gc.freeze()  # the parent's objects stay: collections look only at what the child makes
                gc.enable()
                _prepare(group, memory, print_in, keep=(ask_out, told_in))
                self._serve(answer, ask_out, told_in)
            except BaseException:  # noqa: BLE001  (nothing may go on as if this were the parent)
                os.write(2, visible(traceback.format_exc()).encode())
            finally:
                os._exit(70)
        _close(ask_out, told_in, print_in)
        self._ask, self._told, self._print = ask_in, told_out, print_out

    # ---- in the child

    def _doing(self, what: str) -> None:
        note = what.encode("utf-8", "replace")[: _NOTE - 1]
        self._note[: len(note) + 1] = note + b"\0"

    def _serve(self, answer: Answer, requests: int, answers: int) -> None:
        with open(requests, "rb") as asked, open(answers, "wb") as answered:
            while head := asked.read(_ASKED.size):
                length, seconds = _ASKED.unpack(head)
                request = asked.read(length)
                with contextlib.suppress(OSError, ValueError):
                    limit_cpu(seconds + 1)  # it ends so even if its parent is gone
                reply = answer(request, self._doing)
                answered.write(_HEAD.pack(self._token, len(reply)) + reply)
                answered.flush()
        os._exit(0)

    # ---- in the parent

    def ask(self, request: bytes, seconds: float) -> bytes:
        """Return the answer to a request. After a ChildError, the child has ended.

        Raises:
            ChildError: there is no answer within `seconds`, or the child ended.
        """
        try:
            return self._asked(request, time.monotonic() + seconds, seconds)
        except BaseException:
            self.close()
            raise

    def _asked(self, request: bytes, ends: float, seconds: float) -> bytes:
        with contextlib.suppress(BrokenPipeError), open(self._ask, "wb", closefd=False) as asking:
            asking.write(_ASKED.pack(len(request), seconds) + request)
        received = bytearray()
        ending = ""
        while True:
            left = ends - time.monotonic()
            if left <= 0:
                raise ChildError(f"it took more than {seconds:g} s{self._where()}")
            if not self._take(received, 0.0 if ending else min(left, _POLL)) and ending:
                raise ChildError(f"the process {ending}{self._where()}")
            if len(received) >= _HEAD.size:
                token, length = _HEAD.unpack(received[: _HEAD.size])
                if not secrets.compare_digest(token, self._token) or length > MAX_ANSWERED:
                    raise ChildError(f"the process sent an invalid answer{self._where()}")
                if len(received) >= _HEAD.size + length:
                    return bytes(received[_HEAD.size : _HEAD.size + length])
            pid, status = (0, 0) if ending else os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._pid = 0
                code = os.waitstatus_to_exitcode(status)
                ending = f"ended with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"

    def _take(self, received: bytearray, seconds: float) -> bool:
        """Read what the child wrote, and return whether there was anything; wait at most `seconds`."""
        open_ends = [end for end in (self._told, self._print) if end >= 0]
        poll = select.poll()
        for end in open_ends:
            poll.register(end, select.POLLIN)
        some = False
        for end, _ in poll.poll(seconds * 1000):
            data = os.read(end, 1 << 16)
            some = some or bool(data)
            if end == self._told:
                received += data
            else:
                self.printed = (self.printed + data)[:MAX_PRINTED]
            if not data:
                os.close(end)
                self._told, self._print = (-1 if opened == end else opened for opened in (self._told, self._print))
        if not open_ends:
            time.sleep(seconds)
        return some

    def _where(self) -> str:
        note = self._note[:_NOTE].partition(b"\0")[0].decode("utf-8", "replace")
        return f" ({note})" if note else ""

    def close(self) -> None:
        """End the process and, if it leads a group, the processes that it started."""
        if self._leader and self._group:
            send_signal(self._leader, group=True)
        self._leader = 0
        if self._pid:
            send_signal(self._pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
            self._pid = 0
        _close(self._ask, self._told, self._print)
        self._ask = self._told = self._print = -1


def _prepare(group: bool, memory: int, output: int, keep: tuple[int, int]) -> None:
    """Prepare the child: no input, limits, a process group, output into the pipe if there is one, no files of its
    parent."""
    import resource

    if group:
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this child
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    take_streams(output if output >= 0 else None, keep)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if output >= 0:
        sys.stdout = sys.stderr = open(1, "w", errors="replace", buffering=1, closefd=False)  # noqa: SIM115
    data = 0  # bytes of this process's data segment; 0 if not known
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        data = int(next(line for line in lines if line.startswith("VmData:")).split()[1]) * 1024
    for kind, most in ((resource.RLIMIT_DATA, memory + data), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(OSError, ValueError):
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


_REFUSED = (
    "socket.connect",
    "socket.bind",
    "socket.getaddrinfo",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
)
_refusing: list[bool] = []
"""Not empty if this process has the audit hook, which cannot be removed."""


def refuse_outside() -> None:
    """Forbid this process to use the network and to start programs, until it ends."""

    if _refusing:
        return
    _refusing.append(True)

    def refuse(event: str, arguments: tuple[object, ...]) -> None:
        if event in _REFUSED:
            raise PermissionError(f"{event} is refused while a spec is checked without its code")

    sys.addaudithook(refuse)


def _close(*ends: int) -> None:
    for end in ends:
        if end >= 0:
            with contextlib.suppress(OSError):
                os.close(end)
