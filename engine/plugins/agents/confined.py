"""The sandbox of an agent program: bubblewrap (`engine.plugins.confinement.sandbox`) with one way out, the endpoint.

The program has a network of its own, in which only 127.0.0.1 exists. A forwarder in the sandbox listens there on the
endpoint's port, and hands each connection on to a socket file of the engine. So the program finds the endpoint at its
usual address, and reaches nothing else.

All that it writes lies in one file system in memory, so `disk` counts it together. Its task and the socket can only be
read.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from engine.plugins.agents.keeper import NO_FOLDER
from engine.plugins.agents.spec import AgentSandbox
from engine.plugins.confinement import sandbox, system_calls
from engine.schemas.base import Struct

INSIDE, HOME = "/episode", "/work"
"""The folders of the episode and of the program in the sandbox; only the second can be written, and contains /tmp."""
SOCKET = "endpoint"
_OTHERS = {True: 0o005, False: 0o004}
"""Permission bits with which other users may read a folder, and a file."""
_OPEN_FILES = 4096
"""Maximum number of open files of each process."""
_ARGS, _CALLS, _CHANNEL = 3, 4, 5
"""Descriptors that bubblewrap and the forwarder find."""
_MOST_ENTRIES, _MOST_HIDDEN = 100_000, 1000
_PRIVATE = re.compile(r"\.|runs$|.*\.(db|sqlite3?)(-wal|-shm|-journal)?$", re.S)
"""Names of what is hidden: dot files, folders of runs, stores."""
_WORD_ENDS = re.compile(r"[\s'\"=;|&<>()]+")
_OF_RUN = ("run.db", "run.json", "train.json")
"""Files that only folders of runs and trainings have."""
_PACKAGES = ("node_modules", "site-packages")
"""Folders of installed packages, which are shown whole."""
_SPEC = re.compile(rb"^(spec *: *.?episode/|extends *:|scenarios *:)", re.M)
"""What stands in the files of specs and scenarios, which hold tasks and answers."""
_FORWARD = (
    sandbox.ENTER
    + """
import selectors, socket
port, path, *command = command
listener = socket.create_server(("127.0.0.1", int(port)), backlog=256)
if os.fork():
    listener.close()
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
)
"""Runs in the sandbox: becomes an unprivileged user, sets its limits, starts the forwarder, and executes the
program."""


class Confined(Struct, frozen=True, kw_only=True):
    """How a program is started in the sandbox."""

    command: list[str]
    reads: list[bytes]
    """What bubblewrap reads from its descriptors: options with the program's variables, which the table of processes
    must not show, and the filter of system calls."""
    files: int
    """Maximum number of its files."""
    uid: int | None
    """The user that it becomes; None: the engine's own. Who starts the program gives it back."""


def confine(
    settings: AgentSandbox,
    command: str,
    base: Path,
    folder: Path,
    port: int,
    env: Mapping[str, str],
    answers: Sequence[Path] = (),
) -> Confined:
    """Make the command line of a sandbox.

    Args:
        settings: What the program may read, and its limits.
        command: Its shell command.
        base: The spec's folder, which it may read, without what `_hidden` names, and runs in.
        folder: The episode's folder, with the endpoint's socket and the task.
        port: The endpoint's port.
        env: The program's variables.
        answers: Files and folders that are hidden too.

    Raises:
        OSError: The sandbox does not work here, or the program could not read a folder.
    """
    if problem := sandbox.refusal():
        raise OSError(f"no sandbox: {problem}")
    root, base = os.getuid() == 0, base.resolve()
    environment = [Path(sys.prefix).resolve()] if sys.prefix != sys.base_prefix else []
    readable = list(dict.fromkeys([*environment, *(Path(base, path).resolve() for path in settings.read)]))
    if root:
        for path in (base, *readable):
            needs = _OTHERS[path.is_dir()]
            if path.stat().st_mode & needs != needs:
                raise OSError(f"the user of the sandbox cannot read {path}: chmod o+r{'x' if path.is_dir() else ''} it")
    temporary = Path(tempfile.gettempdir()).resolve()
    if temporary == base:
        raise OSError(f"{base} is also the folder of temporary files, which are of other episodes too: move the spec")
    hidden = list(_hidden(base, readable, {temporary, *(path.resolve() for path in answers)}))
    if len(hidden) > _MOST_HIDDEN:
        raise OSError(
            f"{base} has more than {_MOST_HIDDEN} hidden files: give the spec and its program a folder of their own"
        )
    for word in filter(None, _WORD_ENDS.split(command)):
        named = Path(os.path.normpath(base / word))
        if cause := next((path for path in hidden if path == named or path in named.parents), None):
            name = cause.relative_to(base)
            raise OSError(f"`agent.run` names {word}, and {name} is hidden: write `agent.sandbox.read: [{name}]`")
    inside = dict(env) | {"HOME": HOME, "TMPDIR": "/tmp"}
    for variable in ("LD_LIBRARY_PATH", "PYTHONPATH"):
        inside.pop(variable, None)
    own = ["--perms", "1777", "--size", str(settings.disk), "--tmpfs", HOME]
    own += ["--perms", "1777", "--dir", f"{HOME}/tmp", "--symlink", f".{HOME}/tmp", "/tmp"]
    options = sandbox.system_of(root, inside, own=own)
    options += ["--perms", "0755", "--dir", INSIDE]
    for path in sorted(folder.iterdir()):
        options += ["--ro-bind", str(path), f"{INSIDE}/{path.name}"]
    options += [*sandbox.parents(str(base)), "--ro-bind", str(base), str(base)]
    no_folder, no_file = folder / NO_FOLDER, folder / "no-file"  # empty ones that nobody can read, for what is hidden
    no_folder.mkdir(mode=0)
    no_file.touch(mode=0)
    for path in hidden:
        options += ["--ro-bind", str(no_folder if path.is_dir() else no_file), str(path)]
    for path in readable:
        options += [*sandbox.parents(str(path)), "--ro-bind", str(path), str(path)]
    options += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", str(base), "--seccomp", str(_CALLS)]
    uid = sandbox.take_uid() if root else None
    if uid is not None:
        os.chown(folder / SOCKET, uid, uid)
    limits = {"NOFILE": _OPEN_FILES, "NPROC": settings.processes, "CORE": 0, "FSIZE": settings.disk}
    if settings.memory is not None:
        limits["AS"] = settings.memory
    enter = sandbox.entering(limits, uid, channel=_CHANNEL, code=_FORWARD)
    line = [sandbox.bubblewrap(), "--args", str(_ARGS), "--", *enter, str(port), f"{INSIDE}/{SOCKET}"]
    reads = [b"\0".join(map(os.fsencode, options)), system_calls.filter_program()]
    return Confined(
        command=[*line, "/bin/sh", "-c", command], reads=reads, files=settings.disk // sandbox.LEAST_FILE + 2, uid=uid
    )


def _hidden(base: Path, readable: Sequence[Path], private: set[Path]) -> Iterator[Path]:
    """What is hidden in the spec's folder: dot files, runs, stores, specs, and what is in `private`.

    Raises:
        OSError: The folder has too many files to look at.
    """
    above = {parent for path in readable for parent in path.parents}
    left, waiting = _MOST_ENTRIES, [(base, False)]
    while waiting:
        folder, hides_all = waiting.pop()
        try:
            entries = list(os.scandir(folder))
        except PermissionError:
            continue  # nor can the program read it, or else it is a folder that only root can read
        left -= len(entries)
        if left < 0:
            raise OSError(
                f"{base} has more than {_MOST_ENTRIES} files: give the spec and its program a folder of their own"
            )
        for entry in entries:
            path = Path(entry.path)
            if entry.is_symlink() or path in readable:
                continue
            hides = hides_all or path in private or _is_private(entry)
            if path in above or (not hides and entry.is_dir() and entry.name not in _PACKAGES):
                waiting.append((path, hides))
            elif hides:
                yield path


def _is_private(entry: os.DirEntry[str]) -> bool:
    if _PRIVATE.match(entry.name):
        return True
    if entry.is_dir():
        return any(Path(entry.path, name).exists() for name in _OF_RUN)
    if not entry.name.endswith((".yaml", ".yml")) or not entry.is_file():
        return False
    try:
        with Path(entry.path).open("rb") as file:
            return _SPEC.search(file.read(4096)) is not None
    except OSError:
        return True
