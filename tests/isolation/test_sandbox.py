"""Programs of the model in the sandbox: what they can do, and every way out that was thought of."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from engine.isolation import sandbox
from engine.isolation.sandbox import LONGEST_CODE, Python, Shell, refusal

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


@needs_sandbox
@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import socket; socket.create_connection(('1.1.1.1', 80), 5)", "Network is unreachable"),
        ("import socket; socket.create_connection(('127.0.0.1', {port}), 5)", "Connection refused"),
        ("print(open('{secret}').read())", "FileNotFoundError"),
        ("import os; os.symlink('{secret}', 'a'); print(open('a').read())", "FileNotFoundError"),
        ("print(open('/proc/1/root{secret}').read())", "Error"),
        ("print(open('/etc/shadow').read())", "FileNotFoundError"),
        ("raise PermissionError(open('/proc/1/environ', 'rb').read())", "PermissionError"),
        ("open('/usr/x', 'w')", "Error"),
        ("open('/x', 'w')", "Read-only file system"),
        ("open('/dev/shm/x', 'w')", "Read-only file system"),
        ("open('/code', 'a')", "Error"),
        ("import os; os.setuid(0)", "PermissionError"),
        ("import os; os.kill({engine}, 9)", "ProcessLookupError"),
        ("bytearray(10**10)", "MemoryError"),
        ("f = open('big', 'wb')\nfor _ in range(10_000): f.write(bytes(10**6))", "File too large"),
        ("for i in range(10):\n  with open(str(i), 'wb') as f: f.write(bytes(10**7))", "No space left on device"),
        ("import ctypes; libc = ctypes.CDLL(None, use_errno=True)\nif libc.mount(b'none', b'/work', b'tmpfs', 0, 0): raise OSError(ctypes.get_errno(), 'no')", "PermissionError"),
    ],
    ids=["network", "parent's port", "parent's file", "symlink", "root of pid 1", "shadow", "environ of pid 1", "usr", "root",
         "shm", "code", "setuid", "kill", "memory", "large file", "many files", "mount"],
)  # fmt: skip
def test_there_is_no_way_out(code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "hunter2")
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    with socket.create_server(("127.0.0.1", 0)) as server:
        filled = code.replace("{secret}", str(secret)).replace("{engine}", str(os.getpid()))
        said = Python(seconds=60, memory="256MB", disk="50MB")(filled.replace("{port}", str(server.getsockname()[1])))
    assert words in said
    assert "hunter2" not in said
    assert "(exit status" in said


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
    monkeypatch.setattr(sandbox, "_probed", {})
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
    monkeypatch.setattr(sandbox, "_probed", {})
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
