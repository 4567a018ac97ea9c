"""A child answers, or there is an error: however it ends, it never looks like an answer."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.processes.forked import Child, ChildError, refuse_outside

SPACE = 4 * 2**30
Doing = Callable[[str], None]


@contextlib.contextmanager
def child(answer: Callable[[bytes, Doing], bytes], **more: bool):  # type: ignore[no-untyped-def]
    found = Child(answer, memory=SPACE, **more)
    try:
        yield found
    finally:
        found.close()


def test_it_answers_as_often_as_it_is_asked() -> None:
    with child(lambda request, doing: request.upper()) as found:
        assert [found.ask(text, 30) for text in (b"a", b"", b"x" * 3_000_000)] == [b"A", b"", b"X" * 3_000_000]


def test_it_has_no_input_and_none_of_its_parents_files() -> None:
    with open(os.devnull, "rb") as stream:  # noqa: PTH123
        number = stream.fileno()

        def answer(request: bytes, doing: Doing) -> bytes:
            try:
                os.fstat(number)
            except OSError:
                return sys.stdin.read().encode() + os.read(0, 10) + b"closed"
            return b"open"

        with child(answer) as found:
            assert found.ask(b"", 30) == b"closed"


def test_what_it_prints_is_kept_apart() -> None:
    def answer(request: bytes, doing: Doing) -> bytes:
        print("from Python")
        os.write(2, b"from below\n")
        return b"ok"

    with child(answer, capture=True) as found:
        assert found.ask(b"", 30) == b"ok"
        found.close()
        assert found.printed == b"from Python\nfrom below\n"


def ends(code: int) -> Callable[[], object]:
    return lambda: os._exit(code)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (ends(0), "the process ended with status 0 (at work)"),
        pytest.param(ends(3), "the process ended with status 3 (at work)", marks=pytest.mark.slow),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "the process was killed by SIGKILL (at work)"),
        pytest.param(
            lambda: os.kill(os.getpid(), signal.SIGSEGV),
            "the process was killed by SIGSEGV (at work)",
            marks=pytest.mark.slow,
        ),
        (lambda: sys.exit(0), "the process ended with status 70 (at work)"),
        (lambda: ctypes.CDLL(None)._exit(0), "the process ended with status 0 (at work)"),
    ],
)
def test_ending_is_no_answer(end: Callable[[], object], message: str) -> None:
    def answer(request: bytes, doing: Doing) -> bytes:
        doing("at work")
        end()
        return b"never"

    with child(answer, capture=True) as found, pytest.raises(ChildError) as caught:
        found.ask(b"", 30)
    assert str(caught.value) == message


def test_bytes_without_the_token_are_no_answer() -> None:
    def answer(request: bytes, doing: Doing) -> bytes:
        for end in range(3, 4096):  # the test process may have many open files
            with contextlib.suppress(OSError):
                os.write(end, bytes(24) + b"forged")
        time.sleep(60)
        return b"never"

    with child(answer) as found, pytest.raises(ChildError) as caught:
        found.ask(b"", 30)
    assert str(caught.value) == "the process sent an invalid answer"


@pytest.mark.slow
def test_one_that_takes_too_long_is_ended_with_what_it_started() -> None:
    def answer(request: bytes, doing: Doing) -> bytes:
        started = os.fork()
        if started:
            print(started)
        time.sleep(600)
        return b"never"

    with child(answer, capture=True) as found:
        with pytest.raises(ChildError, match=r"it took more than 1 s"):
            found.ask(b"", 1)
        started = int(found.printed)
        for _ in range(600):
            with contextlib.suppress(FileNotFoundError):
                if " Z " not in Path(f"/proc/{started}/stat").read_text():
                    time.sleep(0.05)
                    continue
            break
        else:
            pytest.fail("what it started lives on")


def test_memory_is_limited() -> None:
    def answer(request: bytes, doing: Doing) -> bytes:
        try:
            bytearray(SPACE + 2**30)
        except MemoryError:
            return b"refused"
        return b"given"

    with child(answer) as found:
        assert found.ask(b"", 30) == b"refused"


@pytest.mark.parametrize(
    "action",
    [
        lambda: os.system("true"),
        lambda: subprocess.run(["true"], check=True),
        lambda: os.execv("/bin/true", ["true"]),
        lambda: socket.create_connection(("127.0.0.1", 9), timeout=1),
        lambda: socket.getaddrinfo("localhost", 80),
    ],
)
def test_a_process_may_be_kept_from_the_network_and_from_programs(action: Callable[[], object]) -> None:
    def answer(request: bytes, doing: Doing) -> bytes:
        refuse_outside()
        refuse_outside()
        try:
            action()
        except PermissionError as error:
            return str(error).partition(" ")[2].encode()
        return b"done"

    with child(answer) as found:
        assert found.ask(b"", 30) == b"is refused while a spec is checked without its code"
