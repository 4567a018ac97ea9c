"""Programs of the model in the sandbox: what they can do, and every way out that was thought of."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from other_user import other_user

from engine.plugins.confinement import sandbox
from engine.plugins.confinement.sandbox import LONGEST_CODE, Python, Shell, refusal

needs_sandbox = pytest.mark.skipif(bool(refusal()), reason=f"no sandbox on this machine: {refusal()}")


@pytest.fixture
def python() -> Python:
    return Python(seconds=60, memory="256MB")


@needs_sandbox
def test_programs_run_and_show_what_they_print(python: Python) -> None:
    assert python("import math\nprint(math.factorial(20))") == "2432902008176640000"
    assert Shell(seconds=60)("echo hi > file; cat file; exit 3") == "hi\n(exit status 3)"
    failed = python("print('é')\n1 / 0")
    assert failed.startswith("é\n")
    assert failed.endswith("ZeroDivisionError: division by zero\n(exit status 1)")


C = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\ndef tried(value):\n  if value == -1: raise OSError(ctypes.get_errno(), 'no')\n"
INJECT = """
class Registers(ctypes.Structure):
  _fields_ = [(name, ctypes.c_ulonglong) for name in "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig rip cs flags rsp ss a b c d e f".split()]
trace, registers = libc.ptrace, Registers()
trace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
tried(trace(16, 1, None, None)); os.waitpid(1, 0x40000000)
trace(12, 1, None, ctypes.byref(registers))
registers.rax = registers.orig = 157; registers.rdi, registers.rsi = 1, 0; registers.rip -= 2
trace(13, 1, None, ctypes.byref(registers)); trace(9, 1, None, None); os.waitpid(1, 0x40000000)
trace(12, 1, None, ctypes.byref(registers))
print(ctypes.c_longlong(registers.rax).value)
raise PermissionError if registers.rax == 2**64 - 1 else SystemExit(0)
"""
ATTACKS = {  # name: (program, what it prints)
    "network": ("import socket; socket.create_connection(('1.1.1.1', 80), 5)", "Network is unreachable"),
    "parent's port": ("import socket; socket.create_connection(('127.0.0.1', {port}), 5)", "Connection refused"),
    "parent's file": ("print(open('{secret}').read())", "FileNotFoundError"),
    "symlink": ("import os; os.symlink('{secret}', 'a'); print(open('a').read())", "FileNotFoundError"),
    "root of pid 1": ("print(open('/proc/1/root{secret}').read())", "Error"),
    "shadow": ("print(open('/etc/shadow').read())", "FileNotFoundError"),
    "environ of pid 1": ("raise PermissionError(open('/proc/1/environ', 'rb').read())", "PermissionError"),
    "usr": ("open('/usr/x', 'w')", "Error"),
    "root": ("open('/x', 'w')", "Read-only file system"),
    "shm": ("open('/dev/shm/x', 'w')", "Read-only file system"),
    "code": ("open('/code', 'a')", "Error"),
    "setuid": ("import os; os.setuid(0)", "Error: [Errno "),
    "kill": ("import os; os.kill({engine}, 9)", "ProcessLookupError"),
    "memory": ("bytearray(10**10)", "MemoryError"),
    "large file": ("f = open('big', 'wb')\nfor _ in range(10_000): f.write(bytes(10**6))", "File too large"),
    "many files": ("for i in range(10):\n  with open(str(i), 'wb') as f: f.write(bytes(10**7))", "No space left on device"),
    "empty files": ("import os\nfor i in range(10**8): os.mknod(str(i))", "(stopped: its files take more than 50000000 bytes"),
    "attributes": ("import os\nfor i in range(10**8):\n  os.mknod(str(i))\n  for j in range(40): os.setxattr(str(i), f'user.{j}', bytes(60_000))", "(stopped: its files take"),
    "mount": (C + "tried(libc.mount(b'none', b'/work', b'tmpfs', 0, 0))", "PermissionError"),
    "user namespace": (C + "tried(libc.unshare(0x10000000))", "PermissionError"),
    "tmpfs in a namespace": ("import subprocess; subprocess.run(['unshare', '-Urm', 'sh', '-c', 'mount -t tmpfs x /work && head -c 200000000 /dev/zero > /work/big'], check=True)", "Operation not permitted"),
    "clone with a namespace": (C + "pid = libc.syscall({clone}, 0x10000011, 0, 0, 0, 0)\nif not pid: os._exit(0)\ntried(pid)", "PermissionError"),
    "clone3": (C + "tried(libc.syscall(435, 0, 0))", "[Errno 38]"),
    "memory files": ("import os\nheld = []\nwhile len(held) < 200:\n  held.append(os.memfd_create('x')); os.write(held[-1], bytes(10**6))", "PermissionError"),
    "shared memory": (C + "while True: tried(libc.shmget(0, 10**7, 0o1600))", "PermissionError"),
    "message queues": (C + "while True: tried(libc.msgget(0, 0o1600))", "PermissionError"),
    "keyring": (C + "tried(libc.syscall({keyctl}, 0, -3, 1))", "PermissionError"),
    "open files": ("import os\nwhile True: os.dup(1)", "Too many open files"),
    "limits": ("import resource; resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))", "not allowed to raise maximum limit"),
    "memory of pid 1": ("open('/proc/1/mem', 'r+b')\nwords = next(line for line in open('/proc/1/limits') if 'address space' in line)\nraise PermissionError if '256000000' in words else SystemExit(0)", "PermissionError"),
    "death signal": (C + "tried(libc.prctl(1, 0))", "PermissionError"),
    "control of pid 1": (C + INJECT, "PermissionError"),
    "read-only bind": (C + "tried(libc.mount(b'none', b'/usr', 0, 0x1020, 0))", "PermissionError"),
}  # fmt: skip
RUN = """
import json, os, sys
from engine.plugins.confinement.sandbox import Python
print(json.dumps({name: Python(seconds=60, memory="256MB", disk="50MB")(code) for name, code in json.loads(sys.argv[1]).items()}))
"""


@pytest.fixture(scope="module", params=["this user", "another user"])
def attacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the programs of all attacks said, by name."""
    secret = tmp_path_factory.mktemp("secret") / "secret"
    secret.write_text("hunter2")
    machine = ["x86_64", "aarch64"].index(platform.machine())
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:
        values = {"secret": secret, "engine": os.getpid(), "port": server.getsockname()[1]}
        values |= {"clone": (56, 220)[machine], "keyctl": (250, 219)[machine]}
        programs = {}
        for name, (code, _) in ATTACKS.items():
            for key, value in values.items():
                code = code.replace("{" + key + "}", str(value))
            programs[name] = code
        if request.param == "this user":
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("API_KEY", "hunter2")
                sandboxed = Python(seconds=60, memory="256MB", disk="50MB")
                return {name: sandboxed(code) for name, code in programs.items()}
        said = stack.enter_context(other_user()).run("-c", RUN, json.dumps(programs))
        return dict(json.loads(said))


@needs_sandbox
@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_there_is_no_way_out(name: str, attacked: dict[str, str]) -> None:
    if name == "control of pid 1" and platform.machine() != "x86_64":
        pytest.skip("it writes registers of x86_64")
    assert ATTACKS[name][1] in attacked[name]
    assert "hunter2" not in attacked[name]
    assert "(exit status" in attacked[name] or "(stopped" in attacked[name]


@needs_sandbox
@pytest.mark.slow
def test_no_variable_and_no_process_of_the_engine_is_seen(python: Python, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "hunter2")
    said = python(
        "import glob, os\nprint(sorted(os.environ))\nprint(len(glob.glob('/proc/[0-9]*')))\nprint(os.listdir('.'))\n"
        "print(sorted(os.listdir('/')))\nprint(os.listdir('/proc/self/fd'))"
    )
    variables, processes, here, root, files = said.split("\n")
    assert set(eval(variables)) <= {"HOME", "LANG", "LC_CTYPE", "PATH", "PWD"}
    assert int(processes) <= 2
    assert here == "[]"
    assert set(eval(root)) <= {"bin", "code", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32", "opt", "proc", "root", "sbin", "tmp", "usr", "work"}  # fmt: skip
    assert len(eval(files)) <= 4


@needs_sandbox
@pytest.mark.slow
def test_a_fork_bomb_is_bounded_and_leaves_nothing(python: Python) -> None:
    said = Python(seconds=60, processes=6)("import os, time\nn = 0\ntry:\n  while True:\n    if os.fork() == 0: time.sleep(1000)\n    n += 1\nexcept OSError:\n  print(n)")  # fmt: skip
    assert 1 <= int(said) <= 6
    began = time.monotonic()
    bomb = Shell(seconds=1, processes=6)("bomb() { bomb | bomb & }; bomb; while :; do :; done")
    assert "(stopped: it ran longer than 1 s)" in bomb or "(stopped: it printed more" in bomb or "fork" in bomb
    assert time.monotonic() - began < 60
    ours = [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit() and _child_of_this(entry)]
    assert ours == []


@needs_sandbox
@pytest.mark.slow
def test_an_interpreter_may_lie_in_the_folder_of_temporary_files() -> None:
    code = "import os; print(os.listdir('/tmp'), os.getcwd())"
    with other_user("/tmp") as other:
        said = json.loads(other.run("-c", RUN, json.dumps({"here": code})))
    assert said == {"here": f"['{other.folder.parent.name}'] /work"}


@needs_sandbox
@pytest.mark.slow
def test_a_user_whose_own_limits_are_lower_has_a_sandbox() -> None:
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    lower = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\n{RUN}"
    line = [sys.executable, "-c", lower, json.dumps({"open": code})]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout or "{}") == {"open": "(100, 100)"}, done.stderr


SURVIVE = (
    C
    + """
import sys, time
try:
  libc.prctl(1, 0)
finally:
  for _ in range(3):
    if not os.fork():
      os.setsid()
      if not os.fork():
        os.closerange(0, 256)
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(1000)", "SURVIVOR"])
      os._exit(0)
END
"""
)
LEAVE = """
import json, sys
from engine.plugins.confinement.sandbox import Python
print(json.dumps([Python(seconds=3)(code) for code in sys.argv[1:]]))
"""


@needs_sandbox
@pytest.mark.slow
@pytest.mark.parametrize("user", ["this user", "another user"])
def test_no_process_is_left_at_the_end_or_the_deadline(user: str) -> None:
    marker = f"survivor-{os.urandom(8).hex()}"
    code = SURVIVE.replace("SURVIVOR", marker)
    programs = [code.replace("END", end) for end in ("time.sleep(1)", "time.sleep(1000)")]
    if user == "this user":
        said = [Python(seconds=3)(program) for program in programs]
    else:
        with other_user() as other:
            said = json.loads(other.run("-c", LEAVE, *programs))
    assert said == ["(no output)", "(stopped: it ran longer than 3 s)"]
    until = time.monotonic() + 30
    while _running(marker) and time.monotonic() < until:
        time.sleep(0.05)
    assert _running(marker) == []


def _running(marker: str) -> list[str]:
    """Process ids of programs with an argument; the test's own command line has it inside of a longer one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if marker.encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
    return found


def _child_of_this(entry: Path) -> bool:
    try:
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
        return int(fields[1]) == os.getpid() and b"bwrap" in (entry / "cmdline").read_bytes()
    except OSError:
        return False


@needs_sandbox
@pytest.mark.slow
def test_output_without_end_is_cut(python: Python) -> None:
    said = Shell(seconds=60, output=1000)("yes | head -c 10000000000")
    assert said == "y\n" * 499 + "y\n(stopped: it printed more than 1000 bytes)"


@needs_sandbox
@pytest.mark.slow
@pytest.mark.parametrize("code", ["while True: pass", "import os; os.close(1); os.close(2)\nwhile True: pass"])
def test_a_program_without_end_is_stopped(code: str) -> None:
    assert Python(seconds=0.5)(code) == "(stopped: it ran longer than 0.5 s)"


@needs_sandbox
@pytest.mark.slow
def test_nothing_is_kept_between_calls(python: Python) -> None:
    assert python("open('a', 'w').write('x')") == "(no output)"
    assert "FileNotFoundError" in python("open('a')")


@needs_sandbox
@pytest.mark.slow
def test_programs_run_side_by_side() -> None:
    said: list[str] = []
    jobs = [threading.Thread(target=lambda n=n: said.append(Python(seconds=120)(f"print({n})"))) for n in range(8)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert sorted(said) == [str(n) for n in range(8)]


def test_without_bubblewrap_it_refuses_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_probe", sandbox._probe.__wrapped__)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        RuntimeError, match=r"bubblewrap is not installed: `apt install bubblewrap`. Or write `allow_unprotected"
    ):
        Python()
    monkeypatch.setenv("API_KEY", "hunter2")
    tool = Python(seconds=60, allow_unprotected=True)
    assert "hunter2" not in tool("import os; print(dict(os.environ))")
    assert "MemoryError" in tool("bytearray(10**10)")


def test_where_bubblewrap_is_not_permitted_it_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sandbox, "_probe", sandbox._probe.__wrapped__)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"may be forbidden.*No permissions to create new namespace"):
        Shell()


@needs_sandbox
@pytest.mark.slow
def test_programs_that_are_too_long_are_refused(python: Python) -> None:
    with pytest.raises(ValueError, match="write at most 200000"):
        python("#" * (LONGEST_CODE + 1))
    with pytest.raises(ValueError, match="write at least 1"):
        Python(processes=0)
