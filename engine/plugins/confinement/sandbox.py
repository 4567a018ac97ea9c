"""Tools that run Python or shell written by the model, in a sandbox of bubblewrap (`bwrap`).

    tools:
      - {use: "engine.plugins.confinement.sandbox:Python", name: python, with: {seconds: 5, memory: 512MB}}

A program gets: the system's programs and this interpreter's standard library, read-only; its own empty folder /work, in
memory; no network; no other process; no variable of the engine's environment; no privileges, and no namespace in which
it could gain some (`system_calls.py`). Each call starts a new sandbox.

Limits, and what enforces them: `seconds` (the program is killed; also RLIMIT_CPU), `memory` of each process
(RLIMIT_AS), `processes` (RLIMIT_NPROC in its own user namespace, or under its own uid), `disk` (the size of the folder;
files are counted five times a second), `output` (the program is killed).

Invariant: a program never runs with less protection than this, unless `allow_unprotected` is set. The sandbox is tested
on this machine once for each process, before the first program runs.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import structlog
from pydantic import TypeAdapter

from engine.plugins.confinement import system_calls
from engine.plugins.confinement.confine import Refused, free_uid
from engine.processes.system import SentFolder, memory_file
from engine.schemas.base import Bytes, Seconds

log = structlog.get_logger(__name__)

LONGEST_CODE = 200_000
"""Maximum length of one program, in characters."""
_PROBE_SECONDS = 30.0
ENTER = """
import os, resource, sys
uid, pids, channel, limits, *command = sys.argv[1:]
if uid:
    os.setgroups([])
    os.setresgid(int(uid), int(uid), int(uid))
    os.setresuid(int(uid), int(uid), int(uid))
for pair in filter(None, limits.split(",")):
    name, value = pair.split("=")
    kind = getattr(resource, "RLIMIT_" + name)
    most = min(int(value), resource.getrlimit(kind)[1] % 2**64)
    for pid in pids.split(","):
        resource.prlimit(int(pid), kind, (most, most))
if channel:
    import _socket
    work = os.open("/work", os.O_RDONLY | os.O_DIRECTORY).to_bytes(4, sys.byteorder)
    _socket.socket(fileno=int(channel)).sendmsg([b"."], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, work)])
    os.closerange(3, 256)
"""
"""Runs inside of the sandbox: changes from root to an unprivileged user, sets the limits (also of bubblewrap's process
1, which a program of the same user could take over), and sends the open folder /work out, so that its files can be
counted."""
_BOOT = f"{ENTER}os.execv(command[0], command)\n"


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one program."""

    seconds: float
    memory: int
    """Bytes of address space of each process."""
    processes: int
    """Maximum number of processes and threads."""
    disk: int
    """Bytes of its folder."""
    output: int
    """Maximum bytes of its output that are read."""


class ProgramResult(NamedTuple):
    """How a program ended."""

    output: str
    """Its output, stdout and stderr together; at most `limits.output` bytes."""
    status: int
    """Its exit status; negative: the signal that killed it."""
    stopped: str
    """Why the sandbox killed it: `time`, `output`, `disk`, or empty."""

    def shown(self, limits: SandboxLimits) -> str:
        """The tool's result."""
        notes = {
            "time": f"(stopped: it ran longer than {limits.seconds:g} s)",
            "output": f"(stopped: it printed more than {limits.output} bytes)",
            "disk": f"(stopped: its files take more than {limits.disk} bytes, each at least {LEAST_FILE})",
        }
        note = notes.get(self.stopped, "" if self.status == 0 else f"(exit status {self.status})")
        return "\n".join(filter(None, (self.output.rstrip("\n"), note))) or "(no output)"


_ROOT_NEEDS = ("CAP_SETUID", "CAP_SETGID")
"""Capabilities for the change to an unprivileged user, which drops them."""
LEAST_FILE = 4096
"""Bytes for which a file counts at least: an empty one takes memory too."""
_LOOK = 0.2
"""Seconds between two counts of a program's files."""
_uids: set[int] = set()
_uids_lock = threading.Lock()


def entering(
    limits: Mapping[str, int], uid: int | None = None, *, channel: int | None = None, code: str = _BOOT, pids: str = ""
) -> list[str]:
    """The command that enters the sandbox; the program's command follows.

    Args:
        limits: Resource limits by name, without `RLIMIT_`.
        uid: The user that it becomes; None: it stays who it is.
        channel: A socket on which it sends the open folder /work.
        code: What runs; it begins with `ENTER`.
        pids: The processes that get the limits; 0 is itself. Left out: itself, and process 1 if that is of the same
            user.
    """
    words = ",".join(f"{name}={value}" for name, value in limits.items())
    pids = pids or ("0,1" if uid is None else "0")
    return [host_python(), "-I", "-S", "-c", code, str(uid or ""), pids, str(channel or ""), words]


def run_sandboxed(program: Sequence[str], code: str, limits: SandboxLimits, *, protected: bool = True) -> ProgramResult:
    """Run a program to its end or to a limit. `{code}` in `program` is the path of a file with `code`.

    Args:
        program: Path of an interpreter, and its arguments.
        code: The text of the program.
        limits: Its limits.
        protected: Run it in bubblewrap; otherwise in a temporary folder with limits of only time, memory and output.

    Raises:
        OSError: it could not be started.
    """
    if not protected:
        with tempfile.TemporaryDirectory(prefix="unprotected-") as work:
            path = Path(work) / "code"
            path.write_text(code, encoding="utf-8", errors="surrogatepass")
            command = [part.replace("{code}", str(path)) for part in program]
            enter = entering(rlimits(limits, processes=False), pids="0")
            return finish_program([*enter, *command], limits, cwd=work)
    with ExitStack() as stack:
        uid = None
        if os.getuid() == 0:  # the kernel exempts the machine's root from RLIMIT_NPROC, so the program has its own uid
            stack.callback(give_uid, uid := take_uid())
        data = memory_file(code.encode("utf-8", "surrogatepass"))
        stack.callback(os.close, data)
        ours, theirs = map(stack.enter_context, socket.socketpair())
        own = ["--perms", "1777", "--size", str(limits.disk), "--tmpfs", "/work", "--symlink", "./work", "/tmp"]
        options = system_of(uid is not None, {"PATH": PATH, "HOME": "/work", "LANG": "C.UTF-8"}, own=own)
        options += ["--perms", "0444", "--file", str(data), "/code"]
        options += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/work"]
        inside = entering(rlimits(limits, processes=True), uid, channel=theirs.fileno())
        inside += [part.replace("{code}", "/code") for part in program]
        folder = SentFolder(ours)
        stack.callback(folder.close)
        fds = (data, theirs.fileno())
        return finish_sandboxed(
            options, inside, limits, fds=fds, size=lambda: (folder.files() - 1) * LEAST_FILE, look=_LOOK
        )


def finish_sandboxed(
    options: Sequence[str],
    inside: Sequence[str],
    limits: SandboxLimits,
    *,
    size: Callable[[], int],
    look: float,
    fds: Sequence[int] = (),
) -> ProgramResult:
    """`finish_program` of a command in bubblewrap, whose options are not seen in the table of processes."""
    with ExitStack() as stack:
        calls = memory_file(system_calls.filter_program())
        stack.callback(os.close, calls)
        read = memory_file(b"\0".join(map(os.fsencode, [*options, "--seccomp", str(calls)])))
        stack.callback(os.close, read)
        command = [bubblewrap(), "--args", str(read), "--", *inside]
        return finish_program(command, limits, fds=(read, calls, *fds), size=size, look=look)


def bubblewrap() -> str:
    """The path of bubblewrap."""
    return shutil.which("bwrap") or "bwrap"


def take_uid() -> int:
    """A uid for a program, which no other process has. `give_uid` gives it back.

    Raises:
        Refused: All are in use.
    """
    with _uids_lock:
        uid = free_uid(_uids)
        _uids.add(uid)
        return uid


def give_uid(uid: int) -> None:
    """Give a uid back."""
    with _uids_lock:
        _uids.discard(uid)


def host_python() -> str:
    """The path of the interpreter itself, outside of any virtual environment."""
    return os.path.realpath(sys.executable)


def rlimits(limits: SandboxLimits, *, processes: bool) -> dict[str, int]:
    """Resource limits by name."""
    values = {"AS": limits.memory, "CPU": int(limits.seconds) + 1, "FSIZE": limits.disk, "CORE": 0, "NOFILE": 256}
    return values | ({"NPROC": limits.processes} if processes else {})


PATH = "/usr/local/bin:/usr/bin:/bin"
"""Where programs in the sandbox are found."""


def system_of(
    root: bool, env: Mapping[str, str], writable: Mapping[str, Path] | None = None, own: Sequence[str] = ()
) -> list[str]:
    """The options of a sandbox with the system's programs.

    Args:
        root: The engine runs as root.
        env: The variables of its programs.
        writable: Folders and files that can be written, by their absolute path in the sandbox; nothing else can be.
            None lies in another one: bubblewrap would follow links that a program made there.
        own: Options for new folders that can be written; the interpreter may lie in a folder of the same name.

    Root needs no user namespace, and without one may become any user inside, also where only root may read the
    interpreter. Other users get one in which they are themselves, and in which RLIMIT_NPROC counts from zero.
    """
    command = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"]
    if root:
        command += ["--cap-drop", "ALL", *(part for name in _ROOT_NEEDS for part in ("--cap-add", name))]
    else:
        command += ["--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
    command += [part for name, value in env.items() for part in ("--setenv", name, value)]
    for folder in ("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin"):
        path = Path(folder)
        if path.is_symlink():
            command += ["--symlink", str(path.readlink()), folder]
        elif path.is_dir():
            command += ["--ro-bind", folder, folder]
    for place, source in (writable or {}).items():
        command += [*parents(place), "--bind", str(source), place]
    prefix = os.path.realpath(sys.base_prefix)
    command += [*own, *parents(prefix)]
    command += ["--perms", "0755", "--dir", "/etc"]
    for folder in ("/usr", *([] if Path(prefix).is_relative_to("/usr") else [prefix])):
        command += ["--ro-bind", folder, folder]
    command += [
        "--ro-bind-try",
        "/etc/ld.so.cache",
        "/etc/ld.so.cache",
        "--ro-bind-try",
        "/etc/alternatives",
        "/etc/alternatives",
    ]
    return [*command, "--proc", "/proc", "--dev", "/dev"]


def parents(path: str) -> list[str]:
    """Make the folders above a path, which bubblewrap would make for its own user only."""
    return [part for parent in reversed(Path(path).parents[:-1]) for part in ("--perms", "0755", "--dir", str(parent))]


def finish_program(
    command: list[str],
    limits: SandboxLimits,
    *,
    cwd: str = "/",
    fds: Sequence[int] = (),
    size: Callable[[], int] | None = None,
    look: float = 1.0,
) -> ProgramResult:
    """Start a command with an empty environment, read what it prints, and kill it at a limit.

    Args:
        command: The command line.
        limits: Its limits.
        cwd: The folder that it starts in.
        fds: File descriptors that it inherits.
        size: Gives the bytes of its files, where no file system limits them.
        look: Seconds between two calls of `size`.
    """
    deadline = time.monotonic() + limits.seconds
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={},
        cwd=cwd,
        pass_fds=fds,
        start_new_session=True,
    )
    assert process.stdout is not None
    printed, stopped = bytearray(), ""
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                stopped = "time"
                break
            if size is not None and size() > limits.disk:
                stopped = "disk"
                break
            if not select.select([process.stdout], [], [], left if size is None else min(left, look))[0]:
                continue
            chunk = os.read(process.stdout.fileno(), 65_536)
            if not chunk:
                break
            printed += chunk
            if len(printed) > limits.output:
                stopped = "output"
                break
        if not stopped:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:  # it closed its output and still runs
                stopped = "time"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
        status = process.wait()
        process.stdout.close()
    text = bytes(printed[: limits.output]).decode("utf-8", "replace")
    return ProgramResult(text, status, stopped)


_probe_lock = threading.Lock()


def refusal() -> str:
    """Why the sandbox does not work on this machine; empty if it does. Tested once for each user of the engine."""
    with _probe_lock:
        return _probe(os.getuid())


@cache
def _probe(uid: int) -> str:
    if sys.platform != "linux":
        return "bubblewrap needs Linux"
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed: `apt install bubblewrap`"
    if problem := system_calls.refusal():
        return problem
    limits = SandboxLimits(_PROBE_SECONDS, 10**9, 16, 10**6, 4096)
    try:
        result = run_sandboxed([host_python(), "-I", "{code}"], "print('works')", limits)
    except (OSError, Refused, subprocess.SubprocessError) as problem:
        return f"bubblewrap cannot be started: {problem}"
    if result.output.strip() != "works":
        return (
            "bubblewrap does not work here (user namespaces may be forbidden): "
            f"{result.output.strip()[:300] or result.status}"
        )
    return ""


class _Sandbox:
    """The settings of both tools.

    Args:
        seconds: Maximum time of one program; keep it below the tool's `timeout`.
        memory: Maximum address space of each of its processes.
        processes: Maximum number of processes and threads; together they may use `processes` times `memory`.
        disk: Maximum bytes in its folder.
        output: Maximum bytes of output.
        allow_unprotected: Where bubblewrap is missing or not permitted, run programs without it: they can then read,
            change and send everything that the engine's user can. The log warns.
    """

    _program: Sequence[str] = ()

    def __init__(
        self,
        seconds: float | str = 5.0,
        memory: int | str = "512MB",
        processes: int = 8,
        disk: int | str = "64MB",
        output: int | str = "16kB",
        allow_unprotected: bool = False,
    ) -> None:
        if processes < 1:
            raise ValueError(f"`processes` is {processes}; write at least 1")
        self._limits = SandboxLimits(
            TypeAdapter(Seconds).validate_python(seconds),
            TypeAdapter(Bytes).validate_python(memory),
            processes,
            TypeAdapter(Bytes).validate_python(disk),
            TypeAdapter(Bytes).validate_python(output),
        )
        problem = refusal()
        if problem and not allow_unprotected:
            raise RuntimeError(
                f"no sandbox for the model's programs: {problem}. Or write `allow_unprotected: true` under `with`: "
                "programs then run without protection, as the engine's user"
            )
        self._protected = not problem
        if problem:
            log.warning("the model's programs run without a sandbox", why=problem)

    def _run(self, code: str) -> str:
        if len(code) > LONGEST_CODE:
            raise ValueError(f"the program has {len(code)} characters; write at most {LONGEST_CODE}")
        return run_sandboxed(self._program, code, self._limits, protected=self._protected).shown(self._limits)


class Python(_Sandbox):
    """Runs Python programs of the model."""

    _program = (host_python(), "-I", "-B", "{code}")

    def __call__(self, code: str) -> str:
        """Run a Python program and show what it prints. No state is kept between calls.

        Args:
            code: The program. Use print to see results.
        """
        return self._run(code)


class Shell(_Sandbox):
    """Runs shell scripts of the model."""

    _program = ("/bin/sh", "{code}")

    def __call__(self, command: str) -> str:
        """Run a shell script and show what it prints. Nothing is kept between calls.

        Args:
            command: The script.
        """
        return self._run(command)
