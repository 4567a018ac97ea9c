"""Files and folders that only their owner can read, because runs contain conversations."""

from __future__ import annotations

import os
from pathlib import Path


def private_folder(path: Path, *, exist_ok: bool = False) -> None:
    """Create a folder with mode 0700. Missing parent folders get mode 0755, restricted by the umask.

    If others could write to the folder, they could replace the run.

    Raises:
        OSError: the folder exists, or cannot be created.
    """
    for folder in reversed(path.parents):
        folder.mkdir(mode=0o755, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=exist_ok)


def private_file(path: Path) -> Path:
    """Create an empty file with mode 0600 if it does not exist. Writing to it keeps the mode.

    Raises:
        OSError: the file cannot be created.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    return path
