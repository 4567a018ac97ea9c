"""The sandbox of an agent program: bubblewrap (`engine.isolation.sandbox`) with one way out, the endpoint.

The program has a network of its own, in which only 127.0.0.1 exists. A forwarder in the sandbox listens there on the endpoint's port, and hands each
connection on to a socket file of the engine. So the program finds the endpoint at its usual address, and reaches nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.isolation import sandbox
from engine.schemas.agent import AgentSandbox

INSIDE, HOME = "/episode", "/work"
"""The folders of the episode and of the program in the sandbox; these and /tmp can be written."""
SOCKET = "endpoint"
_OTHERS = 0o005
"""Permission bits with which other users may read a folder."""
_FORWARD = """
import os, resource, selectors, socket, sys
uid, limits, port, path, *command = sys.argv[1:]
if uid:
    os.setgroups([])
    os.setresgid(int(uid), int(uid), int(uid))
    os.setresuid(int(uid), int(uid), int(uid))
listener = socket.create_server(("127.0.0.1", int(port)), backlog=256)
if os.fork():
    listener.close()
    for pair in filter(None, limits.split(",")):
        name, value = pair.split("=")
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (int(value), int(value)))
    os.execv(command[0], command)
for fd in (0, 1, 2):
    os.dup2(os.open(os.devnull, os.O_RDWR), fd)
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
found, peer, unsent, ended, shut = selectors.DefaultSelector(), {}, {}, set(), set()
found.register(listener, READ)
def drop(*ends):
    for end in ends:
        if end in found.get_map():
            found.unregister(end)
        end.close(), peer.pop(end), unsent.pop(end), ended.discard(end), shut.discard(end)
def watch(end):
    events = (0 if end in ended or unsent[peer[end]] else READ) | (WRITE if unsent[end] else 0)
    if end in found.get_map():
        found.unregister(end)
    if events:
        found.register(end, events)
while True:
    for key, events in found.select():
        one = key.fileobj
        if one is listener:
            one, other = listener.accept()[0], socket.socket(socket.AF_UNIX)
            try:
                other.connect(path)
            except OSError:
                one.close(), other.close()
                continue
            for end, its in ((one, other), (other, one)):
                end.setblocking(False)
                peer[end], unsent[end] = its, b""
            watch(one), watch(other)
            continue
        if one not in peer:
            continue
        other = peer[one]
        try:
            if events & WRITE:
                unsent[one] = unsent[one][one.send(unsent[one]):]
            if events & READ:
                data = one.recv(65536)
                unsent[other] += data
                if not data:
                    ended.add(one)
            for end, its in ((one, other), (other, one)):
                if its in ended and not unsent[end] and end not in shut:
                    end.shutdown(socket.SHUT_WR)
                    shut.add(end)
        except BlockingIOError:
            continue
        except OSError:
            drop(one, other)
            continue
        if one in shut and other in shut:
            drop(one, other)
        else:
            watch(one), watch(other)
"""
"""Runs in the sandbox: becomes an unprivileged user, starts the forwarder, and executes the program with its limits."""


@dataclass(frozen=True)
class Confined:
    """How a program is started in the sandbox."""

    command: list[str]
    env: dict[str, str]
    uid: int | None
    """The user that it becomes; None: the engine's own. `close` gives it back."""

    def close(self) -> None:
        """Give the user back."""
        if self.uid is not None:
            sandbox.give_uid(self.uid)


def confine(
    settings: AgentSandbox, command: str, base: Path, folder: Path, port: int, env: Mapping[str, str]
) -> Confined:
    """Make the command line of a sandbox.

    Args:
        settings: What the program may read, and its limits.
        command: Its shell command.
        base: The spec's folder, which it may read and runs in.
        folder: The episode's folder, with the endpoint's socket; `INSIDE` in the sandbox.
        port: The endpoint's port.
        env: The program's variables.

    Raises:
        OSError: The sandbox does not work here, or the program could not read a folder.
    """
    if problem := sandbox.refusal():
        raise OSError(f"no sandbox: {problem}")
    root = os.getuid() == 0
    readable = _readable(settings, base)
    if root:
        closed = [path for path in readable if path.stat().st_mode & _OTHERS != _OTHERS]
        if closed:
            raise OSError(f"the user of the sandbox cannot read {closed[0]}: chmod o+rx it")
    uid = sandbox.take_uid() if root else None
    if uid is not None:
        for path in (folder, *folder.iterdir()):
            os.chown(path, uid, uid)
    inside = dict(env) | {"HOME": HOME, "TMPDIR": "/tmp"}
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH"):
        inside.pop(name, None)
    line = sandbox.system_of(root, inside, {INSIDE: folder})
    owner = ["--perms", "1777", "--size", str(settings.disk), "--tmpfs"]
    line += [*owner, HOME, *owner, "/tmp"]
    for path in readable:
        line += [*sandbox.parents(str(path)), "--ro-bind", str(path), str(path)]
    line += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", str(base.resolve())]
    limits = {"AS": settings.memory, "NPROC": settings.processes, "CORE": 0, "FSIZE": settings.disk}
    words = ",".join(f"{name}={value}" for name, value in limits.items() if value is not None)
    forward = [
        sandbox.host_python(),
        "-I",
        "-S",
        "-c",
        _FORWARD,
        str(uid or ""),
        words,
        str(port),
        f"{INSIDE}/{SOCKET}",
    ]
    return Confined([*line, "--", *forward, "/bin/sh", "-c", command], {}, uid)


def _readable(settings: AgentSandbox, base: Path) -> Sequence[Path]:
    """The folders that the program may read besides the system's: the spec's, that of its Python, and those of the spec."""
    found = [base.resolve(), *(Path(base, path).resolve() for path in settings.read)]
    if sys.prefix != sys.base_prefix:
        found.append(Path(sys.prefix).resolve())
    return list(dict.fromkeys(found))
