"""A process that starts agent programs, and kills each with everything that it started.

    keeper.py FD FOLDER

It is a script (`engine.processes.system:script`) and runs no code of a spec. For each program it forks a guard, which
is a subreaper (PR_SET_CHILD_SUBREAPER, Linux): a process of the program that loses its parent becomes a child of the
guard, also if it left its session. So the guard's descendants are exactly the program's processes. The guard kills them
all when the program ends, when the engine asks for it, and when the engine is gone; then it says how the program ended,
and ends.

Protocol: the engine sends one JSON line over the socket FD for each program (`command`, `cwd`, `env`), with two
descriptors: the guard's own socket and the program's output. On its own socket the guard answers `{"pid": …}` or
`{"error": …}`, and at the end `{"status": …}`. Anything that the engine sends there, or its end, kills the program.
When the socket FD is closed, guards see that the engine is gone; after the last of them the keeper removes FOLDER, the
programs' temporary folders, and ends.

A program in a sandbox has two keys more. `reads` are texts in base64, which it finds at the descriptors 3, 4, …; after
them comes a socket, over which it sends the open folder that it may write. The guard kills it if that has more than
`files` files, and says at the end which `reward` is in it.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from engine.processes.system import (
    MessageSocket,
    SentFolder,
    adopt_orphans,
    die_with_parent,
    memory_file,
    read_small,
    send_signal,
    take_streams,
)

_POLL = 1.0
"""Seconds between two looks at whether the parent still runs."""
_LOOK = 0.2
"""Seconds between two counts of the files of a program in a sandbox."""
REWARD, _MOST_REWARD = "reward.json", 16_384
NO_FOLDER = "no-folder"
"""The folder in a program's folder that a sandbox shows in place of hidden ones."""
_LONGEST = 10.0
"""Seconds after which killing is given up, for processes of other users."""


def main() -> None:
    """Serve until the engine is gone, and remove what it leaves."""
    _serve()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, 0)  # it ignores SIGCHLD, so this waits for all guards
    folders = Path(sys.argv[2])
    for folder in folders.iterdir():
        remove(folder)
    folders.rmdir()


def remove(folder: Path) -> None:
    """Remove a program's folder, also if it has one that nobody can read."""
    import shutil  # the start of a program does not wait for it

    with contextlib.suppress(OSError):
        (folder / NO_FOLDER).rmdir()
    shutil.rmtree(folder, ignore_errors=True)


def _serve() -> None:
    control = MessageSocket(socket.socket(fileno=int(sys.argv[1])))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the engine decides when programs end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # guards are not waited for
    engine = os.getppid()
    while True:
        if not select.select([control.socket], [], [], _POLL)[0]:
            if os.getppid() != engine:  # a fork of the engine may still hold the socket open
                return
            continue
        programs = control.receive()
        if programs is None:
            return
        for program in programs:
            reports, output = control.descriptors.popleft(), control.descriptors.popleft()
            try:
                pid = os.fork()
            except OSError as error:
                os.write(reports, json.dumps({"error": str(error)}).encode() + b"\n")
                pid = -1
            if pid == 0:
                control.socket.close()
                for other in control.descriptors:
                    os.close(other)
                _guard(program, reports, output)
            os.close(reports)
            os.close(output)


def _guard(program: dict[str, Any], reports: int, output: int) -> NoReturn:
    """Start a program, and kill what is left of it at its end."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        adopt_orphans()
        wake, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _become(program, output, theirs.fileno())
        os.close(output)
        theirs.close()
        _say(reports, pid=pid)
        statuses, keeper, full = dict[int, int](), os.getppid(), False
        folder, poll = SentFolder(ours), _LOOK if "files" in program else _POLL
        while pid not in statuses:
            ready, _, _ = select.select([reports, wake], [], [], poll)
            if "files" in program:
                full = folder.files() > program["files"]
            if wake in ready:
                os.read(wake, 4096)
                _reap(statuses)
            if reports in ready or full or os.getppid() != keeper:
                break
        send_signal(pid, group=True)
        _kill_all(statuses)
        status = statuses.get(pid, -signal.SIGKILL)
        reward = None if folder.opened < 0 else read_small(REWARD, _MOST_REWARD, folder.opened)
        _say(reports, status=status, full=full, reward=None if reward is None else reward.decode("utf-8", "replace"))
    finally:
        os._exit(0)


def _become(program: dict[str, Any], output: int, channel: int) -> NoReturn:
    """Execute a program in this process."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        inherited: list[int] = []
        if "reads" in program:
            inherited = [memory_file(base64.b64decode(text)) for text in program["reads"]] + [channel]
        above = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in (*inherited, output)]
        for place, fd in enumerate(above[:-1], 3):
            os.dup2(fd, place)
        take_streams(above[-1], keep=range(3, 3 + len(inherited)))
        die_with_parent()
        os.chdir(program["cwd"])
        command = program["command"]
        os.execve(command[0], command, program["env"])
    except OSError as error:
        os.write(2, f"{program['command'][0]} cannot be started: {error}\n".encode())
    finally:
        os._exit(127)


def _say(reports: int, **message: Any) -> None:
    line = json.dumps(message).encode() + b"\n"
    with contextlib.suppress(OSError):
        while line:
            line = line[os.write(reports, line) :]


def _reap(statuses: dict[int, int]) -> bool:
    """Wait for the processes that have ended, and note their exit statuses; False if there is no child."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:
        return False
    return True


def _kill_all(statuses: dict[int, int]) -> None:
    """Kill all descendants until there is no child, and note the exit statuses of those that this process waited
    for."""
    deadline = time.monotonic() + _LONGEST
    while time.monotonic() < deadline and _reap(statuses):  # an orphan would be a child, so no child is no descendant
        stopped: set[int] = set()
        while new := _descendants() - stopped:  # stop them first, so that none starts others
            for pid in new:
                send_signal(pid, signal.SIGSTOP)
            stopped |= new
        for pid in stopped:
            send_signal(pid)
        time.sleep(0.001)


def _descendants() -> set[int]:
    """All descendants of this process that still run, from the table of processes."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = path.read_bytes().rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(path.parent.name))
    descendants, new = set(), [os.getpid()]
    while new:
        for child in children.get(new.pop(), ()):
            if child not in descendants:
                descendants.add(child)
                new.append(child)
    return descendants


if __name__ == "__main__":
    main()
