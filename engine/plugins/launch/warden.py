"""The parent process of one launched server: ends the server when the engine ends, however that happens.

The engine starts this file as a script, without imports of its own, and holds the other end of its standard input. When the
engine dies, also by SIGKILL, that end closes, and the warden ends the server's process group. It needs only the standard
library, and stays under 15 MB.

    python -I -S warden.py SECONDS COMMAND...     # exit status: that of the server
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Start the command, and wait for its end or for the end of standard input."""
    grace, command = float(sys.argv[1]), sys.argv[2:]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent)
    os.set_inheritable(0, False)
    threading.Thread(target=_end_with_engine, args=(process, grace), daemon=True).start()
    status = process.wait()
    _signal(process, signal.SIGKILL)  # what the server started and left behind
    os._exit(status if status >= 0 else 128 - status)


def _die_with_parent() -> None:
    """In the new process: SIGKILL when the warden dies. It has one thread at this time, so this may run Python code."""
    with contextlib.suppress(OSError, AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_engine(process: subprocess.Popen[bytes], grace: float) -> None:
    while os.read(0, 4096):
        pass
    _signal(process, signal.SIGTERM)
    ends = time.monotonic() + grace
    while process.poll() is None and time.monotonic() < ends:
        time.sleep(0.05)
    _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


if __name__ == "__main__":
    main()
