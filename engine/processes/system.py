"""What child processes need of the system: streams, limits, death with the parent, messages with descriptors.

Only the standard library is imported here, because programs use it that start without site packages (`script`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import socket
import stat
import sys
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

_PDEATHSIG, _SUBREAPER = 1, 36
_ENGINE = str(Path(__file__).parents[2])
_BOOT = (
    "import runpy, sys; sys.path.append(sys.argv[1]); del sys.argv[:2]; runpy.run_path(sys.argv[0], "
    "run_name='__main__')"
)


def script(path: Path, *arguments: str) -> list[str]:
    """The command of a program of the engine that imports nothing but this module and the standard library, so it
    starts soon and is small."""
    return [sys.executable, "-I", "-S", "-c", _BOOT, _ENGINE, str(path), *arguments]


def die_with_parent() -> None:
    """SIGKILL for this process when its parent's thread ends. Linux; a change of the user clears it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Make descendants that lose their parent children of this process. Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def take_streams(output: int | None, keep: Collection[int] = ()) -> None:
    """In a fork: no input, output into a descriptor (None: where it was), and no other open descriptors than these."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    if output is not None:
        os.dup2(output, 1)
        os.dup2(output, 2)
    start = 3
    for descriptor in sorted(keep):
        os.closerange(start, descriptor)
        start = descriptor + 1
    os.closerange(start, os.sysconf("SC_OPEN_MAX"))


def limit_cpu(seconds: float) -> None:
    """Let this process use so many more seconds of CPU time; the kernel ends it with SIGXCPU after them."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(used.ru_utime + used.ru_stime + seconds)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def send_signal(pid: int, number: int = signal.SIGKILL, *, group: bool = False) -> None:
    """Send a signal to a process, or to a process group, that may have ended or belong to another user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if group else os.kill)(pid, number)


def memory_file(content: bytes) -> int:
    """A descriptor from which a child process reads a content."""
    opened = os.memfd_create("engine")
    with open(opened, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(opened, 0, os.SEEK_SET)
    return opened


def read_small(path: Path | str, most: int, folder: int | None = None) -> bytes | None:
    """The first bytes of a regular file that a program wrote; None if there is none. Links are not followed.

    Args:
        path: The file.
        most: Number of bytes.
        folder: The descriptor of an open folder, to which the path is relative.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return None
    with os.fdopen(opened, "rb") as file:
        return file.read(most) if stat.S_ISREG(os.fstat(opened).st_mode) else None


class SentFolder:
    """An open folder that a program in a sandbox sends over a socket: the only files of a file system, whose number is
    known so."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)  # `recv_fds` of Python 3.11 does not hand its flags on
        self._channel = channel
        self.opened = -1
        """Its descriptor; -1 before the program has sent it."""

    def files(self) -> int:
        """The number of files in it, itself included; 0 before the program has sent it."""
        if self.opened < 0:
            with contextlib.suppress(OSError, IndexError):
                self.opened = socket.recv_fds(self._channel, 1, 1)[1][0]
        if self.opened < 0:
            return 0
        status = os.fstatvfs(self.opened)
        return status.f_files - status.f_ffree

    def close(self) -> None:
        """Close it."""
        if self.opened >= 0:
            os.close(self.opened)


class MessageSocket:
    """Messages over a Unix socket: lines of JSON, with descriptors."""

    def __init__(self, opened: socket.socket) -> None:
        self.socket = opened
        self.descriptors: deque[int] = deque()
        """Received ones, in their order."""
        self._rest = b""

    def send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message, also where the socket does not block otherwise: the other side does nothing but read.

        Raises:
            OSError: The other side has ended.
        """
        line = json.dumps(message).encode() + b"\n"
        blocks = self.socket.getblocking()
        self.socket.setblocking(True)
        try:
            sent = socket.send_fds(self.socket, [line], descriptors)
            self.socket.sendall(line[sent:])
        finally:
            self.socket.setblocking(blocks)

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that have come; None: the other side has ended."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.socket, 65_536, 64)
        except BlockingIOError:
            return []
        except OSError:
            return None
        self.descriptors += descriptors
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]
