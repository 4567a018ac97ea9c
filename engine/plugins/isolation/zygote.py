"""The process that forks workers: it has imported the modules that every worker needs, and runs no code of a spec.

A fork takes milliseconds, a new interpreter a third of a second, and workers share the memory of the modules
imported here. It is single-threaded, so that forking it is safe.

Protocol: lines of JSON over a socket. `plan`, `fork` (with two file descriptors: the worker's socket and the pipe for
its output) and `kill` are requests; `planned`, `refused`, `forked` and `ended` are answers. When the socket closes, the
engine has ended: every worker is killed, and this process ends.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.plugins.confinement import confine
from engine.plugins.confinement.confine import Confinement, Refused
from engine.processes.system import MessageSocket, adopt_orphans, send_signal, take_streams

_SWEEPS = 8
_CHANNEL = 3
"""The descriptor over which a worker gets its requests."""


@dataclass
class _Worker:
    id: int
    uid: int | None
    """Its own uid, which no other process uses."""
    folder: str | None
    """Its temporary folder."""


class Zygote:
    """Forks workers, kills them, and reports how they ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = MessageSocket(control)
        self._plans: dict[str, Confinement] = {}
        self._workers: dict[int, _Worker] = {}
        self._wake, wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Serve until the engine ends."""
        control = self._control.socket.fileno()
        try:
            while True:
                ready, _, _ = select.select([control, self._wake], [], [])
                if self._wake in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                    self._reap()
                if control in ready:
                    messages = self._control.receive()
                    if messages is None:
                        return
                    for message in messages:
                        self._handle(message)
        finally:
            for pid in list(self._workers):
                worker = self._workers.pop(pid)
                send_signal(pid)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
                self._sweep(pid, worker)

    def _say(self, **message: Any) -> None:
        with contextlib.suppress(OSError):
            self._control.send(message)

    def _handle(self, message: dict[str, Any]) -> None:
        match message.pop("do"):
            case "plan":
                self._plan(**message)
            case "fork":
                self._fork(**message)
            case "kill":
                for pid, worker in list(self._workers.items()):
                    if worker.id == message["id"]:
                        send_signal(pid)  # `_reap` removes the rest

    def _plan(
        self, id: int, key: str, memory: int, processes: int | None, user: str | None, folders: list[str]
    ) -> None:
        try:
            self._plans[key] = confine.plan(memory, processes, user, folders)
        except (Refused, OSError) as error:
            self._say(told="refused", id=id, message=str(error))
        else:
            planned = self._plans[key]
            self._say(told="planned", id=id, reads=planned.reads)

    def _fork(self, id: int, key: str) -> None:
        channel, output = self._control.descriptors.popleft(), self._control.descriptors.popleft()
        planned = self._plans[key]
        folder = None
        uid = None
        try:
            if planned.uid is not None and planned.processes is not None:
                uid = confine.free_uid({worker.uid for worker in self._workers.values() if worker.uid is not None})
                planned = replace(planned, uid=uid, gid=uid)
            if planned.uid is not None:
                folder = tempfile.mkdtemp(prefix="engine-worker-")
                os.chown(folder, planned.uid, planned.gid)
            pid = os.fork()
            if pid == 0:
                self._become(planned, channel, output, folder)
        except (OSError, Refused) as error:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            self._say(told="refused", id=id, message=f"no worker process could be started: {error}")
            return
        finally:
            os.close(channel)
            os.close(output)
        self._workers[pid] = _Worker(id, uid, folder)
        self._say(told="forked", id=id, pid=pid)

    def _become(self, planned: Confinement, channel: int, output: int, folder: str | None) -> None:
        """Run the child's side of a fork. Never returns."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            take_streams(output, keep=[channel])
            if channel != _CHANNEL:
                os.dup2(channel, _CHANNEL)
                os.close(channel)
            os.set_inheritable(_CHANNEL, False)
            if folder is not None:
                os.environ.update(HOME=folder, TMPDIR=folder)
                tempfile.tempdir = None
            confine.apply(planned)
            from engine.plugins.isolation import child

            child.WorkerCode(socket.socket(fileno=_CHANNEL)).run()
            status = 0
        except BaseException as error:  # noqa: BLE001  (reported before the process ends)
            with contextlib.suppress(OSError):
                os.write(2, f"the worker failed: {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(status)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            worker = self._workers.pop(pid, None)
            if worker is not None:
                self._sweep(pid, worker)
                self._say(told="ended", id=worker.id, status=os.waitstatus_to_exitcode(status))

    def _sweep(self, pid: int, worker: _Worker) -> None:
        """Kill every remaining process of a dead worker, and remove its temporary folder."""
        send_signal(pid, group=True)
        if worker.uid is not None:
            _kill_all_of(worker.uid)
        # The kernel gives processes that left its group to the nearest subreaper, which is this process.
        for _ in range(_SWEEPS):
            orphans = [child for child in _children() if child not in self._workers]
            for orphan in orphans:
                send_signal(orphan)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(orphan, 0)
            if not orphans:
                break
        if worker.folder is not None:
            shutil.rmtree(worker.folder, ignore_errors=True)


def _kill_all_of(uid: int) -> None:
    """Kill all processes of a uid at once, so that a fork bomb cannot outrun it."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def _children() -> list[int]:
    """Children of this process; empty if the kernel does not list them."""
    try:
        return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def main() -> None:
    """Serve the engine at the other end of descriptor `argv[1]`."""
    from engine import plugin
    from engine.plugins.isolation import child  # noqa: F401  (imported once, for all workers)

    plugin.installed()  # the same: entry points of plugins ask it
    control = socket.socket(fileno=int(sys.argv[1]))
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the engine decides when workers end
    gc.collect()
    gc.freeze()
    Zygote(control).serve()
