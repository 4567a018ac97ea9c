"""One writer to a run.

Invariant: the lock is the kernel's (`flock`), so it goes with the process that held it, however that died; what
the file says is for people alone.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from engine.errors import StoreError
from engine.store.private import private_file

FILE = "run.lock"


class RunLock:
    """Holds the lock of a run's folder from construction to `release`.

    Raises:
        StoreError: another writer has the run open.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._file = private_file(folder / FILE).open("a+")
        except OSError as error:
            raise StoreError(f"cannot write in {folder}: {error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip()
            self._file.close()
            raise StoreError(
                f"{folder} is being written by process {holder or '(unknown)'}; wait for it or stop it. Reading needs no lock."
            ) from None
        except OSError as error:
            self._file.close()
            raise StoreError(f"{folder} cannot be locked: {error}; runs need a file system with flock") from error
        try:
            os.truncate(self._file.fileno(), 0)
            os.write(self._file.fileno(), f"{os.getpid()}\n".encode())
        except OSError as error:
            self._file.close()
            raise StoreError(f"cannot write in {folder}: {error}; make room on the disk") from error

    def release(self) -> None:
        """Let another writer in. Doing it twice is harmless."""
        self._file.close()


def is_held(folder: Path) -> bool:
    """Whether some writer has the run open now."""
    try:
        with (folder / FILE).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
            return False
    except OSError:
        return False
