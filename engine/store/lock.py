"""The lock that allows one writer per run.

Invariant: the lock is the kernel's (`flock`), so it ends with the process that held it, also if that was killed. The
file says which process holds it, and whether that process stopped on purpose: a stop on a full disk, or an immediate
exit, can write nothing into the store.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from pathlib import Path

from engine.errors import StoreError
from engine.store.private import private_file

FILE = "run.lock"
STOPPED = "stopped"
"""Written after the process id by `RunLock.mark_stopped`. The file's block is allocated already, so this works on a
full disk."""

_held: weakref.WeakSet[RunLock] = weakref.WeakSet()
"""The locks that this process holds."""


class RunLock:
    """Holds the lock of a run's folder from construction to `release`.

    Raises:
        StoreError: another writer has the run open.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._file = private_file(folder / FILE).open("r+")
        except OSError as error:
            raise StoreError(f"cannot write in {folder}: {error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip()
            self._file.close()
            raise StoreError(
                f"{folder} is being written by process {holder or '(unknown)'}; wait for it or stop it (reading needs "
                "no lock)"
            ) from None
        except OSError as error:
            self._file.close()
            raise StoreError(f"{folder} cannot be locked: {error}; runs need a file system with flock") from error
        try:
            self._before = self._file.read()
            self.was_stopped = STOPPED in self._before
            """Whether the previous holder of the lock called `mark_stopped`."""
            self._write(f"{os.getpid()}\n")
        except OSError as error:
            self._file.close()
            raise StoreError(f"cannot write in {folder}: {error}; free space on the disk") from error
        _held.add(self)

    def mark_stopped(self) -> None:
        """Record that this process ends on purpose, not by a crash. Safe in a signal handler."""
        with contextlib.suppress(OSError, ValueError):
            self._write(f"{os.getpid()}\n{STOPPED}\n")

    def restore(self) -> None:
        """Restore the previous content of the file, after the run could not be opened."""
        with contextlib.suppress(OSError, ValueError):
            self._write(self._before)

    def _write(self, text: str) -> None:
        size = os.pwrite(self._file.fileno(), text.encode(), 0)
        os.ftruncate(self._file.fileno(), size)

    def release(self) -> None:
        """Release the lock. A second call has no effect."""
        self._file.close()


def mark_all_stopped() -> None:
    """Call `mark_stopped` on each lock that this process holds, before an exit that closes no store."""
    for lock in list(_held):
        lock.mark_stopped()


def is_held(folder: Path) -> bool:
    """Return whether a writer has the run open now."""
    try:
        with (folder / FILE).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
            return False
    except OSError:
        return False
