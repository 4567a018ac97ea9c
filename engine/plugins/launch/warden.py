"""The parent process of one launched server: ends the server when the engine ends, however that happens.

The engine starts this file as a script (`engine.processes.system:script`), and holds the other end of its standard
input. When the engine dies, also by SIGKILL, that end closes, and the warden ends the server's process group. It needs
only the standard library, and stays under 15 MB.

    warden.py SECONDS COMMAND...     # exit status: that of the server
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

from engine.processes.system import die_with_parent, send_signal


def main() -> None:
    """Start the command, and wait for its end or for the end of standard input."""
    grace, command = float(sys.argv[1]), sys.argv[2:]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent)
    os.set_inheritable(0, False)
    threading.Thread(target=_end_with_engine, args=(process, grace), daemon=True).start()
    status = process.wait()
    send_signal(process.pid, group=True)  # what the server started and left behind
    os._exit(status if status >= 0 else 128 - status)


def _end_with_engine(process: subprocess.Popen[bytes], grace: float) -> None:
    while os.read(0, 4096):
        pass
    send_signal(process.pid, signal.SIGTERM, group=True)
    ends = time.monotonic() + grace
    while process.poll() is None and time.monotonic() < ends:
        time.sleep(0.05)
    send_signal(process.pid, group=True)


if __name__ == "__main__":
    main()
