"""The end of a command: its exit status, signals, and threads of a spec's code that do not end.

| signal | what it does |
|---|---|
| first Ctrl-C (SIGINT) | a clean stop: running episodes stop at the last entry of their journals |
| SIGTERM | the same; the process exits after `GRACE_SECONDS` (`train.checkpoints.grace`) at the latest |
| second Ctrl-C, second SIGTERM | exits immediately |

A run's store does not need to be closed: acknowledged writes are on the disk, so an immediate exit loses none of them.

The handlers run in the main thread between two instructions. They do not need the event loop, but they need Python to
run: code in C that never releases the interpreter's lock blocks them too.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TypeVar

import typer

from engine.terminal import echo

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")
DONE = 0
"""Every episode has ended, one of them without a failure. A failed episode is a result."""
ERROR = 1
"""The spec is invalid, something could not be read, written or finished, or every episode failed."""
USAGE = 2
"""The command line is wrong."""
FAILED = 3
"""No server could be reached, the first episodes all failed with one cause, or the backend failed more than 10 % of the
episodes."""
INTERRUPTED = 130
"""Ctrl-C: 128 plus the signal's number, as in shells."""
TERMINATED = 143
"""SIGTERM: 128 plus the signal's number, as in shells."""
GRACE_SECONDS = 20.0
"""Maximum duration of a clean stop after SIGTERM."""
EXIT_SECONDS = 3.0
"""How long the process waits at its end for threads that a spec's code has started."""
SIGNALS = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}
"""The signals that stop a command, each with its exit status."""

_received: list[int] = []
"""The signals that this process received while a command ran, in order."""


def wrong_usage(words: str) -> NoReturn:
    """Print what is wrong with the command line.

    Raises:
        typer.Exit: with status 2.
    """
    echo(words, err=True)
    raise typer.Exit(USAGE)


@contextlib.contextmanager
def errors_exit(status: int) -> Iterator[None]:
    """Set logging up for a command; an error of the engine inside the block is printed, and ends the command with this
    status, or with `FAILED` where it stops a run."""
    from engine.errors import EngineError
    from engine.logs import configure_logging

    configure_logging()
    try:
        yield
    except EngineError as error:
        echo(str(error), err=True)
        raise typer.Exit(FAILED if error.stops_run else status) from None


def interrupted() -> int:
    """Return the exit status of a command that was stopped: 143 after SIGTERM, else 130."""
    return SIGNALS[signal.SIGTERM] if signal.SIGTERM in _received else SIGNALS[signal.SIGINT]


@contextlib.contextmanager
def stop_on_signals(stop: asyncio.Event, hint: str = "", grace: float | None = None) -> Iterator[None]:
    """Inside the block, set `stop` on the first signal and exit on the second.

    Args:
        stop: An event of the running loop.
        hint: How to continue after an immediate exit, which prints it.
        grace: Maximum seconds of a clean stop after SIGTERM. Default: `GRACE_SECONDS`.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    seconds = GRACE_SECONDS if grace is None else grace
    _received.clear()

    def handle(number: int, frame: FrameType | None) -> None:
        again = number in _received or (number == signal.SIGINT and bool(_received))
        _received.append(number)
        if again:
            leave_now(interrupted(), hint)
        if number == signal.SIGTERM:
            _say(f"Stopping; the process exits in {seconds:g} s at the latest.")
            timer = threading.Timer(seconds, leave_now, (interrupted(), hint))
            timer.daemon = True
            timer.start()
        else:
            _say("Stopping. Press Ctrl-C again to stop at once.")
        with contextlib.suppress(RuntimeError):  # the loop is closed, because it has ended by itself
            loop.call_soon_threadsafe(stop.set)

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


async def until_signal(run: Callable[..., Awaitable[T]], hint: str, grace: float | None = None) -> T:
    """Await `run(stop=…)` to its end, or until a signal sets `stop`; `hint` and `grace` as for `stop_on_signals`."""
    import asyncio

    stop = asyncio.Event()
    with stop_on_signals(stop, hint, grace):
        return await run(stop=stop)


def leave_now(status: int, hint: str = "") -> None:
    """End the process without waiting for anything. Safe in a signal handler and in a thread.

    Runs that it has open are marked as stopped, so that the exit does not count as a crash for their episodes.
    """
    if (locks := sys.modules.get("engine.store.lock")) is not None:
        locks.mark_all_stopped()
    if hint:
        _say(f"Stopped at once. {hint}")
    if sys.stdout.isatty():
        with contextlib.suppress(OSError):
            os.write(1, b"\x1b[?25h")  # a progress display hides the cursor
    with contextlib.suppress(Exception):  # another thread may be writing
        sys.stdout.flush()
    os._exit(status)


def leave_hung_code_behind(status: int) -> None:
    """Make the process exit with `status` even if a spec's code hangs. Call this last.

    Python waits without limit for threads that are not daemons, and closes coroutines that have not ended, which may
    never end. Functions of `atexit` are called and waited for as usual.
    """

    def watch() -> None:
        main = threading.main_thread().ident or 0
        while not _waits_for_threads(sys._current_frames().get(main)):
            pause.wait(0.1)
        pause.wait(EXIT_SECONDS)
        if _waits_for_threads(sys._current_frames().get(main)):
            leave_now(status)

    pause = threading.Event()
    threading.Thread(target=watch, name="exit", daemon=True).start()
    code_loop = sys.modules.get("engine.actions.calling.code_loop")
    if code_loop is not None and code_loop.unfinished_tasks:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stderr.flush()
        leave_now(status)


def _waits_for_threads(frame: FrameType | None) -> bool:
    waits = threading._shutdown.__code__  # type: ignore[attr-defined]
    while frame is not None and frame.f_code is not waits:
        frame = frame.f_back
    return frame is not None


def _say(words: str) -> None:
    """Print to standard error without a lock, because the interrupted code may hold it."""
    with contextlib.suppress(OSError):
        os.write(2, f"{words}\n".encode())
