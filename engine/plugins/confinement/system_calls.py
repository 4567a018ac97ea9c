"""The filter of system calls for programs in the sandbox (seccomp, as a BPF program for `bwrap --seccomp`).

Refused is what would go past the sandbox's limits: new namespaces (in a user namespace a program may mount a file
system of any size), memory that belongs to no process and no folder (memfd, System V IPC), keys of the engine's user
(keyrings have no namespace), and io_uring, bpf and userfaultfd, which programs do without and through which kernels
were broken. `clone3` does not exist, so that C libraries use `clone`, whose flags the filter can read. The signal by
which process 1, and all with it, dies with bubblewrap stays set: process 1 may be of the program's user, who can make
it call what he wants. Programs of another architecture, for example of 32 bits, are killed.
"""

from __future__ import annotations

import errno
import platform
import struct

_CALLS = {  # (x86_64, aarch64)
    "add_key": (248, 217),
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "msgget": (68, 186),
    "perf_event_open": (298, 241),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setns": (308, 268),
    "shmget": (29, 194),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
_CLONE, _CLONE3, _PRCTL = (56, 220), (435, 435), (157, 167)
_SET_DEATH_SIGNAL, _SIGKILL = 1, 9
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH of `linux/audit.h`, in the order of the numbers above."""
_NEW_NAMESPACE = 0x7E02_0000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_X32 = 0x4000_0000
"""Numbers from here on are those of x32, a second set for the same calls."""
_LOAD, _EQUAL, _FROM, _ANY, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_ALLOW, _KILL, _FAIL = 0x7FFF_0000, 0x8000_0000, 0x0005_0000


def refusal() -> str:
    """Why there is no filter for this machine; empty if there is one."""
    machine = platform.machine()
    return (
        ""
        if machine in _ARCHITECTURES
        else f"no filter of system calls for {machine}, only for {', '.join(_ARCHITECTURES)}"
    )


def filter_program() -> bytes:
    """The filter for this machine.

    Raises:
        KeyError: There is none (`refusal`).
    """
    machine = platform.machine()
    index = list(_ARCHITECTURES).index(machine)
    lines = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, _ARCHITECTURES[machine]), (_RETURN, 0, 0, _KILL)]
    lines += [(_LOAD, 0, 0, _NUMBER), (_FROM, 0, 1, _X32), (_RETURN, 0, 0, _FAIL | errno.ENOSYS)]
    for number, code in [(_CLONE3[index], errno.ENOSYS), *((pair[index], errno.EPERM) for pair in _CALLS.values())]:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _FAIL | code)]
    lines += [(_EQUAL, 0, 6, _PRCTL[index]), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUAL, 0, 3, _SET_DEATH_SIGNAL)]
    lines += [(_LOAD, 0, 0, _SECOND_ARGUMENT), (_EQUAL, 1, 0, _SIGKILL), (_RETURN, 0, 0, _FAIL | errno.EPERM)]
    lines += [(_RETURN, 0, 0, _ALLOW)]
    lines += [(_EQUAL, 0, 3, _CLONE[index]), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    lines += [(_ANY, 0, 1, _NEW_NAMESPACE), (_RETURN, 0, 0, _FAIL | errno.EPERM), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)
