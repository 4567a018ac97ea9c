"""Limits, uids and capabilities of one worker process; applied in the child after the fork.

The limits and their mechanisms:
- memory: `RLIMIT_DATA` (private memory of the process), or `RLIMIT_AS` where the kernel does not enforce the first.
  `plan` tests it before the first worker starts, so a limit that has no effect is refused.
- processes: `RLIMIT_NPROC`. The kernel counts all processes and threads of a uid and exempts root, so it limits one
  worker only if each worker has its own uid, which needs an engine that runs as root.
- uid: where the engine runs as root, a free uid of the range that systemd reserves for this use (61184 to 65519).
- files: such a uid may be unable to read the interpreter, installed packages or the spec's folder, where these lie
  below a private folder such as /root. The worker then keeps one capability, CAP_DAC_READ_SEARCH: it can read what root
  can read, like code in the engine's process, but cannot write root's files or signal its processes. If root itself
  does not have that capability, the limit is refused with a list of the paths.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pwd
import resource
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from engine.processes.system import adopt_orphans, die_with_parent

FIRST_UID, LAST_UID = 61_184, 65_519
_DAC_READ_SEARCH = 2
_KEEPCAPS, _AMBIENT, _RAISE = 8, 47, 2
_CAP_VERSION = 0x20080522
LEAST_MEMORY = 128 * 10**6
"""Bytes that a worker needs to start and to import numpy."""


class Refused(Exception):
    """A limit that cannot take effect here; the message says what to change."""


@dataclass(frozen=True)
class Confinement:
    """Limits of one worker."""

    memory: int
    """Bytes."""
    processes: int | None
    """Processes and threads; None for no limit."""
    uid: int | None
    """Uid of the worker; None for the engine's own user."""
    gid: int
    reads: bool
    """Whether it keeps CAP_DAC_READ_SEARCH."""
    as_limit: bool = False
    """Whether memory is limited by RLIMIT_AS instead of RLIMIT_DATA."""


def apply(confinement: Confinement) -> None:
    """Confine this process. Call it in the child, once."""
    libc = ctypes.CDLL(None, use_errno=True)
    os.setsid()
    adopt_orphans()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kind = resource.RLIMIT_AS if confinement.as_limit else resource.RLIMIT_DATA
    resource.setrlimit(kind, (confinement.memory, confinement.memory))
    if confinement.processes is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (confinement.processes, confinement.processes))
    if confinement.uid is not None:
        if confinement.reads:
            libc.prctl(_KEEPCAPS, 1, 0, 0, 0)
        os.setgroups([])
        os.setresgid(confinement.gid, confinement.gid, confinement.gid)
        os.setresuid(confinement.uid, confinement.uid, confinement.uid)
        if confinement.reads and not _keep_reading(libc):
            raise Refused("the capability to read files could not be kept")
    die_with_parent()  # after the change of uid, which clears this setting


def _keep_reading(libc: ctypes.CDLL) -> bool:
    """Keep only CAP_DAC_READ_SEARCH, also for programs that the worker starts."""
    header = struct.pack("Ii", _CAP_VERSION, 0)
    data = struct.pack("6I", *[1 << _DAC_READ_SEARCH] * 3, 0, 0, 0)  # effective, permitted, inheritable; higher numbers
    return bool(libc.capset(header, data) == 0 and libc.prctl(_AMBIENT, _RAISE, _DAC_READ_SEARCH, 0, 0) == 0)


def free_uid(taken: set[int]) -> int:
    """Return a uid of the range that no process uses and that is not in `taken`."""
    used = set(taken)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                used.add(entry.stat().st_uid)
            except OSError:
                continue
    count = LAST_UID - FIRST_UID + 1
    start = os.getpid() * 61 % count  # engines on one machine start at different uids
    for step in range(count):
        uid = FIRST_UID + (start + step) % count
        if uid not in used:
            return uid
    raise Refused(f"every uid from {FIRST_UID} to {LAST_UID} is in use; stop some workers")


def user_of(name: str) -> tuple[int, int]:
    """(uid, gid) of a system user, by name or number."""
    try:
        entry = pwd.getpwuid(int(name)) if name.isdigit() else pwd.getpwnam(name)
    except KeyError:
        if name.isdigit():
            return int(name), int(name)
        raise Refused(
            f"isolation.user: unknown user `{name}` on this machine; `id -un` shows the current one"
        ) from None
    return entry.pw_uid, entry.pw_gid


def plan(memory: int, processes: int | None, user: str | None, folders: Sequence[str]) -> Confinement:
    """Choose the confinement of workers with these limits, and test it in child processes.

    Raises:
        Refused: a limit cannot take effect here.
    """
    root = os.getuid() == 0
    own_uid = root and user is None
    if processes is not None and not own_uid:
        raise Refused(
            "isolation.processes cannot take effect: the kernel counts processes of a uid, and workers have their own "
            "uids only where the engine runs as root and isolation.user is not set. Remove `processes`, or run the "
            "engine as root"
        )
    if user is not None and user != "engine" and not root:
        raise Refused("isolation.user needs an engine that runs as root; remove `user`, or write `user: engine`")
    if memory < LEAST_MEMORY:
        raise Refused(f"isolation.memory is {memory} bytes; a worker needs at least {LEAST_MEMORY // 10**6}MB")
    uid, gid = (None, 0)
    if own_uid:
        uid = gid = free_uid(set())
    elif user is not None and user != "engine":
        uid, gid = user_of(user)
    confinement = Confinement(memory, 256 if processes is None and own_uid else processes, uid, gid, False)
    if uid is not None:
        confinement = _readable(confinement, folders)
    if not _binds(confinement, _memory_binds):
        confinement = replace(confinement, as_limit=True)
        if not _binds(confinement, _memory_binds):
            raise Refused("isolation.memory cannot take effect: this system enforces neither RLIMIT_DATA nor RLIMIT_AS")
    if confinement.processes is not None and not _binds(replace(confinement, processes=1), _processes_bind):
        raise Refused(
            "isolation.processes cannot take effect: this system does not enforce RLIMIT_NPROC for the workers' uid"
        )
    return confinement


def _readable(confinement: Confinement, folders: Sequence[str]) -> Confinement:
    """The same confinement, with the capability to read if a folder needs it."""
    wanted = [Path(folder) for folder in folders if Path(folder).exists()]
    can_read_all = partial(_can_read, *wanted)
    if _binds(confinement, can_read_all):
        return confinement
    reading = replace(confinement, reads=True)
    if _binds(reading, can_read_all):
        return reading
    closed = [str(path) for path in wanted if not _binds(confinement, partial(_can_read, path))]
    raise Refused(
        f"workers run as uid {confinement.uid} and cannot read {', '.join(closed[:4]) or 'the files of the engine'}: "
        "make it readable (chmod o+rx on each folder of its path), or write `user: engine` under `isolation` to run "
        "workers as the engine's own user"
    )


def _can_read(*paths: Path) -> bool:
    try:
        for path in paths:
            if path.is_dir():
                next(path.iterdir(), None)
            else:
                path.open("rb").close()
    except OSError:
        return False
    return True


def _memory_binds() -> bool:
    data = resource.getrlimit(resource.RLIMIT_DATA)[0]
    most = data if data != resource.RLIM_INFINITY else resource.getrlimit(resource.RLIMIT_AS)[0]
    try:
        mmap.mmap(-1, most, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return True
    return False


def _processes_bind() -> bool:
    try:
        pid = os.fork()
    except OSError:
        return True
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return False


def _binds(confinement: Confinement, holds: Callable[[], bool]) -> bool:
    """Whether `holds` is true in a child process with this confinement."""
    pid = os.fork()
    if pid == 0:
        status = 2
        try:
            apply(confinement)
            status = 0 if holds() else 1
        except BaseException:  # noqa: BLE001  (the exit status reports it)
            status = 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
