"""Folders of processes: a run store has one writer, so each process of a trainer has a folder of its own."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout


@dataclass(frozen=True, slots=True)
class ProcessFolder:
    """The folder of this process, which no other living process takes until `release`."""

    path: Path
    number: int
    """The number of the folder, from 0."""
    lock: FileLock

    @classmethod
    def take(cls, folder: Path) -> Self:
        """Take the first `process-<number>` of a folder that no living process has."""
        folder.mkdir(parents=True, exist_ok=True)
        for number in count():
            # another thread may release it
            lock = FileLock(folder / f"process-{number}.lock", thread_local=False)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            return cls(folder / f"process-{number}", number, lock)
        raise AssertionError  # `count` does not end

    def release(self) -> None:
        """Leave the folder to another process."""
        self.lock.release()
