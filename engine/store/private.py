"""Files and folders that only their owner may read: runs hold what models and users said."""

from __future__ import annotations

import os
from pathlib import Path


def private_folder(path: Path, *, exist_ok: bool = False) -> None:
    """Make a folder of mode 0700; missing folders above it get 0755, less what the umask takes.

    A folder that others may write to would let them put another run in the place of this one.

    Raises:
        OSError: it exists, or cannot be made.
    """
    for folder in reversed(path.parents):
        folder.mkdir(mode=0o755, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=exist_ok)


def private_file(path: Path) -> Path:
    """Make an empty file of mode 0600, unless it is there; what writes to it keeps the mode.

    Raises:
        OSError: it cannot be made.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    return path
